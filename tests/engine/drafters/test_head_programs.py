"""Programs that draft with published heads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.config import RunConfig, Sizes, Target
from bench.memory import memory_plan
from bench.plan import resolve
from bench.session import Session
from engine.drafters.eagle import EagleConfig
from engine.drafters.medusa import MedusaConfig
from kv_cache.full import Full
from models.checkpoints.hf_config import config_from_json
from models.heads.loading import find_head
from tests.support.heads import dflash_tensors, eagle_config, eagle_tensors, medusa_tensors, save_head
from tests.support.machine import needs_vnni
from tests.support.programs import benchmark
from tests.support.rank_jobs import N_PROMPTS, SIZES, Models

SAMPLED = "--verification coupled --temperature 2.5 --seed 3"
REJECTION = "--verification rejection --temperature 2.5 --seed 3 --gamma_schedule confidence"
IN_8_BITS = "--draft_policy full --draft_kv_dtype int8 --draft_weights int8"
IN_4_BITS = "--draft_policy quantized --quant_group 8 --quant_window 8"
BORROWED = ["embedding", "output layer"]


@pytest.fixture(scope="module")
def heads(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with heads for the target; `eagle-1` and `dflash`, which drafts four tokens, borrow its parts."""
    folder, target = tmp_path_factory.mktemp("heads"), config_from_json(models.target / "config.json")
    save_head(folder / "medusa", medusa_tensors(target), {"medusa_num_layers": 2}, "medusa_lm_head.pt")
    first = eagle_tensors(target, 1)
    del first["embed_tokens.weight"]
    save_head(folder / "eagle-1", first, eagle_config(target, 1), "pytorch_model.bin")
    third, options = eagle_tensors(target, n_draft=90), {"draft_vocab_size": 90}
    options |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    save_head(folder / "eagle-3", third, eagle_config(target, **options))
    parallel = third | {"mask_hidden": torch.randn(1, 1, 3 * target.dim)}
    save_head(folder / "peagle", parallel, eagle_config(target, **options, mask_token_id=7))
    layers = eagle_config(target, 1, n_layer=2) | {"model_type": "qwen3"}
    config = {"speculators_model_type": "dflash", "transformer_layer_config": layers, "block_size": 5}
    config |= {"aux_hidden_state_layer_ids": [1, 2, 3], "mask_token_id": 7}
    save_head(folder / "dflash", dflash_tensors(target), config)
    return folder


def arguments(models: Models, head: Path, flags: str) -> list[str]:
    paths = ["--target", str(models.target), "--model", str(head), "--dataset", str(models.books)]
    return [*paths, *SIZES.split(), *flags.split()]


@pytest.mark.parametrize(
    "head,draft,flags,capacity",
    [
        ("medusa/medusa_lm_head.pt", "medusa", f"--gamma auto {SAMPLED}", None),
        ("eagle-3", "eagle", f"--draft_budget 24 --draft_dtype same --gamma 2 {SAMPLED}", 24),
        ("eagle-1", "eagle", "--draft_budget 24 --draft_dtype same --gamma auto --draft_positions cache", 24),
        ("peagle", "eagle", f"--draft_budget 24 --draft_dtype same --gamma 3 {SAMPLED}", 24),
        pytest.param("dflash", "dflash", f"{IN_8_BITS} --gamma 3 {SAMPLED}", 76, marks=needs_vnni),
        ("dflash", "dflash", f"{IN_4_BITS} --gamma 2 --text_drafts suffix", 75),
        ("dflash", "dflash", f"--draft_budget 20 --draft_positions cache --gamma 4 {REJECTION}", 20),
    ],
)
def test_the_benchmark_drafts_with_heads(models, heads, head, draft, flags, capacity):
    record = benchmark("longspec", arguments(models, heads / head, f"--draft {draft} {flags}")).record
    if "rejection" not in flags:
        assert record["identical_sequences"] == record["sequences"] == N_PROMPTS
    assert (record["draft_model"], record["draft_budget"]) == (Path(head).parts[0], capacity)
    assert record["drafted"] > 0 or "auto" in flags
    assert record["draft_borrows"] == (BORROWED if head in ("dflash", "eagle-1") else [])


@pytest.mark.parametrize(
    "head,draft,budget,gamma,named",
    [("dflash", "dflash", 24, 5, "<= 4"), ("peagle", "eagle", 10, 4, "room for 8 tokens")],
)
def test_a_block_that_does_not_fit_is_refused(models, heads, head, draft, budget, gamma, named):
    flags = f"--draft {draft} --draft_budget {budget} --gamma {gamma}"
    ended = benchmark("longspec", arguments(models, heads / head, flags))
    assert ended.code == 2 and named in ended.err


@pytest.mark.parametrize("draft", [EagleConfig, MedusaConfig])
def test_the_memory_plan_counts_the_head(models, heads, draft):
    path = heads / ("eagle-3" if draft is EagleConfig else "medusa")
    given = draft(draft_model=str(path), **({"draft_dtype": "float32"} if draft is EagleConfig else {}))
    config = RunConfig(Target(model=str(models.target), dtype="float32", device="cpu"), draft=given)
    plan = resolve(replace(config, sizes=Sizes(2, None, 12)), [[1] * 60] * 2)
    loaded = find_head(str(path), given.name, plan.target.source.config).load(
        device="cpu", dtype=torch.float32, prepack=False
    )
    assert memory_plan(plan).fixed["draft weights"] == 4 * sum(x.numel() for x in loaded.parameters())


def test_a_head_has_the_targets_rotary_settings_beyond_its_context(models, heads):
    draft = EagleConfig(gamma=3, draft_model=str(heads / "eagle-3"), policy=Full(), draft_dtype="same")
    target = Target(model=str(models.target), dtype="float64", device="cpu", rope_scaling="yarn:4")
    config = RunConfig(target, draft=draft, sizes=Sizes(2, None, 12))
    session = Session.open(config, [[1, 2, 3] * 100, [4, 5] * 170])
    (head,) = session.models.loaded.values()
    assert head.body.config.rope_scaling == session.runner.model.config.rope_scaling is not None
    out = session.generate(session.drafter())
    assert out.tokens == session.generate().tokens and out.stats.drafted > 0
    (short,) = Session.open(config, [[1, 2, 3], [4, 5]]).models.loaded.values()
    assert short.body.config.rope_scaling is None
