"""Tiny GGUF files in llama.cpp's names and layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quantization

from convert_hf_checkpoint import convert
from models.checkpoints.convert import source_parts
from models.config import ModelConfig
from tests.support.checkpoint_folders import ALPHABET

WORDS = ["Ġthe", "th", "he", "12", "<|im_start|>", "<|im_end|>", "<extra>"]
TOKENS = [*ALPHABET, "the", *WORDS]
MERGES = ["t h", "h e", "1 2", "th e", "Ġ the"]
KINDS = {"<|im_start|>": 3, "<|im_end|>": 3, "<extra>": 4}
SIZES = {"vocab_size": len(TOKENS), "n_layer": 2, "dim": 64, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "ffn_dim": 96}
STOPS = (TOKENS.index("<|im_end|>"),)
TINY = ModelConfig(**SIZES, rope_theta=50000.0, max_context=512, tie_embeddings=True, eos_tokens=STOPS)
# How other architectures differ.
DIFFERENCES: dict[str, Any] = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True, "head_dim": 24}}


def llama_cpp_layout(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder Q and K as llama.cpp's converter does: from half-split to adjacent rotary pairs."""
    return weight.reshape(-1, 2, head_dim // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def metadata_of(config: ModelConfig, arch: str) -> dict[str, Any]:
    model = {
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
    tokenizer = {"model": "gpt2", "tokens": TOKENS, "merges": MERGES, "eos_token_id": config.eos_tokens[0]}
    tokenizer["bos_token_id"] = TOKENS.index("<|im_start|>")
    tokenizer["token_type"] = [KINDS.get(token, 1) for token in TOKENS]
    named = {f"{arch}.{key}": value for key, value in model.items()}
    return named | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}


def write_tiny_gguf(
    folder: Path,
    arch: str = "llama",
    tied: bool = True,
    pre: str = "smollm",
    metadata: Any = None,
    left_out: str = "nothing",
    quantization: Quantization = Quantization.F32,
    extra_tensor: str = "",
) -> dict[str, torch.Tensor]:
    """Write `tiny.gguf` of TINY's shape, without tensors named `left_out` and quantised where these have more than one
    dimension; return its weights by Hugging Face name."""
    folder.mkdir(exist_ok=True)
    config = replace(TINY, tie_embeddings=tied, **DIFFERENCES.get(arch, {}))
    random = np.random.default_rng(0)
    weights = {
        name: torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
        for stacked in source_parts(config).values()
        for name, shape in stacked
        if left_out not in name
    }
    writer = gguf.GGUFWriter(folder / "tiny.gguf", arch)
    for key, value in (metadata_of(config, arch) | {"tokenizer.ggml.pre": pre} | (metadata or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            kind = gguf.GGUFValueType.UINT32 if is_count else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.n_layer)
    for name, tensor in weights.items():
        stored = tensor.numpy()
        kind = quantization if stored.ndim > 1 else Quantization.F32
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = llama_cpp_layout(stored, config.head_dim)
        raw_dtype = None if kind in (Quantization.F32, Quantization.F16) else kind
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), gguf.quantize(stored, kind), raw_dtype=raw_dtype)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def convert_tiny_gguf(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Write `tiny.gguf`, convert it in its folder, and return its weights."""
    weights = write_tiny_gguf(folder, **options)
    convert(folder, folder)
    return weights
