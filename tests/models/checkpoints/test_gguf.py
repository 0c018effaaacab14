"""GGUF checkpoints: weights, layout, config and tokenizer from one file; damage is refused by name."""

import json
import math
import struct
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Quantization

from common.errors import CheckpointError, UserError
from convert_hf_checkpoint import convert
from models.checkpoints.convert import source_parts
from models.checkpoints.gguf_source import _Reader, read_gguf
from models.checkpoints.loading import load_model, read_checkpoint
from models.checkpoints.model_source import find_model
from models.checkpoints.tokenizer import load_tokenizer
from models.config import RopeScaling
from tests.support.gguf_files import DIFFERENCES, TINY, TOKENS, convert_tiny_gguf, write_tiny_gguf
from tests.support.hf_tiny import llama3_rope

BOS, STOP, EXTRA = (TOKENS.index(token) for token in ("<|im_start|>", "<|im_end|>", "<extra>"))
TEXT = "It isn't the <|im_end|> thing:\n\n  naïve 1234 TheHE's 日本語"


@pytest.mark.parametrize(
    "arch, quantization, published, tolerance",
    [
        ("llama", Quantization.F32, "float32", 0.0),
        ("qwen2", Quantization.BF16, "bfloat16", 2e-2),
        ("qwen3", Quantization.Q8_0, "Q8_0", 2e-2),
        ("llama", Quantization.Q4_1, "Q4_1", 0.3),
    ],
)
def test_a_converted_gguf_has_its_weights_and_config(
    tmp_path: Path, arch: str, quantization, published: str, tolerance: float
) -> None:
    weights = convert_tiny_gguf(tmp_path, arch=arch, quantization=quantization)
    config, state_dict = read_checkpoint(tmp_path)
    assert config == replace(TINY, **DIFFERENCES.get(arch, {}))
    for name, stacked in source_parts(config).items():
        wanted = torch.cat([weights[part] for part, _ in stacked])
        assert state_dict[name].dtype == torch.float32
        torch.testing.assert_close(state_dict[name], wanted, rtol=0, atol=tolerance)
    assert load_model(tmp_path).config == config
    assert find_model(str(tmp_path), "pth", None, "--model").published == [published]


YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 256}
CORNERS = RopeScaling("yarn", 4.0, original_context=256, attention_factor=1 + 0.1 * math.log(4), beta_fast=16.0)


@pytest.mark.parametrize(
    "arch, settings, scaling, context",
    [
        ("llama", {"scaling.factor": 2.0, "scale_linear": 4.0}, RopeScaling("linear", 2.0), 512),
        ("llama", {"scaling.type": "linear", "scale_linear": 4.0}, RopeScaling("linear", 4.0), 512),
        ("llama", {"scaling.type": "none", "scaling.factor": 4.0}, None, 512),
        ("qwen3", YARN | {"scaling.yarn_beta_fast": 16.0}, CORNERS, 1024),
    ],
)
def test_a_gguf_has_the_rope_scaling_of_llama_cpp(
    tmp_path: Path, arch: str, settings: dict[str, Any], scaling: RopeScaling | None, context: int
) -> None:
    convert_tiny_gguf(tmp_path, arch=arch, metadata={f"{arch}.rope.{key}": value for key, value in settings.items()})
    config = read_checkpoint(tmp_path)[0]
    assert (config.rope_scaling, config.max_context) == (scaling, context)


FAR = {"metadata": {"llama.rope.freq_base": 500000.0}}
FREQS = {"extra_tensor": "rope_freqs.weight"}
# By case: keys of the config.json, options of the GGUF, and what a refusal names.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "the same": ({}, {}, None),
    "tied, but not in the file": ({"tie_word_embeddings": True}, {}, "lm_head.weight"),
    "scaling, factors of none": (llama3_rope(8.0), FREQS | FAR, "rope_freqs.weight"),
    "scaling in the file alone": ({}, {"metadata": {"llama.rope.scaling.factor": 4.0}}, "rope_scaling"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_a_config_beside_a_gguf_of_another_model_is_refused(tmp_path: Path, case: str) -> None:
    changes, options, named = BESIDE[case]
    convert_tiny_gguf(tmp_path / "plain", tied=False)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    folder = tmp_path / "beside"
    write_tiny_gguf(folder, tied=False, **options)
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=named) if named else nullcontext():
        convert(folder, folder)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"arch": "gemma"}, "gemma"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count"),
        ({"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}}, "original_context"),
        ({"arch": "qwen3", "left_out": "q_norm"}, "q_norm.weight"),
        ({"pre": "deepseek-coder"}, "deepseek-coder"),
        ({"metadata": {"tokenizer.ggml.add_eos_token": True}}, "add_eos_token"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        convert_tiny_gguf(tmp_path, **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path)
    path = tmp_path / "tiny.gguf"
    content = path.read_bytes()
    for n_bytes in (0, 20, 2003, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:n_bytes])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            read_gguf(path)


@pytest.mark.parametrize("kind", [4, 7, 8, 9])
def test_an_array_that_the_file_cannot_hold_is_refused_at_once(tmp_path: Path, kind: int, monkeypatch) -> None:
    """Of 151 bytes in all, by any type of elements: numbers, booleans, strings, arrays."""
    path, n_reads, get = tmp_path / "x.gguf", count(), _Reader._get

    def counted(self: _Reader, *given: Any, **options: Any) -> Any:
        if next(n_reads) > 200:
            raise MemoryError
        return get(self, *given, **options)

    monkeypatch.setattr(_Reader, "_get", counted)
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, kind, 2**50) + bytes(100))
    with pytest.raises(CheckpointError, match="truncated or garbled"):
        read_gguf(path)
    assert next(n_reads) < 100


@pytest.mark.parametrize(
    "pre,metadata",
    [
        *((pre, {}) for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2")),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}),
    ],
)
def test_the_tokenizer_is_rebuilt_from_the_metadata(tmp_path: Path, pre: str, metadata: dict[str, bool]) -> None:
    convert_tiny_gguf(tmp_path, pre=pre, metadata=metadata)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT, add_bos=False)
    assert len(tokenizer.pieces()) == len(TOKENS)
    assert tokenizer.decode(ids) == TEXT.replace("<|im_end|>", "")
    assert STOP in ids
    bos = [BOS] if pre == "llama-bpe" or metadata else []
    assert tokenizer.encode(TEXT) == bos + ids
    pieces = [TOKENS[token] for token in tokenizer.encode("the 1234", add_bos=False)]
    joined = {"smollm": ["1", "2"], "qwen2": ["1", "2"]}.get(pre, ["12"])
    assert pieces == ["the", "Ġ", *joined, "3", "4"]
    with_extra = tokenizer.encode("a<extra>b", add_bos=False)
    assert EXTRA in with_extra and tokenizer.decode(with_extra) == "a<extra>b", "tokens that users define are kept"
