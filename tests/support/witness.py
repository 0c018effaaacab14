"""A witness model: its KV is the tokens themselves, its next token a hash of all that the mask shows it.

Whatever is stale, missing, doubled, misplaced or leaked from another row changes the hash, so decoding
through caches and drafts agrees with `engine.evaluation.reference` only if every slot is right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine import ModelRunner
from kv_cache import FullKVCache
from kv_cache.entries import pack

VOCAB, ROOM = 23, 64
RECENT = 3


@dataclass(frozen=True)
class FakeConfig:
    vocab_size: int
    n_layer: int = 1
    n_kv_head: int = 1
    head_dim: int = 1
    max_context: int = 4096


class FakeModel:
    """Has the interface of a Transformer; its caches hold tokens (keys) and positions (values)."""

    dtype = torch.int64

    def __call__(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        return self.logits(self.hidden(tokens, positions, cache))

    def look(self, tokens: Tensor, positions: Tensor, cache) -> tuple[Tensor, Tensor, Tensor]:
        """Write a block; the tokens and positions that slots hold `[B, 1, S]`, and what queries see `[B, T, S]`."""
        cache.write(0, cache.begin(positions), pack(tokens[..., None, None], positions[..., None, None]))
        held, at = (entries[:, None, :, 0, 0].long() for entries in cache.read(0, tokens).dequantized(torch.float64))
        slots = cache.positions[:, None]
        return held, at, (slots >= 0) & (slots <= positions[..., None])


def witness_runner(n_rows: int) -> ModelRunner:
    model = WitnessModel()
    return ModelRunner(model, FullKVCache(model.config, n_rows, ROOM, dtype=torch.int64), prefill_chunk=5)


def mix(token, position):
    """A 31-bit hash of a (token, position) pair: of ints or of int64 tensors."""
    x = ((token + 1) * 0x9E3779B1 + (position + 1) * 0x85EBCA77) & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    x = ((x ^ (x >> 12)) * 0x297A2D39) & 0x7FFFFFFF
    return x ^ (x >> 15)


def logits_of(seen: Tensor) -> Tensor:
    """Whole-number logits `[..., VOCAB]` of a hash: one of 8 or more for the chosen token, many ties below."""
    chosen = torch.nn.functional.one_hot(seen % VOCAB, VOCAB)
    return (8 * chosen + mix(torch.arange(VOCAB), seen[..., None]) % 8).float()


class WitnessModel(FakeModel):
    config = FakeConfig(VOCAB)

    def hidden(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        held, at, visible = self.look(tokens, positions, cache)
        # What a draft has selected lies in slots of other positions.
        if not getattr(cache, "selects", False):
            assert bool(((at == cache.positions[:, None]) | ~visible).all()), "a slot's position is not its token's"
        hashes = mix(held, at)
        everything = (hashes * visible).sum(-1)
        recent = (hashes * (visible & (at > positions[..., None] - RECENT))).sum(-1)
        # Mostly the recent tokens decide, so a short-sighted draft is right often, but not always.
        return torch.where(everything % 4 == 0, everything // 4, recent)[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_of(hidden[..., 0])


def next_logits(text: list[int]) -> Tensor:
    """Return the logits `[VOCAB]` after a text, from the token list alone, with no cache of any kind."""
    hashes = [mix(token, position) for position, token in enumerate(text)]
    everything = sum(hashes)
    return logits_of(torch.tensor(everything // 4 if everything % 4 == 0 else sum(hashes[-RECENT:])))


def cut(tokens: list[int], stops: list[int]) -> list[int]:
    """`tokens` up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1]
    return tokens
