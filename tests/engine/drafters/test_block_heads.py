"""Programs that draft with published DFlash and P-EAGLE heads."""

import json
from pathlib import Path

import pytest
import torch

from models.checkpoints.hf_config import config_from_json
from tests.support.machine import needs_vnni
from tests.support.programs import benchmark, run
from tests.support.published_heads import dflash_tensors, eagle_config, eagle_tensors, save_head
from tests.support.rank_jobs import N_PROMPTS, SIZES, Models

SAMPLED = "--verification coupled --temperature 2.5 --seed 3"
REJECTION = "--verification rejection --temperature 2.5 --seed 3 --gamma_schedule confidence"
IN_8_BITS = "--draft_policy full --draft_kv_dtype int8 --draft_weights int8"


@pytest.fixture(scope="module")
def heads(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with heads `dflash`, which drafts four tokens, and `peagle` for the target."""
    folder, target = tmp_path_factory.mktemp("heads"), config_from_json(models.target / "config.json")
    layers = eagle_config(target, 1, n_layer=2) | {"model_type": "qwen3"}
    config = {"speculators_model_type": "dflash", "transformer_layer_config": layers, "block_size": 5}
    config |= {"aux_hidden_state_layer_ids": [1, 2, 3], "mask_token_id": 7}
    save_head(folder / "dflash", dflash_tensors(target), config)
    tensors = eagle_tensors(target, n_draft=90) | {"mask_hidden": torch.randn(1, 1, 3 * target.dim)}
    options = {"draft_vocab_size": 90, "mask_token_id": 7, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    save_head(folder / "peagle", tensors, eagle_config(target, **options))
    return folder


def arguments(models: Models, head: Path, flags: str) -> list[str]:
    draft = "eagle" if head.name == "peagle" else head.name
    paths = ["--target", str(models.target), "--model", str(head), "--dataset", str(models.books), "--draft", draft]
    return [*paths, *SIZES.split(), *flags.split()]


@pytest.mark.parametrize(
    "head,flags,gamma,capacity",
    [
        ("dflash", f"--draft_budget 24 --gamma auto {SAMPLED}", 4, 24),
        pytest.param("dflash", f"{IN_8_BITS} --gamma 3 {SAMPLED}", 3, 76, marks=needs_vnni),
        ("dflash", "--draft_policy quantized --quant_group 8 --quant_window 8 --gamma 2 --text_drafts suffix", 2, 75),
        ("dflash", f"--draft_budget 20 --draft_positions cache --gamma 4 {REJECTION}", 4, 20),
        ("peagle", f"--draft_budget 24 --draft_dtype same --gamma 3 {SAMPLED}", 3, 24),
    ],
)
def test_the_benchmark_drafts_with_blocks(models, heads, head, flags, gamma, capacity):
    record = benchmark("longspec", arguments(models, heads / head, flags)).record
    if "rejection" not in flags:
        assert record["identical_sequences"] == record["sequences"] == N_PROMPTS
    assert (record["draft_model"], record["draft_budget"]) == (head, capacity)
    assert record["drafted"] > 0 or "auto" in flags
    assert len(record["acceptance_per_position"]) == gamma
    assert record["draft_borrows"] == (["embedding", "output layer"] if head == "dflash" else [])


@pytest.mark.parametrize("head,budget,gamma,named", [("dflash", 24, 5, "<= 4"), ("peagle", 10, 4, "room for 8 tokens")])
def test_a_block_that_does_not_fit_is_refused(models, heads, head, budget, gamma, named):
    ended = benchmark("longspec", arguments(models, heads / head, f"--draft_budget {budget} --gamma {gamma}"))
    assert ended.code == 2 and named in ended.err


def test_programs_take_a_dflash_head_by_its_path(models, heads, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} and {i}"}) for i in range(3)))
    words = [str(models.target), f"dflash:{heads / 'dflash'}", "--prompts", str(tmp_path / "prompts.jsonl")]
    ended = run("foretoken.py compare", [*words, "--gen_len", "8", "--dtype", "float64", "--device", "cpu"])
    assert ended.code == 0 and "3 of 3" in ended.out, ended.err
