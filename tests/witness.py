"""A witness model: its KV is the tokens themselves, its next token a hash of all that the mask shows it.

Whatever is stale, missing, doubled, misplaced or leaked from another row changes the hash, so decoding
through caches and drafts agrees with the plain reference below only if every slot is right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.modes import Drafts

VOCAB = 23
RECENT = 3


@dataclass(frozen=True)
class WitnessConfig:
    vocab_size: int = VOCAB
    n_layer: int = 1
    n_kv_head: int = 1
    head_dim: int = 1
    max_context: int = 4096


def mix(tokens: Tensor, positions: Tensor) -> Tensor:
    """A hash of each (token, position) pair; int64 arithmetic wraps, which is fine here."""
    x = (tokens + 1) * 0x9E3779B1 + (positions + 1) * 0x85EBCA77
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    x = (x ^ (x >> 12)) * 0x297A2D39
    return (x ^ (x >> 15)) & 0xFFFFFFF


def choose(everything: Tensor, recent: Tensor) -> Tensor:
    """Mostly the recent tokens decide, so a short-sighted draft is right often, but not always."""
    return torch.where(everything % 4 == 0, (everything // 4) % VOCAB, recent % VOCAB)


class WitnessModel:
    """Has the interface of a Transformer; its caches hold int64 tokens (keys) and positions (values)."""

    config = WitnessConfig()
    dtype = torch.int64

    def __call__(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        return self.logits(self.hidden(tokens, positions, cache))

    def hidden(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        slots = cache.begin(positions)
        cache.write(0, slots, tokens[..., None, None], positions[..., None, None])
        keys, values = cache.read(0)
        held, at = keys[:, :, 0, 0][:, None], values[:, :, 0, 0][:, None]
        slot_positions, queries = cache.positions[:, None], positions[..., None]
        visible = (slot_positions >= 0) & (slot_positions <= queries)
        assert bool(((at == slot_positions) | ~visible).all()), "a slot's position is not that of its token"
        hashes = mix(held, at)
        everything = (hashes * visible).sum(-1)
        recent = (hashes * (visible & (at > queries - RECENT))).sum(-1)
        return choose(everything, recent)[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[..., 0], VOCAB).float()


def continue_plainly(prompt: list[int], n_tokens: int) -> list[int]:
    """The reference: `n_tokens` more tokens, from the token list alone, with no cache of any kind."""
    tokens = list(prompt)
    hashes = mix(torch.tensor(tokens), torch.arange(len(tokens))).tolist()
    for _ in range(n_tokens):
        chosen = choose(torch.tensor(sum(hashes)), torch.tensor(sum(hashes[-RECENT:])))
        tokens.append(int(chosen))
        hashes.append(int(mix(chosen, torch.tensor(len(tokens) - 1))))
    return tokens[len(prompt) :]


def cut(tokens: list[int], stops: list[int]) -> list[int]:
    """`tokens` up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1]
    return tokens


class ExactlyJ:
    """A drafter that reads the future: row b's round proposes `plan()` right drafts, then a wrong one."""

    def __init__(self, cache, gamma: int, rng: random.Random) -> None:
        self.gamma, self.cache, self.rng = gamma, cache, rng
        self.right: dict[int, int] = {}

    @property
    def verification_cache(self):
        return self.cache

    def check(self, target_cache, length: int) -> None:
        pass

    def admit(self, row: int, request: int, prompt) -> None:
        pass

    def rollback(self, lengths: Tensor) -> None:
        pass

    def propose(self, current: Tensor, lengths: Tensor, extent: int, verification) -> Drafts:
        rows = []
        for row, (token, length) in enumerate(zip(current.tolist(), lengths.tolist(), strict=True)):
            context = [*self.cache.keys[0, row, 0, :length, 0].tolist(), token]
            future = continue_plainly(context, self.gamma)
            right = self.rng.randint(0, self.gamma)
            self.right[row] = right
            rows.append(future[:right] + [(t + 1) % VOCAB for t in future[right:]])
        return Drafts(torch.tensor(rows, dtype=torch.int64).reshape(len(rows), self.gamma))
