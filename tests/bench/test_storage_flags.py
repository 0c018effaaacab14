"""Storage of weights and caches: what auto chooses, and flags that quantise a target and its draft."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bench.config import RunConfig, Sizes, Target
from bench.plan import resolve
from engine.drafters.self_speculation import SelfConfig
from kv_cache.streaming import Streaming
from models import storage
from models.storage import auto_draft_weights, auto_dtype
from tests.support.hf_tiny import SHAPE
from tests.support.machine import needs_int8
from tests.support.programs import benchmark

LINEARS = [(128, 64), (64, 96)]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    """Function that pretends the CPU multiplies bfloat16 or 8-bit integers, or does not: `cpu(bfloat16, int8)`."""

    def make(bfloat16: bool, int8: bool) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: int8)
        monkeypatch.setattr("models.kernels.linear_cpp.runs", lambda: int8)
        monkeypatch.setattr("engine.drafters.model_drafter.can_pack", lambda device, dtype: bfloat16)

    return make


# Device, whether it multiplies bfloat16, storages of the published weights (None: random), and what is chosen.
TARGETS = [("cpu", True, stored, torch.bfloat16) for stored in (["bfloat16"], ["Q4_1", "Q8_0"], None)]
TARGETS += [("cpu", True, stored, torch.float32) for stored in (["Q8_0", "float16"], [])]
TARGETS += [("cpu", False, ["bfloat16"], torch.float32), ("cuda:0", False, ["float32"], torch.bfloat16)]


@pytest.mark.parametrize(("device", "bfloat16", "published", "dtype"), TARGETS)
def test_a_target_is_stored_in_a_dtype_that_loses_nothing(device, bfloat16, published, dtype, cpu) -> None:
    cpu(bfloat16, False)
    chosen, _ = auto_dtype(device, SimpleNamespace(has_text=published is not None, published=published))
    assert chosen == dtype


@pytest.mark.parametrize(("kernels", "avx512", "dtype"), [(1, 0, "bfloat16"), (1, 1, "float32"), (0, 0, "float32")])
def test_a_cpu_with_avx2_alone_widens_bfloat16_in_kernels(kernels, avx512, dtype, cpu, monkeypatch) -> None:
    cpu(False, kernels)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert auto_dtype("cpu", SimpleNamespace(has_text=True, published=["Q4_1"]))[0] == getattr(torch, dtype)


DRAFTS = [({}, "int8"), ({"dtype": torch.float64}, None), ({"linears": [(128, 64), (64, 92)]}, None)]
DRAFTS += [({"published": ["Q4_1", "Q8_0"]}, "int4"), ({"published": ["AWQ4", "bfloat16"]}, "int8")]
DRAFTS += [({"published": ["Q4_1"], "linears": [(128, 64), (64, 24)]}, "int8")]


@pytest.mark.parametrize(("changed", "scheme"), DRAFTS)
def test_a_draft_has_few_bits_where_they_are_fastest(changed, scheme, cpu) -> None:
    usual = {"device": "cpu", "dtype": torch.bfloat16, "linears": LINEARS}
    cpu(True, True)
    assert auto_draft_weights(**usual | changed) == scheme
    cpu(True, False)
    assert auto_draft_weights(**usual | changed) is None


def test_a_draft_on_a_gpu_has_few_bits_where_they_take_less_time(cpu, monkeypatch) -> None:
    """A GPU of another kind than the CPU; several processes, which could disagree, and old GPUs measure nothing."""
    cpu(False, False)
    measured, usual = list[Any](), {"device": "cuda:1", "dtype": torch.bfloat16, "linears": [(128, 64)], "n_row": 5}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(storage, "saves_time", lambda *given: measured.append(given) or given[0] == "int4")
    assert auto_draft_weights(**usual) is None
    assert auto_draft_weights(**usual, published=["Q4_K"]) == "int4"
    assert measured == [("int8", ((128, 64),), 5, "cuda:1"), ("int4", ((128, 64),), 5, "cuda:1")]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert auto_draft_weights(**usual, published=["Q4_K"]) is None
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert auto_draft_weights(**usual, published=["Q4_K"]) is None and len(measured) == 2


@pytest.mark.parametrize(("flag", "quantize"), [("auto", "int8"), ("same", None), ("int4", "int4")])
def test_a_plan_has_the_drafts_scheme(flag: str, quantize: str | None, checkpoint: Path, cpu) -> None:
    cpu(True, True)
    draft = SelfConfig(policy=Streaming(16), draft_weights=flag)
    target = Target(model=str(checkpoint), device="cpu")
    config = RunConfig(target, sizes=Sizes(B=2, gen_len=6), draft=draft)
    plan = resolve(config, [[1] * 40])
    assert plan.target.weights.dtype == torch.float32 and plan.candidates[0].weights.dtype == torch.bfloat16
    assert plan.candidates[0].weights.quantize == quantize
    shared = resolve(replace(config, draft=replace(draft, draft_dtype="same")), [[1] * 40]).candidates[0]
    assert (shared.weights.dtype, shared.weights.quantize) == (torch.float32, None if flag == "auto" else quantize)


COMMON = "--load_format dummy --dtype float64 --B 2 --num_prompts 3 --prefix_len 40 --gen_len 10 --device cpu"
WIDE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 256}
CONFIG = LlamaConfig(**SHAPE | WIDE, architectures=["LlamaForCausalLM"])


@pytest.fixture
def run(tmp_path: Path):
    """Function that runs a script on random weights of CONFIG's shape and returns its record."""
    CONFIG.save_pretrained(tmp_path)

    def run(script: str, flags: str) -> dict[str, Any]:
        models = ["--target", str(tmp_path)] if script == "longspec" else []
        return benchmark(script, [*models, "--model", str(tmp_path), *COMMON.split(), *flags.split()]).record

    return run


# A script, its flags, and the storages that its record names. A quantised target has a plain text of its own.
STORAGES = [
    ("selfspec", "", {"draft_weights": None, "draft_kv_dtype": "float64", "quantize": None}),
    ("selfspec", "--draft_weights int4 --draft_kv_dtype int8", {"draft_weights": "int4", "draft_kv_dtype": "int8"}),
    ("selfspec", "--draft_weights int8 --draft_kv_dtype fp8 --draft_policy full", {"draft_kv_dtype": "float8_e4m3fn"}),
    ("selfspec", "--quantize int8 --kv_dtype fp8", {"draft_weights": "int8", "kv_dtype": "float8_e4m3fn"}),
    ("longspec", "--quantize int4 --draft_weights int8", {"quantize": "int4", "draft_weights": "int8"}),
    ("selfspec", "--quantize int4", {"quantize": "int4", "draft_weights": "int4", "kv_dtype": "float64"}),
]


@needs_int8
def test_speculation_in_any_storage_emits_its_plain_text(run):
    """The draft `same` has the target's quantised weights."""
    plain = run("baseline", "")
    for script, flags, storages in STORAGES:
        record = run(script, f"--gamma 3 {flags} {'' if 'full' in flags else '--streamingllm_budget 24'}")
        assert record["identical_sequences"] == record["sequences"] == 3, flags
        assert {name: record[name] for name in storages} == storages, flags
        assert (record["tokens_sha256"] == plain["tokens_sha256"]) == ("--quantize" not in flags), flags
