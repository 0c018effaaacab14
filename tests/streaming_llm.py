"""A StreamingLLM that keeps plain lists of tokens, as a reference for the streaming cache."""

import torch
from torch import Tensor

from models import Transformer
from models.rope import Rope


class StreamingLLM:
    """One row of StreamingLLM (arXiv 2309.17453, section 3.2): lists of un-rotated keys, places by list order.

    Before a block runs, the oldest entries that are no sinks leave until the block fits into the budget.
    """

    def __init__(self, model: Transformer, budget: int, n_sink: int) -> None:
        self.model, self.budget, self.n_sink = model, budget, n_sink
        self.positions: list[int] = []
        self.entries: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.layers]

    @property
    def length(self) -> int:
        return self.positions[-1] + 1 if self.positions else 0

    def forget(self, length: int) -> None:
        """Drop the positions from `length` on; what a longer text evicted does not come back."""
        kept = sum(position < length for position in self.positions)
        for held in (self.positions, *self.entries):
            del held[kept:]

    def run(self, tokens: list[int]) -> Tensor:
        """Logits `[T, V]` of the block of tokens that follows what is held."""
        start = self.length
        n_evicted = max(0, len(self.positions) + len(tokens) - self.budget)
        for held in (self.positions, *self.entries):
            del held[self.n_sink : self.n_sink + n_evicted]
        self.positions += range(start, start + len(tokens))
        assert len(self.positions) <= self.budget
        x = self.model.tok_embeddings.weight[torch.tensor(tokens)]
        for entries, block in zip(self.entries, self.model.layers, strict=True):
            x = x + self._attention(block.attention_norm(x), entries, block.attention)
            gate, up = (block.ffn_norm(x) @ block.feed_forward.w13.weight.T).chunk(2, dim=-1)
            x = x + (gate * gate.sigmoid() * up) @ block.feed_forward.w2.weight.T
        head = self.model.output or self.model.tok_embeddings
        return self.model.norm(x) @ head.weight.T

    def _attention(self, x: Tensor, entries: list[tuple[Tensor, Tensor]], weights) -> Tensor:
        config, n_token = self.model.config, len(x)
        stacked = x @ weights.wqkv.weight.T
        if weights.wqkv.bias is not None:
            stacked = stacked + weights.wqkv.bias
        n_q, n_kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        q, k, v = (part.view(n_token, -1, config.head_dim) for part in stacked.split([n_q, n_kv, n_kv], dim=-1))
        if weights.qk_norm is not None:
            of_q, of_k = weights.qk_norm.weight.chunk(2)
            q, k = normed(q, of_q, config.norm_eps), normed(k, of_k, config.norm_eps)
        entries += zip(k, v, strict=True)
        rope = self.model._rope if weights.is_rotated else Rope(torch.zeros(1), torch.ones(1))
        keys = [turned(key, place, rope) for place, (key, _) in enumerate(entries)]
        out = []
        for i in range(n_token):
            n_seen = len(entries) - n_token + i + 1
            query = turned(q[i], n_seen - 1, rope)
            for head in range(config.n_head):
                group = head // (config.n_head // config.n_kv_head)
                scores = torch.stack([query[head] @ key[group] for key in keys[:n_seen]]) * config.head_dim**-0.5
                out.append(scores.softmax(0) @ torch.stack([value[group] for _, value in entries[:n_seen]]))
        return torch.stack(out).view(n_token, -1) @ weights.wo.weight.T


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, place: int, rope: Rope) -> Tensor:
    """Heads `x [H, D]` turned to a place: pair i, (x[i], x[i + D/2]), as a complex number."""
    first, second = x.chunk(2, dim=-1)
    pairs = torch.complex(first, second) * rope.amplitudes * torch.exp(1j * place * rope.frequencies.double())
    return torch.cat([pairs.real, pairs.imag], dim=-1)
