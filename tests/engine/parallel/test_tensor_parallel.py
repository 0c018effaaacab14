"""A model that is split over processes emits the tokens of the whole model, for every shape, drafter and mode."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.parallel.ranks import ALONE
from models import load_model
from models.checkpoints.loading import save_checkpoint
from models.tensor_parallel import Shard, shard_config
from tests.support import parallel_cases
from tests.support.rank_jobs import forked
from tests.support.tiny import TINY, tiny_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    parallel_cases.write_checkpoints(folder)
    return folder


SLOW = (pytest.param(n_ranks, "every case", marks=pytest.mark.slow) for n_ranks in (2, 4))


@pytest.mark.parametrize("n_ranks,selection", [(2, "every drafter"), *SLOW])
def test_tokens_and_counts_are_those_of_one_process(n_ranks, selection, checkpoints, tmp_path, record_property):
    """Rejection mode draws equal random numbers, from distributions that differ by rounding."""
    ended = forked(n_ranks, tmp_path, parallel_cases.run_cases, checkpoints, tmp_path / "results.json", selection)
    assert ended.code == 0, ended.err
    results = json.loads((tmp_path / "results.json").read_text())
    together = results["cases"]
    cases = parallel_cases.cases_of(selection)
    alone = {case.name: parallel_cases.run_case(case, checkpoints, ALONE) for case in cases}
    assert list(together) == list(alone)
    for name, by_rank in together.items():
        assert by_rank == [alone[name]] * n_ranks, f"{name} on {n_ranks} ranks"
    rows = [row for case in alone.values() for row in case["counts"] if row["drafted"]]
    assert any(0 < sum(row["accepted_at"]) < sum(row["verified_at"]) for row in rows), "some drafts are rejected"
    name, rounding_apart = results["apart"]
    assert rounding_apart == [alone[name]] * n_ranks, "the leader alone decides"
    assert all("ranks disagree" in said and f"rank {n_ranks - 1}" in said for said in results["disagree"])
    for group_size, logits in results["logits"].items():
        whole = parallel_cases.packed_logits(int(group_size), checkpoints, None)
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(whole), rtol=1e-4, atol=1e-4)
    record_property(f"count: float64 runs on {n_ranks} ranks equal to one process", len(together))


def test_a_rank_uses_the_memory_of_its_shard(tmp_path):
    """A rank keeps only its shard, packed or not: no view keeps the whole file, and no weight is stored twice."""
    part = SimpleNamespace(shard=Shard(1, 2), all_reduce=lambda x: x, gather=lambda x, vocab_size: x)
    config = replace(TINY, vocab_size=128, dim=64, n_head=8, n_kv_head=8, ffn_dim=64)  # shards of whole blocks
    save_checkpoint(tmp_path / "model.pth", config, tiny_model(config).state_dict())
    n_parameters = shard_config(config, part.shard).n_parameters
    model = load_model(tmp_path, config=config, dtype=torch.float64, exchange=part)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == 8 * n_parameters
    packed = load_model(tmp_path, config=config, exchange=part)
    assert sum(tensor.numel() for tensor in (*packed.parameters(), *packed.buffers())) == n_parameters
