"""Which Hugging Face tensors make up each tensor of model.pth, and whether they are all there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.errors import CheckpointError
from models.checkpoints.source import SourceTensor
from models.config import ModelConfig

Part = tuple[str, tuple[int, ...]]


def source_parts(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """For each tensor of `loading.expected_shapes`, the source tensors stacked on dim 0, with shapes."""
    dim, ffn_dim = config.dim, config.ffn_dim
    n_q, n_kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    embedding = (config.vocab_size, dim)
    parts: dict[str, tuple[Part, ...]] = {"tok_embeddings.weight": (("model.embed_tokens.weight", embedding),)}
    for layer in range(config.n_layer):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        qkv = tuple((f"{theirs}self_attn.{name}_proj", rows) for name, rows in (("q", n_q), ("k", n_kv), ("v", n_kv)))
        parts[f"{ours}attention_norm.weight"] = ((f"{theirs}input_layernorm.weight", (dim,)),)
        parts[f"{ours}attention.wqkv.weight"] = tuple((f"{name}.weight", (rows, dim)) for name, rows in qkv)
        if config.qkv_bias:
            parts[f"{ours}attention.wqkv.bias"] = tuple((f"{name}.bias", (rows,)) for name, rows in qkv)
        parts[f"{ours}attention.wo.weight"] = ((f"{theirs}self_attn.o_proj.weight", (dim, n_q)),)
        parts[f"{ours}ffn_norm.weight"] = ((f"{theirs}post_attention_layernorm.weight", (dim,)),)
        parts[f"{ours}feed_forward.w13.weight"] = (
            (f"{theirs}mlp.gate_proj.weight", (ffn_dim, dim)),
            (f"{theirs}mlp.up_proj.weight", (ffn_dim, dim)),
        )
        parts[f"{ours}feed_forward.w2.weight"] = ((f"{theirs}mlp.down_proj.weight", (dim, ffn_dim)),)
    parts["norm.weight"] = (("model.norm.weight", (dim,)),)
    if not config.tie_embeddings:
        parts["output.weight"] = (("lm_head.weight", embedding),)
    return parts


def match_tensors(
    folder: Path, tensors: Mapping[str, SourceTensor], config: ModelConfig
) -> dict[str, tuple[SourceTensor, ...]]:
    """Find every part of every tensor. Raises CheckpointError for one missing, misshapen or unknown."""
    if config.n_layer > len(tensors):  # of which each layer has several: not to be listed for a billion layers
        raise _unlike_config("tensors are missing", folder, f"{len(tensors)} tensors", f"{config.n_layer} layers")
    parts = source_parts(config)
    required = dict(part for stacked in parts.values() for part in stacked)
    missing = [name for name in required if name not in tensors]
    if missing:
        raise _unlike_config("tensors are missing", folder, _few(missing), f"all {len(required)} of the config")
    tied_head = {"lm_head.weight"} if config.tie_embeddings else set()
    unknown = [name for name in tensors if name not in required and name not in tied_head]
    if unknown:
        raise _unlike_config("tensors that this model has no place for", folder, _few(unknown), "none")
    for name, shape in required.items():
        if tensors[name].shape != shape:
            where, seen = tensors[name].file, f"{name} {tensors[name].shape}"
            raise _unlike_config("a tensor has the wrong shape", where, seen, str(shape))
    return {name: tuple(tensors[part] for part, _ in stacked) for name, stacked in parts.items()}


def read_stacked(name: str, stacked: tuple[SourceTensor, ...], dtype: torch.dtype | None) -> Tensor:
    """Read source tensors and stack them along dim 0, in `dtype` or their own, to the tensor `name` of model.pth.

    Raises CheckpointError for one that cannot be read, or is not finite in that dtype.
    """
    target = dtype or stacked[0].dtype
    tensors = []
    for source in stacked:
        try:
            tensors.append(source.read().to(target))
        except (RuntimeError, ValueError, OSError) as error:
            raise _unlike_config("a tensor cannot be read", source.file, error, "a whole file") from None
        if not is_finite(tensors[-1]):
            raise _unlike_config("NaN or infinite weights", source.file, f"{name} in {target}", "finite numbers")
    return (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).contiguous()


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. One pass, in no memory of its own."""
    return all(bool(bound.isfinite()) for bound in tensor.aminmax())


def output_bytes(matched: Iterable[tuple[SourceTensor, ...]], dtype: torch.dtype | None) -> int:
    """Bytes of the weights that `read_stacked` will produce for these tensors."""
    widths = ((stacked, (dtype or stacked[0].dtype).itemsize) for stacked in matched)
    return sum(math.prod(source.shape) * width for stacked, width in widths for source in stacked)


def _few(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _unlike_config(what: str, where: Path, seen: object, required: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=str(where),
        seen=seen,
        required=required,
        fix="use a plain Llama, Mistral or Qwen2 checkpoint with its own config.json, downloaded whole",
    )
