"""The dtypes that `auto` chooses for a target and its draft, by published weights and by the CPU's instructions."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import HF_CONFIG, hf_weights, write_side_files, write_weights
from gguf import GGMLQuantizationType as Quantization
from gguf_files import convert_tiny_gguf

from bench.config import RunConfig, Sizes, Target
from bench.plan import resolve
from bench.storage import auto_draft_weights, auto_dtype
from convert_hf_checkpoint import convert
from engine.drafters.self_speculation import SelfConfig
from kv_cache.streaming import Streaming
from models.checkpoints.model_source import find_model

LINEARS = [(128, 64), (64, 96)]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    """Function that pretends the CPU multiplies bfloat16 or 8-bit integers, or does not: `cpu(bfloat16, int8)`."""

    def make(bfloat16: bool, int8: bool) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: int8)

    return make


@pytest.mark.parametrize(
    ("device", "bfloat16", "published", "dtype"),
    [
        ("cpu", True, ["bfloat16"], torch.bfloat16),
        ("cpu", True, ["Q4_1", "Q8_0"], torch.bfloat16),
        ("cpu", True, ["Q8_0", "float16"], torch.float32),
        ("cpu", True, [], torch.float32),
        ("cpu", True, None, torch.bfloat16),
        ("cpu", False, ["bfloat16"], torch.float32),
        ("cuda:0", False, ["float32"], torch.bfloat16),
    ],
)
def test_a_target_is_stored_in_a_dtype_that_loses_nothing(device, bfloat16, published, dtype, cpu) -> None:
    """published: None for random weights."""
    cpu(bfloat16, False)
    chosen, _ = auto_dtype(device, SimpleNamespace(has_text=published is not None, published=published))
    assert chosen == dtype


@pytest.mark.parametrize(
    ("changed", "scheme"),
    [
        ({}, "int8"),
        ({"dtype": torch.float64}, None),
        ({"device": "cuda:0"}, None),
        ({"linears": [(128, 64), (64, 92)]}, None),
        ({"published": ["Q4_1", "Q8_0"]}, "int4"),
        ({"published": ["Q4_1"], "linears": [(128, 64), (64, 24)]}, None),
    ],
)
def test_a_draft_has_few_bits_where_they_are_fastest(changed, scheme, cpu) -> None:
    usual = {"device": "cpu", "dtype": torch.bfloat16, "linears": LINEARS}
    cpu(True, True)
    assert auto_draft_weights(**usual | changed) == scheme
    cpu(True, False)
    assert auto_draft_weights(**usual | changed) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_conversion_records_the_dtype_of_the_published_matrices(dtype: str, tmp_path: Path) -> None:
    """Norms do not count, nor the dtype of the conversion; a conversion that does not say is made again."""
    weights = hf_weights(write_side_files(tmp_path, HF_CONFIG))
    stored = {name: x.to(getattr(torch, dtype)) if x.dim() > 1 else x for name, x in weights.items()}
    write_weights(tmp_path, stored, "safetensors")
    path = convert(tmp_path, tmp_path, dtype="float32")
    assert find_model(str(path), "pth", None, "--model").published == [dtype]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["converted_from"]["published"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert find_model(str(path), "pth", None, "--model").published == []
    convert(tmp_path, tmp_path, dtype="float32")
    assert find_model(str(path), "pth", None, "--model").published == [dtype]


@pytest.mark.parametrize("kind", [Quantization.BF16, Quantization.Q4_1])
def test_a_gguf_was_published_in_the_format_of_its_blocks(kind: Quantization, tmp_path: Path) -> None:
    convert_tiny_gguf(tmp_path, quantization=kind)
    published = find_model(str(tmp_path), "pth", None, "--model").published
    assert published == ["bfloat16" if kind == Quantization.BF16 else kind.name]


@pytest.mark.parametrize(("flag", "quantize"), [("auto", "int8"), ("same", None), ("int4", "int4")])
def test_a_plan_has_the_drafts_scheme(flag: str, quantize: str | None, checkpoint: Path, cpu) -> None:
    cpu(True, True)
    draft = SelfConfig(policy=Streaming(16), draft_weights=flag)
    target = Target(model=str(checkpoint), device="cpu")
    config = RunConfig(target, sizes=Sizes(B=2, gen_len=6), draft=draft)
    plan = resolve(config, [[1] * 40])
    assert plan.dtype == torch.float32 and plan.draft.dtype == torch.bfloat16
    assert plan.draft.quantize == quantize
    shared = resolve(replace(config, draft=replace(draft, draft_dtype="same")), [[1] * 40]).draft
    assert (shared.dtype, shared.quantize) == (torch.float32, None if flag == "auto" else quantize)
