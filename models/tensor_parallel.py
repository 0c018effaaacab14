"""Tensor parallelism, applied from outside the model: which part of every weight a rank holds, and what it
exchanges with the others (Megatron-LM, arXiv 1909.08053, section 3).

A block's first linear layers are split by columns (heads; feed-forward units), its second ones by rows, so each
half of a block ends in one all-reduce. Query groups stay with their KV head. Embedding and head are split by the
vocabulary. Nothing has to divide evenly: sizes of parts differ by one head, unit or token id at most.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ConfigError, flag
from models.config import ModelConfig
from models.llama import Block, Embedding, Head, Transformer

Span = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of a model."""

    index: int
    count: int

    def span(self, n: int) -> Span:
        """This part's share of `n` things: first and behind-last index."""
        return spans(n, self.count)[self.index]


WHOLE = Shard(0, 1)


class Exchange(Protocol):
    """What the ranks that hold one model do together. `all_reduce`: the sum of every rank's `x`, in place or not.
    `gather`: the ranks' `x [..., widths[shard]]` side by side in shard order, on the rank that decides; an empty
    `[..., 0]` on the others."""

    @property
    def shard(self) -> Shard: ...
    def all_reduce(self, x: Tensor) -> Tensor: ...
    def gather(self, x: Tensor, widths: list[int]) -> Tensor: ...


def spans(n: int, count: int) -> list[Span]:
    """`n` things in `count` contiguous parts, as even as can be. The first part, whose rank also decides for all, is
    never larger than another; the last is never smaller."""
    return list(pairwise(part * n // count for part in range(count + 1)))


def vocab_widths(vocab_size: int, count: int) -> list[int]:
    """How many token ids each part of a vocabulary has."""
    return [end - first for first, end in spans(vocab_size, count)]


def check_count(config: ModelConfig, count: int, where: str) -> None:
    """Raise ConfigError unless every one of `count` ranks gets a KV head."""
    if count > config.n_kv_head:
        most, seen = config.n_kv_head, f"{config.n_kv_head} KV heads, {count} ranks"
        fix = f"use {most} ranks or fewer for this model (torchrun --nproc_per_node)"
        fix += f", or replicas of it ({flag('data_parallel')})"
        raise ConfigError("the model has fewer KV heads than ranks", where, seen, f"1 to {most} ranks", fix)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The configuration of one part: its heads, feed-forward units and token ids; `dim` is that of the whole. It has no
    end tokens, which are ids of the whole."""
    if shard.count == 1:
        return config
    n_kv, units, ids = (len(range(*shard.span(n))) for n in (config.n_kv_head, config.ffn_dim, config.vocab_size))
    n_head = n_kv * config.group_size
    return replace(config, n_head=n_head, n_kv_head=n_kv, ffn_dim=units, vocab_size=ids, eos_tokens=())


def shard_tensor(name: str, tensor: Tensor, config: ModelConfig, shard: Shard) -> Tensor:
    """One part of the tensor of that name (see `checkpoint.expected_shapes`) of `config`'s model, a view where it
    can be; norms are whole everywhere."""
    if shard.count == 1:
        return tensor
    head_dim, group, n_kv = config.head_dim, config.group_size, config.n_kv_head
    first, end = shard.span(n_kv)
    q = (first * group * head_dim, end * group * head_dim)
    befores = group * n_kv, group * n_kv + n_kv  # heads ahead of the keys, and of the values
    k, v = (((before + first) * head_dim, (before + end) * head_dim) for before in befores)
    units, ids = shard.span(config.ffn_dim), shard.span(config.vocab_size)
    up = (config.ffn_dim + units[0], config.ffn_dim + units[1])
    by_rows = {"wqkv": [q, k, v], "w13": [units, up], "tok_embeddings": [ids], "output": [ids]}
    by_columns = {"wo": [q], "w2": [units]}
    kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    parts = by_rows.get(kind) or by_columns.get(kind)
    if parts is None:
        return tensor
    dim = 1 if kind in by_columns else 0
    taken = [tensor.narrow(dim, start, end - start) for start, end in parts]
    return taken[0] if len(taken) == 1 else torch.cat(taken, dim)


class Joined(nn.Module):
    """What this rank's part of a layer gives, joined to what the other ranks' parts do."""

    def __init__(self, inner: nn.Module, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self._join = inner, join

    def forward(self, x: Tensor) -> Tensor:
        return self._join(self.inner(x))


class VocabParallelEmbedding(Embedding):
    """Embeddings of this rank's token ids, 0 for all others, summed over ranks."""

    def __init__(self, weight: Tensor, ids: Span, exchange: Exchange) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight, _freeze=True)
        self._exchange = exchange
        self._first, self._end = ids

    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self._first) | (tokens >= self._end)
        embedded = F.embedding((tokens - self._first).masked_fill(elsewhere, 0), self.weight)
        return self._exchange.all_reduce(embedded.masked_fill(elsewhere[..., None], 0))


def parallelise(model: Transformer, config: ModelConfig, exchange: Exchange) -> None:
    """Join a Transformer that holds one part of `config`'s model to the other ranks' parts. Its `config` keeps the
    part's heads, which its caches are built from, and speaks of the whole vocabulary."""
    shard = exchange.shard
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.attention.wo = Joined(layer.attention.wo, exchange.all_reduce)
        layer.feed_forward.w2 = Joined(layer.feed_forward.w2, exchange.all_reduce)
    weight = model.tok_embeddings.weight
    if (head := model.output) is None:
        head = Head(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
    model.output = Joined(head, partial(exchange.gather, widths=vocab_widths(config.vocab_size, shard.count)))
    model.tok_embeddings = VocabParallelEmbedding(weight, shard.span(config.vocab_size), exchange)
    model.config = replace(model.config, vocab_size=config.vocab_size, eos_tokens=config.eos_tokens)
