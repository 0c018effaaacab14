"""Tiny GGUF files in llama.cpp's names and layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from byte_tokenizer import ALPHABET
from gguf import GGMLQuantizationType as Quantization

from convert_hf_checkpoint import convert
from models.checkpoints.convert import source_parts
from models.config import ModelConfig

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HF_TO_GGUF = {theirs: ours for ours, theirs in NAMES.items()}
WORDS = ["Ġthe", "th", "he", "12", "<|im_start|>", "<|im_end|>", "<extra>"]
TOKENS = [*ALPHABET, "the", *WORDS]
MERGES = ["t h", "h e", "1 2", "th e", "Ġ the"]
KINDS = {"<|im_start|>": 3, "<|im_end|>": 3, "<extra>": 4}
SIZES = {"vocab_size": len(TOKENS), "n_layer": 2, "dim": 64, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "ffn_dim": 96}
STOPS = (TOKENS.index("<|im_end|>"),)
TINY = ModelConfig(**SIZES, rope_theta=50000.0, max_context=512, tie_embeddings=True, eos_tokens=STOPS)


def gguf_name(hf_name: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{HF_TO_GGUF[stem]}.{kind}"
    layer, _, stem = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{HF_TO_GGUF[stem]}.{kind}"


def llama_cpp_layout(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder Q and K as llama.cpp's converter does: from half-split to adjacent rotary pairs."""
    return weight.reshape(-1, 2, head_dim // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def metadata_of(config: ModelConfig, arch: str, tokens: list[str], merges: list[str]) -> dict[str, Any]:
    of_model = {
        "context_length": config.max_context,
        "embedding_length": config.dim,
        "block_count": config.n_layer,
        "feed_forward_length": config.ffn_dim,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_kv_head,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
        "attention.key_length": config.head_dim,
    }
    of_tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges}
    of_tokenizer["eos_token_id"] = config.eos_tokens[0]
    of_tokenizer["token_type"] = [KINDS.get(token, 1) for token in tokens]
    named = {f"{arch}.{key}": value for key, value in of_model.items()}
    return named | {f"tokenizer.ggml.{key}": value for key, value in of_tokenizer.items()}


def value_type(value: object) -> gguf.GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32 if value >= 0 else gguf.GGUFValueType.INT32
    return gguf.GGUFValueType.get_type(value)


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    metadata: dict[str, Any],
    arch: str = "llama",
    quantization: Quantization = Quantization.F32,
    extra_tensor: str = "",
    extra_values: Sequence[float] = (1.0,) * 8,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> None:
    """Weights have Hugging Face names; those of more than one dimension are quantised. A key that is None is left
    out."""
    writer = gguf.GGUFWriter(path, arch, endianess=endianess)
    for key, value in metadata.items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, value_type(value))
    for name, tensor in weights.items():
        stored = tensor.numpy()
        kind = quantization if stored.ndim > 1 else Quantization.F32
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = llama_cpp_layout(stored, config.head_dim)
        raw_dtype = None if kind in (Quantization.F32, Quantization.F16) else kind
        writer.add_tensor(gguf_name(name), gguf.quantize(stored, kind), raw_dtype=raw_dtype)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.array(extra_values, np.float32))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_gguf(
    folder: Path,
    *,
    arch: str = "llama",
    tied: bool = True,
    pre: str | None = "smollm",
    metadata: dict[str, Any] | None = None,
    n_tokens: int = 0,
    left_out: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Write `tiny.gguf` of TINY's shape; return its weights by Hugging Face name.

    With only the last `n_tokens` tokens it is quickly read, but its tokenizer is none.
    """
    folder.mkdir(exist_ok=True)
    tokens = TOKENS[-n_tokens:]
    special = {"eos_tokens": (tokens.index("<|im_end|>"),), "tie_embeddings": tied, "qkv_bias": arch == "qwen2"}
    special |= {"qk_norm": True, "head_dim": 24} if arch == "qwen3" else {}
    config = ModelConfig(**vars(TINY) | {"vocab_size": len(tokens)} | special)
    random = np.random.default_rng(0)
    weights = {
        name: torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
        for stacked in source_parts(config).values()
        for name, shape in stacked
        if not any(word in name for word in left_out)
    }
    usual = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>")}
    values = metadata_of(config, arch, tokens, MERGES) | usual | (metadata or {})
    write_gguf(folder / "tiny.gguf", config, weights, values, arch, **options)
    return weights


def convert_tiny_gguf(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Write `tiny.gguf`, convert it in its folder, and return its weights."""
    weights = write_tiny_gguf(folder, **options)
    convert(folder, folder)
    return weights
