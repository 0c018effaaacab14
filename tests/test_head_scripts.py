"""Programs whose drafts are Medusa or EAGLE heads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import Ended, benchmark, run
from published_heads import eagle_config, eagle_tensors, medusa_tensors, save_head
from rank_jobs import N_PROMPTS, SIZES, Models

from bench.config import RunConfig, Sizes, Target
from bench.memory import memory_plan
from bench.plan import resolve
from engine.drafters.eagle import EagleConfig
from engine.drafters.medusa import MedusaConfig
from models import ModelConfig
from models.heads.loading import find_head

EAGLE = "--draft eagle --draft_dtype same --draft_budget 24"
COUPLED = "--verification coupled --temperature 2.5 --seed 3"


@pytest.fixture(scope="module")
def heads(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with heads `medusa`, `eagle-1` and `eagle-3` for the target, which lack what they can borrow."""
    folder, target = tmp_path_factory.mktemp("heads"), ModelConfig.from_json(models.target / "config.json")
    save_head(folder / "medusa", medusa_tensors(target), {"medusa_num_layers": 2}, "medusa_lm_head.pt")
    first = eagle_tensors(target, 1)
    del first["embed_tokens.weight"]
    save_head(folder / "eagle-1", first, eagle_config(target, 1), "pytorch_model.bin")
    options = {"draft_vocab_size": 90, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    save_head(folder / "eagle-3", eagle_tensors(target, n_draft=90), eagle_config(target, **options))
    return folder


def arguments(models: Models, head: Path, flags: str) -> list[str]:
    paths = ["--target", str(models.target), "--model", str(head), "--dataset", str(models.books)]
    return [*paths, *SIZES.split(), *flags.split()]


@pytest.mark.parametrize(
    "head,flags,capacity",
    [
        ("medusa/medusa_lm_head.pt", f"--draft medusa --gamma auto {COUPLED}", None),
        ("eagle-3", f"{EAGLE} --gamma 2 {COUPLED}", 24),
        ("eagle-3", "--draft eagle --draft_policy full --gamma 3 --draft_kv_dtype int8", 76),
        ("eagle-1", f"{EAGLE} --gamma auto --draft_positions cache", 24),
    ],
)
def test_the_benchmark_drafts_with_heads(models, heads, head, flags, capacity):
    ended = benchmark("longspec", arguments(models, heads / head, flags))
    assert ended.code == 0, ended.err
    record = ended.record
    assert record["identical_sequences"] == record["sequences"] == N_PROMPTS
    assert (record["draft"], record["draft_budget"]) == (flags.split()[1], capacity)
    assert record["draft_model"] == Path(head).parts[0] and record["drafted"] >= 0
    assert record["draft_borrows"] == (["embedding", "output layer"] if head == "eagle-1" else [])


@pytest.mark.parametrize("draft", [EagleConfig, MedusaConfig])
def test_the_memory_plan_counts_the_head(models, heads, draft):
    path = heads / ("eagle-3" if draft is EagleConfig else "medusa")
    given = draft(draft_model=str(path), **({"draft_dtype": "float32"} if draft is EagleConfig else {}))
    config = RunConfig(Target(model=str(models.target), dtype="float32", device="cpu"), draft=given)
    plan = resolve(replace(config, sizes=Sizes(2, None, 12)), [[1] * 60] * 2)
    own = find_head(str(path), given.name, plan.target.config).load(device="cpu", dtype=torch.float32, prepack=False)
    without = memory_plan(replace(plan, draft=None)).fixed["weights"]
    assert memory_plan(plan).fixed["weights"] - without == 4 * sum(x.numel() for x in own.parameters())


def test_programs_take_a_head_by_its_kind_and_path(models, heads, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} and {i}"}) for i in range(3)))
    for kind, head in (("eagle", "eagle-3"), ("medusa", "medusa")):
        own = [str(models.target), f"{kind}:{heads / head}", "--prompts", str(tmp_path / "prompts.jsonl")]
        ended: Ended = run("foretoken.py compare", [*own, "--gen_len", "8", "--dtype", "float64", "--device", "cpu"])
        assert ended.code == 0, ended.err
        assert "3 of 3" in ended.out
