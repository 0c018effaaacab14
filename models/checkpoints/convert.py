"""Tensors of an open download, whatever its format, and which of them make up each tensor of model.pth."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import refuse_checkpoint
from models.config import ModelConfig

USE_PLAIN = "use a plain checkpoint of a supported family (docs/checkpoints.md) with its own config.json, whole"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Part = tuple[str, tuple[int, ...]]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the source; `read` returns it as a CPU tensor of `shape` and `dtype`, or not yet rounded to it.
    published: name of the dtype, or quantisation, that the file has it in, such as Q4_1 or AWQ4."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    read: Callable[[], Tensor]
    published: str


@dataclass(frozen=True)
class Source:
    """The weight files of a folder, their tensors by Hugging Face name, and the Hugging Face config. side_files: names
    of the folder's config.json, tokenizer and the like for these weights. The missing ones come from a GGUF's metadata:
    `hf_config`, `tokenizer_json` and `chat_template`."""

    files: tuple[Path, ...]
    tensors: dict[str, SourceTensor]
    hf_config: dict[str, Any]
    config: ModelConfig
    side_files: tuple[str, ...]
    tokenizer_json: str | None = None
    chat_template: str | None = None


def source_parts(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Return the source tensors, with shapes, that are stacked on dim 0 to each tensor of `loading.expected_shapes`."""
    dim, ffn_dim, head_dim, embedding = config.dim, config.ffn_dim, config.head_dim, (config.vocab_size, config.dim)
    n_q, n_kv, gate_and_up = config.n_head * head_dim, config.n_kv_head * head_dim, ("gate_proj", "up_proj")
    qkv = {"self_attn.q_proj": n_q, "self_attn.k_proj": n_kv, "self_attn.v_proj": n_kv}
    qk_norm = {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim} if config.qk_norm else {}
    # The rows of each part, the columns of a matrix, and whether it has a bias.
    stacks: dict[str, tuple[dict[str, int], tuple[int, ...], bool]] = {
        "attention_norm": ({"input_layernorm": dim}, (), False),
        "attention.wqkv": (qkv, (dim,), config.qkv_bias),
        "attention.wo": ({"self_attn.o_proj": dim}, (n_q,), config.wo_bias),
        "attention.qk_norm": (qk_norm, (), False),
        "ffn_norm": ({"post_attention_layernorm": dim}, (), False),
        "feed_forward.w13": ({f"mlp.{name}": ffn_dim for name in gate_and_up}, (dim,), config.mlp_bias),
        "feed_forward.w2": ({"mlp.down_proj": dim}, (ffn_dim,), config.mlp_bias),
    }
    if config.n_expert:
        experts = [f"mlp.experts.{index}" for index in range(config.n_expert)]
        both = {f"{expert}.{name}": ffn_dim for expert in experts for name in gate_and_up}
        stacks |= {
            "feed_forward.router": ({"mlp.gate": config.n_expert}, (dim,), False),
            "feed_forward.w13": (both, (dim,), False),
            "feed_forward.w2": ({f"{expert}.down_proj": dim for expert in experts}, (ffn_dim,), False),
        }
    parts: dict[str, tuple[Part, ...]] = {"tok_embeddings.weight": ((EMBEDDING, embedding),)}
    for layer in range(config.n_layer):
        for ours, (theirs, columns, has_bias) in stacks.items():
            for kind, size in (("weight", columns), *([("bias", ())] if has_bias else [])):
                stacked = ((f"model.layers.{layer}.{name}.{kind}", (rows, *size)) for name, rows in theirs.items())
                if theirs:
                    parts[f"layers.{layer}.{ours}.{kind}"] = tuple(stacked)
    parts["norm.weight"] = (("model.norm.weight", (dim,)),)
    if not config.tie_embeddings:
        parts["output.weight"] = ((HEAD, embedding),)
    return parts


def separate_fused(tensors: Mapping[str, SourceTensor], config: ModelConfig) -> dict[str, SourceTensor]:
    """Cut Phi-3's fused tensors into those that other models have.

    Where only the first `rotary_dim` elements of a head are rotated, the elements of queries and keys change places, so
    that a rotary pair lies half a head apart like in a model that rotates whole heads.
    """
    n_kv, rotary_dim = config.n_kv_head * config.head_dim, config.rotary_dim or config.head_dim
    fused = {
        "qkv_proj": {"q_proj": config.n_head * config.head_dim, "k_proj": n_kv, "v_proj": n_kv},
        "gate_up_proj": {"gate_proj": config.ffn_dim, "up_proj": config.ffn_dim},
    }
    rotated, unrotated = torch.arange(config.head_dim).split([rotary_dim, config.head_dim - rotary_dim])
    order = torch.cat([rotated.view(2, -1), unrotated.view(2, -1)], dim=1).flatten()

    def read(source: SourceTensor, first: int, end: int, has_pairs: bool) -> Tensor:
        rows = source.read()[first:end]
        return rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1) if has_pairs else rows

    separate: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        module, first = ("", *name.split("."))[-2], 0
        if tensor.shape[:1] != (sum(fused.get(module, {}).values()),):  # also a fused tensor of another size
            separate[name] = tensor
            continue
        for part, n_row in fused[module].items():
            cut = partial(read, tensor, first, first + n_row, part in ("q_proj", "k_proj"))
            separate[name.replace(module, part)] = replace(tensor, shape=(n_row, *tensor.shape[1:]), read=cut)
            first += n_row
    return separate


def match_parts(
    folder: Path,
    tensors: Mapping[str, SourceTensor],
    parts: Mapping[str, tuple[Part, ...]],
    ignored: Collection[str] = (),
    fix: str = USE_PLAIN,
) -> dict[str, tuple[SourceTensor, ...]]:
    """Find every part of every tensor. Raises CheckpointError for one missing, misshapen or unknown, unless that is
    ignored, or a bias that is read and is 0."""
    required = dict(part for stacked in parts.values() for part in stacked)
    if missing := sorted(required.keys() - tensors.keys()):
        files = {tensor.file for tensor in tensors.values()}
        where, seen = files.pop() if len(files) == 1 else folder, f"{len(missing)}, such as {missing[0]}"
        refuse_checkpoint(where, seen, f"all {len(required)} of the config", "tensors are missing", fix=fix)
    unknown = sorted(tensors.keys() - required.keys() - set(ignored))
    # Tools that quantise add biases of 0 to layers without biases.
    if unknown := [name for name in unknown if not name.endswith(".bias") or tensors[name].read().any()]:
        refuse_checkpoint(folder, f"{len(unknown)}, such as {unknown[0]}", "none", "tensors of another model", fix=fix)
    for name, shape in required.items():
        if (found := tensors[name]).shape != shape:
            refuse_checkpoint(found.file, f"{name} {found.shape}", shape, "a tensor has the wrong shape", fix=fix)
    return {name: tuple(tensors[part] for part, _ in stacked) for name, stacked in parts.items()}


def check_tied_head(tensors: Mapping[str, SourceTensor]) -> None:
    """Raise CheckpointError if there is an output layer unlike the embedding that the config ties it to. transformers
    keeps such a layer, and so would run another model."""
    if (head := tensors.get(HEAD)) is None:
        return
    embedding = tensors[EMBEDDING]
    both = [read_stacked(name, (tensor,), None) for name, tensor in ((HEAD, head), (EMBEDDING, embedding))]
    dtype = torch.promote_types(head.dtype, embedding.dtype)
    if not torch.equal(*(weight.to(dtype) for weight in both)):
        seen, required = f"{HEAD} unlike {EMBEDDING}", "equal weights, or none, with tie_word_embeddings true"
        fix = "set tie_word_embeddings to false in config.json, if the model was trained with another output layer"
        what = "the output layer is not the embedding that it is tied to"
        refuse_checkpoint(head.file, seen, required, what, fix=fix)


def read_stacked(name: str, stacked: tuple[SourceTensor, ...], dtype: torch.dtype | None) -> Tensor:
    """Read source tensors and stack them along dim 0 to the tensor `name` of model.pth, in `dtype` or in the smallest
    that holds all of theirs. Raises CheckpointError for one that cannot be read, or is not finite in that dtype."""
    target, tensors = dtype or reduce(torch.promote_types, (source.dtype for source in stacked)), []
    for source in stacked:
        try:
            tensors.append(source.read().to(target))
        except (RuntimeError, ValueError, OSError) as error:
            refuse_checkpoint(source.file, error, "a whole file")
        require_finite(source.file, name, tensors[-1])
    return (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).contiguous()


def require_finite(file: object, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if a value is NaN or infinite. Takes one pass and no further memory."""
    if not all(bool(bound.isfinite()) for bound in tensor.aminmax()):
        fix = "use weights without these, or a wider dtype"
        refuse_checkpoint(file, f"{name} in {tensor.dtype}", "finite numbers", "NaN or infinite weights", fix=fix)
