"""Tensor parallelism, applied from outside the model (Megatron-LM, arXiv 1909.08053, section 3).

Attention and feed-forward each split their first linear layer by outputs (heads; units) and their second by inputs, so
each ends in an all-reduce. Query heads stay with their KV head. Embedding and head are split by the vocabulary.
Sizes need not divide evenly: parts differ by at most one KV head, unit or token id.
"""

import os
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import flag, refuse
from common.process import LEADER
from models.config import ModelConfig
from models.llama import Block, Embedding, Head, Transformer

Span = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of a model."""

    index: int
    count: int

    def span(self, n: int) -> Span:
        """Return the first index and the end of this part of `n` heads, units or ids."""
        return spans(n, self.count)[self.index]


WHOLE = Shard(0, 1)


@dataclass(frozen=True)
class ModelRanks:
    """The ranks that each hold a shard of a model, in the order of the shards, and their collective operations. Logits
    go to the leader, even if it holds no shard."""

    ranks: tuple[int, ...]
    own_rank: int
    group: dist.ProcessGroup | None
    gather_group: dist.ProcessGroup | None

    @property
    def holds(self) -> bool:
        """True if this process holds a shard."""
        return self.own_rank in self.ranks

    @property
    def shard(self) -> Shard:
        return Shard(self.ranks.index(self.own_rank), len(self.ranks))

    @property
    def backend(self) -> str:
        """The name of the library that sums over ranks, "nccl" or "gloo"; "none" on a single rank. NCCL's name has the
        variable that lets PyTorch sum through symmetric memory within a node: it changes bits."""
        name = "none" if self.group is None else dist.get_backend(self.group).rpartition(":")[2]
        within_node = os.environ.get("ENABLE_INTRA_NODE_COMM")
        return f"nccl, ENABLE_INTRA_NODE_COMM={within_node}" if name == "nccl" and within_node else name

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, which may be written over."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, vocab_size: int) -> Tensor:
        """Join the ranks' logits `x [..., ids of the shard]` on the leader; other ranks get an empty `[..., 0]`."""
        if self.gather_group is None:
            return x
        widths = [end - first for first, end in spans(vocab_size, len(self.ranks))]
        members = sorted({LEADER, *self.ranks})
        # Collectives need equal shapes: narrower parts are padded, and cut again.
        padded = F.pad(x, (0, max(widths) - x.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in members] if self.own_rank == LEADER else None
        dist.gather(padded, parts, group=self.gather_group, group_dst=LEADER)
        if parts is None:
            return x[..., :0]
        by_shard = zip(self.ranks, widths, strict=True)
        return torch.cat([parts[members.index(rank)][..., :width] for rank, width in by_shard], dim=-1)


def spans(n: int, count: int) -> list[Span]:
    """Divide `n` indices into `count` contiguous parts, as evenly as possible. The first part is never the larger of
    two, since the leader has further work."""
    return list(pairwise(part * n // count for part in range(count + 1)))


def check_count(config: ModelConfig, count: int, where: str) -> None:
    """Raise ConfigError if there are more ranks than KV heads."""
    if count > (most := config.n_kv_head):
        seen = f"{most} KV heads, {count} ranks"
        fix = f"use at most {most} ranks (torchrun --nproc_per_node), or replicas ({flag('data_parallel')})"
        refuse(where, seen, f"1 to {most} ranks", "the model has fewer KV heads than ranks", fix)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return a part's configuration: its heads, feed-forward units and token ids, and the whole model's `dim`. It has
    no end tokens, since these are ids of the whole vocabulary."""
    if shard.count == 1:
        return config
    n_kv, ids = (len(range(*shard.span(n))) for n in (config.n_kv_head, config.vocab_size))
    units = len(range(*_unit_span(config, shard)))
    n_head = n_kv * config.group_size
    return replace(config, n_head=n_head, n_kv_head=n_kv, ffn_dim=units, vocab_size=ids, eos_tokens=())


def _unit_span(config: ModelConfig, shard: Shard) -> tuple[int, int]:
    """Return the first feed-forward unit of a part and the one after its last. Experts' units come in eights where they
    can: `grouped_mm` reads rows of whole 16 bytes."""
    step = 8 if config.n_expert and config.ffn_dim % 8 == 0 else 1
    first, end = shard.span(config.ffn_dim // step)
    return first * step, end * step


def shard_tensor(name: str, tensor: Tensor, config: ModelConfig, shard: Shard) -> Tensor:
    """Return a part's share of a tensor (`name`: see `loading.expected_shapes`), as a view if possible. Every part has
    the whole of each norm. Biases after an all-reduce are the first part's, 0 in the others."""
    if shard.count == 1:
        return tensor
    kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    n_kv = config.n_kv_head
    heads, ids = (slice(*shard.span(n)) for n in (n_kv, config.vocab_size))
    units = slice(*_unit_span(config, shard))
    if kind == "wqkv":  # rows of query heads, then of key heads and value heads
        n_row = n_kv * config.head_dim
        q_k_v = tensor.split([config.group_size * n_row, n_row, n_row])
        return torch.cat([x.unflatten(0, (n_kv, -1))[heads].flatten(0, 1) for x in q_k_v])
    if kind == "w13":  # rows of gate and up, of each expert
        return torch.cat([x[units] for x in tensor.chunk(2 * max(config.n_expert, 1))])
    if kind in ("wo", "w2") and name.endswith(".bias"):
        return tensor if shard.index == 0 else torch.zeros_like(tensor)
    if kind == "wo":
        return tensor.unflatten(1, (n_kv, -1))[:, heads].flatten(1)
    if kind == "w2":
        return tensor[:, units]
    return tensor[ids] if kind in ("tok_embeddings", "output") else tensor


class VocabParallelEmbedding(Embedding):
    """Embeddings of this rank's token ids and 0 for other ids, summed over ranks."""

    def __init__(self, weight: Tensor, ids: Span, exchange: ModelRanks) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight, _freeze=True)
        self._exchange = exchange
        self._first, self._end = ids

    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self._first) | (tokens >= self._end)
        embedded = F.embedding((tokens - self._first).masked_fill(elsewhere, 0), self.weight)
        return self._exchange.all_reduce(embedded.masked_fill(elsewhere[..., None], 0))


def parallelise(model: Transformer, config: ModelConfig, exchange: ModelRanks) -> None:
    """Connect a Transformer, this rank's part of the model of `config`, to the other ranks. Its `config` keeps the
    heads of the part, for caches, and gets the whole vocabulary."""
    shard = exchange.shard
    for layer in model.layers:
        assert isinstance(layer, Block)
        for summed in (layer.attention.wo, layer.feed_forward):
            summed.register_forward_hook(lambda module, inputs, output: exchange.all_reduce(output))
    weight = model.tok_embeddings.weight
    if (head := model.output) is None:
        head = Head(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
        model.output = head
    head.register_forward_hook(lambda module, inputs, output: exchange.gather(output, config.vocab_size))
    model.tok_embeddings = VocabParallelEmbedding(weight, shard.span(config.vocab_size), exchange)
    model.config = replace(model.config, vocab_size=config.vocab_size, eos_tokens=config.eos_tokens)
