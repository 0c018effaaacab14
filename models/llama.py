"""The Transformer of every Llama-family model. The cache is an argument; drafts and policies are unknown here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionBackend, select_backend
from models.config import ModelConfig
from models.rope import inverse_frequencies, rotate, rotation


class SlotCache(Protocol):
    """What a forward needs of a cache: claim slots once, then write and read every layer."""

    @property
    def positions(self) -> Tensor: ...
    def begin(self, positions: Tensor) -> Any: ...
    def write(self, layer: int, slots: Any, keys: Tensor, values: Tensor) -> None: ...
    def read(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Step:
    """What all layers of one forward share."""

    cache: SlotCache
    slots: Any
    backend: AttentionBackend
    visible: Any
    cos: Tensor
    signed_sin: Tensor


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        n_qkv = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        self.wqkv = nn.Linear(config.dim, n_qkv, bias=config.qkv_bias)
        self.wo = nn.Linear(config.n_head * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        batch, n_token, _ = x.shape
        heads = self.wqkv(x).view(batch, n_token, -1, self.head_dim)
        rotated, v = heads.split([self.n_head + self.n_kv_head, self.n_kv_head], dim=2)
        rotated = rotate(rotated, step.cos, step.signed_sin)
        q, k = rotated.split([self.n_head, self.n_kv_head], dim=2)
        step.cache.write(self.layer, step.slots, k, v)
        keys, values = step.cache.read(self.layer)
        y = step.backend.attend(q, keys, values, step.visible)
        return self.wo(y.reshape(batch, n_token, -1))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.attention(self.attention_norm(x), step)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """`model(tokens [B, T] int64, positions [B, T] int64, cache) -> logits [B, T, vocab_size]`.

    Tokens are written to the cache at their positions and see what the cache's rule shows them.
    """

    def __init__(self, config: ModelConfig, attention: AttentionBackend | None = None) -> None:
        super().__init__()
        self.config = config
        self.backend = attention or select_backend()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        # None: the head is the embedding's weight.
        self.output: nn.Module | None = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        # Not a buffer: frequencies stay float32 whatever dtype the weights are cast to.
        self._frequencies = inverse_frequencies(config)

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights, and so of the caches that go with them."""
        return self.tok_embeddings.weight.dtype

    def forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        return self.logits(self.hidden(tokens, positions, cache))

    def hidden(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Normalised last hidden states `[B, T, dim]`; `logits` of a part of them is all a prefill needs."""
        x = self.tok_embeddings(tokens)
        self._frequencies = self._frequencies.to(x.device)
        cos, signed_sin = rotation(positions, self._frequencies, x.dtype)
        slots = cache.begin(positions)
        config = self.config
        visible = self.backend.prepare(positions, cache.positions, config.group_size, config.sliding_window, x.dtype)
        step = Step(cache, slots, self.backend, visible, cos, signed_sin)
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., dim] -> [..., vocab_size]`."""
        if self.output is None:
            return F.linear(hidden, self.tok_embeddings.weight)
        return self.output(hidden)
