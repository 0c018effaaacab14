"""PlannedTarget, the target that drafts are planned for, and Models, which loads every model of a session once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.say import say
from engine.parallel.ranks import Ranks, model_ranks
from kv_cache import FullKVCache
from models import ModelConfig, Transformer
from models.attention import select_backend
from models.checkpoints.config_changes import NO_CHANGES, ConfigChanges
from models.checkpoints.model_source import ModelSource
from models.kernels.packed_linear import can_pack
from models.kernels.pointwise import compiled, use_pointwise
from models.kernels.pointwise_cpp import pointwise_for
from models.llama import attention_spec
from models.names import Backend
from models.repeated_blocks import repeat_blocks
from models.storage import model_bytes
from models.tensor_parallel import ModelRanks, Shard, shard_config


@dataclass(frozen=True)
class Weights:
    """A model, or a head, and the form of its weights in memory. layers: those of the model that run; None: all."""

    source: ModelSource
    dtype: torch.dtype
    quantize: str | None = None
    layers: tuple[int, ...] | None = None

    @property
    def config(self) -> ModelConfig:
        """The configuration of the layers that run."""
        config = self.source.config
        return config if self.layers is None else config.with_layers(self.layers)


@dataclass(frozen=True)
class PlannedTarget:
    """The target that drafts are planned for, as its run stores it, and the sizes of the run.

    n_rows: rows that decode together. prefix_len: tokens of the longest prompt. capacity: tokens of the longest row; 0
    while they follow from gamma.
    group: ranks that hold the target, in shard order. load_format, changes: see `find_model`; a second model is
    found in the same way. repeats_plain: True if plain decoding runs, and speculation emits its tokens.
    """

    weights: Weights
    kv_dtype: torch.dtype
    device: str
    group: tuple[int, ...]
    n_rows: int
    prefix_len: int
    gen_len: int
    capacity: int = 0
    attention: Backend = "auto"
    compile: bool = False
    load_format: str = "pth"
    changes: ConfigChanges = NO_CHANGES
    repeats_plain: bool = False

    @property
    def source(self) -> ModelSource:
        return self.weights.source

    def length(self, gamma: int) -> int:
        """Return the tokens of the longest row, with the `gamma` drafts of its last round."""
        return self.capacity or self.prefix_len + self.gen_len + gamma + 1

    def longer(self, n_tokens: int) -> PlannedTarget:
        """Return the target of a run whose rows are longer."""
        capacity = self.capacity and self.capacity + n_tokens
        return replace(self, gen_len=self.gen_len + n_tokens, capacity=capacity)

    def n_bytes(self) -> tuple[int, int]:
        """Return the bytes of its weights, and of a row's KV entries, on the rank with the largest shard."""
        config = largest_shard(self.source.config, self.group)
        kv = FullKVCache(config, 1, self.capacity, "meta", self.kv_dtype).n_bytes
        return weights_bytes(self.weights, self.group, self.device), kv

    def load(self, weights: Weights, ranks: ModelRanks) -> Transformer:
        """Load a model, or this rank's shard of it."""
        exchange = ranks if len(self.group) > 1 else None
        form: dict[str, Any] = {"dtype": weights.dtype, "quantize": weights.quantize}
        form |= {} if weights.layers is None else {"layers": weights.layers}
        return weights.source.load(device=self.device, attention=self.attention, exchange=exchange, **form)

    def prepare(self, model: Transformer, kv_dtype: torch.dtype, name: str) -> None:
        """Give a model the attention backend for its shape and KV entries, and pointwise kernels that suit it."""
        config = model.config
        model.backend, why = select_backend(self.attention, self.device, attention_spec(config, model.dtype), kv_dtype)
        say(f"{name}: {model.backend.name} ({why})")
        sizes = (config.dim, config.ffn_dim, config.n_head, config.n_kv_head, config.head_dim)
        use_pointwise(model, compiled(sizes=sizes) if self.compile else pointwise_for(model.backend.name))
        repeat_blocks(model)


class Models:
    """The target of a session, and models and heads that draft, by their weights; each is loaded once.

    ranks: of a replica. target_ranks: those that hold the target.
    """

    def __init__(self, target: PlannedTarget, ranks: Ranks) -> None:
        self.planned, self._ranks = target, ranks
        self._groups: dict[tuple[int, ...], ModelRanks] = {}
        self.target_ranks = self.ranks_of(target.group)
        self.loaded: dict[Weights, Any] = {}

    def load_target(self) -> Transformer:
        self.target = self.planned.load(self.planned.weights, self.target_ranks)
        self.planned.prepare(self.target, self.planned.kv_dtype, "attention")
        return self.target

    def ranks_of(self, group: tuple[int, ...]) -> ModelRanks:
        """Return the group of ranks that hold a model; every rank has to call this."""
        if group not in self._groups:
            self._groups[group] = model_ranks(self._ranks, group)
        return self._groups[group]


def largest_shard(config: ModelConfig, group: Sequence[int]) -> ModelConfig:
    return shard_config(config, Shard(len(group) - 1, len(group)))


def step_bytes(weights: Weights, group: Sequence[int], device: str) -> int:
    """Return the bytes of weights that a decode step reads on that rank: all but the table of token embeddings."""
    config = largest_shard(weights.config, group)
    is_head = config.tie_embeddings and weights.quantize is None and not can_pack(device, weights.dtype)
    table = 0 if is_head else config.vocab_size * config.dim * weights.dtype.itemsize
    return weights_bytes(weights, group, device) - table


def weights_bytes(weights: Weights, group: Sequence[int], device: str) -> int:
    """Return the bytes of a model's weights on the rank with the largest shard."""
    config, published = largest_shard(weights.config, group), weights.source.published
    return model_bytes(config, weights.dtype, weights.quantize, device, published)
