"""GGUF checkpoints: weights, layout, config and tokenizer from one file; damage is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from gguf_files import TINY, TOKENS, convert_tiny_gguf, finish, write_tiny_gguf

from common.errors import CheckpointError, UserError
from models.checkpoints.convert import read_stacked, source_parts
from models.checkpoints.gguf_source import read_gguf
from models.checkpoints.loading import load_model, read_checkpoint
from models.checkpoints.tokenizer import load_tokenizer
from models.config import RopeScaling

BOS, STOP, EXTRA = (TOKENS.index(token) for token in ("<|im_start|>", "<|im_end|>", "<extra>"))
TEXT = "It isn't the <|im_end|> thing:\n\n  naïve 1234 TheHE's 日本語"


@pytest.mark.parametrize(
    "quantization, tolerance",
    [(Quantization.F32, 0.0), (Quantization.F16, 2e-3), (Quantization.Q8_0, 2e-2), (Quantization.Q4_1, 0.3)],
)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_weights_config_and_layout(tmp_path: Path, arch: str, quantization: Quantization, tolerance: float) -> None:
    weights = convert_tiny_gguf(tmp_path, arch=arch, quantization=quantization)
    config, state_dict = read_checkpoint(tmp_path, verify=True)
    assert config == replace(TINY, qkv_bias=arch == "qwen2")
    for name, stacked in source_parts(config).items():
        wanted = torch.cat([weights[part] for part, _ in stacked])
        assert state_dict[name].dtype == torch.float32
        torch.testing.assert_close(state_dict[name], wanted, rtol=0, atol=tolerance)
    assert load_model(tmp_path).config == config


def test_untied_head_and_linear_rope_scaling(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    weights = convert_tiny_gguf(tmp_path, tied=False, metadata=scaling)
    config, state_dict = read_checkpoint(tmp_path)
    assert config.rope_scaling == RopeScaling("linear", 4.0)
    assert torch.equal(state_dict["output.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"arch": "gemma"}, "gemma"),
        ({"metadata": {"llama.attention.key_length": 32}}, "rope.dimension_count"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"pre": "deepseek-coder"}, "deepseek-coder"),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model llama"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 1.5}}, "eos_token_id"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 10**6}}, "eos_token_id"),
        ({"metadata": {"tokenizer.ggml.bos_token_id": -1}, "pre": "llama-bpe"}, "BOS is token -1"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight"),
        ({"extra_tensor": "blk.0.attn_q_norm.weight"}, "blk.0.attn_q_norm.weight"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "q_proj.bias"),
    ],
)
def test_unsupported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        convert_tiny_gguf(tmp_path, **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_undecodable_quantisation_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.ones((2, 8), np.int32))
    finish(writer)
    tensor = read_gguf(tmp_path / "tiny.gguf")[1]["blk.0.attn_q.weight"]
    with pytest.raises(CheckpointError, match=r"unsupported GGUF quantisation[\s\S]*tiny\.gguf[\s\S]*I32"):
        read_stacked("wq", (tensor,), None)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path, n_tokens=16)
    path = tmp_path / "tiny.gguf"
    content = path.read_bytes()
    for n_bytes in range(0, len(content), 97):
        path.write_bytes(content[:n_bytes])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            read_gguf(path)


@pytest.mark.parametrize(
    "pre,metadata",
    [
        *((pre, {}) for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}),
    ],
)
def test_rebuilt_tokenizer(tmp_path: Path, pre: str, metadata: dict[str, bool]) -> None:
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
