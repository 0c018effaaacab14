"""Tiny heads in the layouts in which they are published, plain code that computes the same, and drafters with heads."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from engine import ModelRunner
from engine.drafters.dflash import DFlash
from engine.drafters.eagle import Eagle
from engine.drafters.head_drafter import HeadDrafter
from kv_cache import KVCache
from kv_cache.base import KVShape
from models import ModelConfig
from models.heads.dflash import DFlashHead, DFlashShape
from models.heads.eagle import EagleHead, EagleShape
from models.heads.loading import published
from models.heads.medusa import MedusaHeads, MedusaShape

WIDTH, N_HEAD, N_KV_HEAD, HEAD_DIM, FFN = 32, 4, 2, 12, 40
EPS, THETA = 1e-5, 700.0
MASK = 2


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return random tensors: norms around 1, the rest large enough that every part matters."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in shapes.items()}
    return {name: 1 + 0.3 * x if "norm" in name else 0.3 * x for name, x in tensors.items()}


def medusa_tensors(target: ModelConfig, n_head: int = 4) -> dict[str, Tensor]:
    """Return the tensors of Medusa heads of two layers each."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(n_head):
        for j in (0, 1):
            shapes |= {f"{i}.{j}.linear.weight": (target.dim, target.dim), f"{i}.{j}.linear.bias": (target.dim,)}
        shapes[f"{i}.2.weight"] = (target.vocab_size, target.dim)
    return random_tensors(shapes)


def eagle_tensors(
    target: ModelConfig, version: int = 3, n_layer: int = 1, n_draft: int | None = None, **options: Any
) -> dict[str, Tensor]:
    """Return an EAGLE head's tensors. n_draft: ids of its vocabulary; options: of its config, or `bias` of `fc`."""
    dim, width = (target.dim if version == 1 else WIDTH), (target.dim if version == 1 else 2 * WIDTH)
    first = "midlayer" if version == 3 and n_layer == 1 else "layers.0"
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (target.vocab_size, dim)}
    shapes["fc.weight"] = (dim, 2 * dim if version == 1 else 3 * target.dim)
    if options.get("bias"):
        shapes["fc.bias"] = (dim,)
    for i in range(n_layer):
        at, n_in = (first, width) if i == 0 else (f"layers.{i}", dim)
        for name, heads in (("q", N_HEAD), ("k", N_KV_HEAD), ("v", N_KV_HEAD)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (heads * HEAD_DIM, n_in)
            if options.get("attention_bias"):
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (dim, N_HEAD * HEAD_DIM)
        shapes |= {f"{at}.mlp.{name}_proj.weight": (FFN, dim) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (dim, FFN)
        shapes[f"{at}.post_attention_layernorm.weight"] = (dim,)
        if i or version == 3:
            shapes[f"{at}.input_layernorm.weight"] = (dim,)
    if version == 1:
        return random_tensors(shapes)
    shapes |= {f"{first}.hidden_norm.weight": (dim,), "norm.weight": (dim,)}
    shapes["lm_head.weight"] = (n_draft or target.vocab_size, dim)
    tensors = random_tensors(shapes)
    if n_draft:
        ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))[:n_draft].sort().values
        tensors["d2t"] = ids - torch.arange(n_draft)
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def eagle_config(target: ModelConfig, version: int = 3, n_layer: int = 1, **options: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"hidden_size": target.dim if version == 1 else WIDTH, "intermediate_size": FFN}
    values |= {"num_attention_heads": N_HEAD, "num_key_value_heads": N_KV_HEAD, "head_dim": HEAD_DIM}
    values |= {"num_hidden_layers": n_layer, "vocab_size": target.vocab_size, "rms_norm_eps": EPS, "rope_theta": THETA}
    values |= {"hidden_act": "silu", "max_position_embeddings": 256, "target_hidden_size": target.dim}
    return values | options


def dflash_config(target: ModelConfig, n_layer: int = 2, **options: Any) -> dict[str, Any]:
    """Return the config of a DFlash head in its authors' layout, which reads three layers of the target.

    options: keys of `dflash_config`, or next to it.
    """
    values = eagle_config(target, 1, n_layer) | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    inner = {"target_layer_ids": [0, 1, target.n_layer - 2], "mask_token_id": target.vocab_size - 1, "block_size": 8}
    inner |= {name: options.pop(name) for name in tuple(options) if name in inner}
    return values | {"dflash_config": inner, "num_target_layers": target.n_layer} | options


def dflash_tensors(target: ModelConfig, n_layer: int = 2) -> dict[str, Tensor]:
    """Return the tensors of a DFlash head that reads three layers of the target."""
    return published(random_dflash(target, n_layer, target.dim))


def save_head(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], file: str = "model.safetensors") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


def filled(head: Module) -> Module:
    """Fill a head with random weights in float64."""
    shapes = {name: tuple(x.shape) for name, x in head.named_parameters()}
    head.load_state_dict(random_tensors(shapes), assign=True)
    return head.eval().requires_grad_(False)


def random_eagle(target: KVShape, version: int = 3, dim: int = WIDTH, mask_token: int | None = None) -> EagleHead:
    """Return an EAGLE-1 that borrows the target's parts, or an EAGLE-3 with two of three of the target's ids.

    dim: width of the target's states. mask_token: of a P-EAGLE.
    """
    ids = torch.tensor([i for i in range(target.vocab_size) if i % 3 != 2])
    config = layers_config(target, 1, dim)
    if version == 1:
        return filled(EagleHead(EagleShape(config, dim, has_embedding=False, fc_bias=True)))
    inputs_of = (0, target.n_layer // 2, target.n_layer)  # of deep targets others than DFlash heads read
    head = filled(EagleHead(EagleShape(config, dim, len(ids), inputs_of, mask_token=mask_token)))
    head.target_ids = ids
    return head


def random_dflash(target: KVShape, n_layer: int = 2, dim: int = WIDTH, **shape: Any) -> DFlashHead:
    """Return a DFlash head that reads three of the target's layers and borrows its parts. dim: width of the target's
    states; shape: further fields of DFlashShape."""
    config = replace(layers_config(target, n_layer, dim), qk_norm=True)
    fields = {"mask_token": target.vocab_size - 1, "block_size": 8, "has_embedding": False} | shape
    return filled(DFlashHead(DFlashShape(config, dim, inputs_of=(0, 1, target.n_layer), **fields)))


def layers_config(target: KVShape, n_layer: int, dim: int) -> ModelConfig:
    sizes = {"dim": dim, "n_head": N_HEAD, "n_kv_head": N_KV_HEAD, "head_dim": HEAD_DIM, "ffn_dim": FFN}
    return ModelConfig(vocab_size=target.vocab_size, n_layer=n_layer, **sizes, max_context=64)


def random_medusa(target: KVShape, dim: int = WIDTH, n_head: int = 6) -> MedusaHeads:
    return filled(MedusaHeads(MedusaShape(n_head, 1, dim, target.vocab_size)))


def plain_medusa(tensors: dict[str, Tensor], i: int, hidden: Tensor) -> Tensor:
    """Return the logits of head i of `medusa_tensors`."""
    for j in (0, 1):
        before = tensors[f"{i}.{j}.linear.weight"] @ hidden + tensors[f"{i}.{j}.linear.bias"]
        hidden = hidden + before * torch.sigmoid(before)
    return tensors[f"{i}.2.weight"] @ hidden


def whole_dflash(target: KVShape, **options: Any) -> DFlashHead:
    """Return a DFlash head that borrows nothing, and has two of three of the target's ids."""
    ids = torch.tensor([i for i in range(target.vocab_size) if i % 3 != 2])
    head = random_dflash(target, draft_vocab_size=len(ids), has_embedding=True, **options)
    head.target_ids = ids
    return head


HEADS: dict[str, tuple[type[HeadDrafter], Callable[..., Any]]] = {
    "eagle-1": (Eagle, partial(random_eagle, version=1)),
    "eagle-3": (Eagle, random_eagle),
    "P-EAGLE": (Eagle, partial(random_eagle, mask_token=MASK)),
    "dflash": (DFlash, random_dflash),
    "dflash, whole": (DFlash, whole_dflash),
    "dspark, whole": (DFlash, partial(whole_dflash, drafts_anchor=True, markov_rank=5, markov_kind="rnn")),
    "dflash 2": (DFlash, partial(random_dflash, selector_rank=4, selector_top_k=9, n_tap=2, conv_group=8)),
}


def with_head(
    kind: str, runner: ModelRunner, new_cache: Callable[[ModelConfig], KVCache], gamma: int, **options: Any
) -> HeadDrafter:
    """Return a drafter with a head of one of HEADS. options: of the function that makes the head."""
    made, make = HEADS[kind]
    head = make(runner.model.config, **options).to(runner.device)
    return made(runner, head, new_cache(head.body.config), gamma)
