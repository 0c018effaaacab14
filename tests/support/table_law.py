"""Sequences of a model whose every law is looked up in a table, so that all of them can be enumerated; chi-square and
total variation, without scipy."""

from __future__ import annotations

import functools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.sampling.distribution import SamplingParams, logits_to_probs
from tests.support.edit_cases import edited
from tests.support.witness import FakeConfig, FakeModel

VOCAB, N_NEW, STOP = 4, 4, 3
ROOM = 16
FEWEST = 5.0  # cells that expect fewer counts are pooled into one
N_REQUESTS = 20_000 if "LAW_PAIRS" in os.environ else 400
PROMPTS = ([2], [1, 0, 3, 1, 1, 2], [0, 1, 0])
PLAIN = SamplingParams(temperature=0.9)
FILTERED = SamplingParams(temperature=1.2, top_k=3, top_p=0.95)
TYPICAL = SamplingParams(temperature=1.5, min_p=0.1, typical_p=0.8)
EDITS = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 1.5, "logit_bias": {2: 1.0}}
EDITED = SamplingParams(temperature=0.9, **EDITS, min_tokens=2, bad_words=[[0, 1], [2, 2, 0], [1, 3]])


class TableModel(FakeModel):
    """A model whose logits are looked up by a code of all that a query sees: each context has another law."""

    config = FakeConfig(VOCAB, max_context=ROOM)
    dtype = torch.float64

    def __init__(self, seed: int, near: TableModel | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.codes = torch.randint(1 << 40, (ROOM, VOCAB), generator=generator)
        self.table = 1.5 * torch.randn(4099, VOCAB, generator=generator, dtype=torch.float64)
        if near:
            # Its laws differ everywhere, but are alike where it sees the same context.
            self.codes, self.table = near.codes, near.table + 0.7 * self.table

    def hidden(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        held, at, visible = self.look(tokens, positions, cache)
        return self.table[(self.codes[at, held] * visible).sum(-1) % len(self.table)]

    def hidden_states(self, tokens: Tensor, positions: Tensor, cache, layers=()) -> tuple[Tensor, Tensor]:
        """Return hidden states, which are the logits, also as the inputs that a head reads."""
        hidden = self.hidden(tokens, positions, cache)
        return hidden, hidden.repeat(1, 1, max(1, len(layers)))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits_after(self, tokens: list[int]) -> Tensor:
        """Return the logits after a token list, without a cache or a batch."""
        return self.table[sum(int(self.codes[i, token]) for i, token in enumerate(tokens)) % len(self.table)]


Group = tuple[int, SamplingParams]  # a prompt's index, and how it is sampled
TARGET = TableModel(seed=1)
DRAFT = TableModel(seed=2, near=TARGET)
INNER = TableModel(seed=3, near=DRAFT)


def enumerate_sequences(
    prompt: list[int], params: SamplingParams, allowed: Callable[[Sequence[int]], list[int]] | None = None
) -> dict[tuple[int, ...], float]:
    """Return every output that decoding can give, with its probability. allowed: the ids that may follow an answer."""
    next_logits = edited(TARGET.logits_after, prompt, params, [STOP])
    complete, open_ends = {}, {(): 1.0}
    while open_ends:
        tokens, mass = open_ends.popitem()
        logits = next_logits([*prompt, *tokens])
        if allowed:
            excluded = [token for token in range(VOCAB) if token not in allowed(tokens)]
            logits = logits.index_fill(0, torch.tensor(excluded, dtype=torch.int64), -math.inf)
        for token, probability in enumerate(logits_to_probs(logits, params).tolist()):
            longer = (*tokens, token)
            ended = token == STOP or len(longer) == N_NEW
            (complete if ended else open_ends)[longer] = mass * probability
    return complete


@functools.cache
def laws() -> dict[Group, dict[tuple[int, ...], float]]:
    """Return the enumerated law of each prompt and each way to sample."""
    ways = PLAIN, FILTERED, TYPICAL, EDITED
    return {(i, s): enumerate_sequences(p, s) for i, p in enumerate(PROMPTS) for s in ways}


def irregular_groups(n: int, seed: int, ways: tuple[SamplingParams, ...]) -> list[Group]:
    """Prompts and ways to sample, interleaved in runs of 1 to 4, so that many neighbours have one law."""
    rng, groups = random.Random(seed), []
    while len(groups) < n:
        groups += [(rng.randrange(len(PROMPTS)), rng.choice(ways))] * rng.randint(1, 4)
    return groups[:n]


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Return the statistic of `counts` against `expected`, of equal totals and any shapes, and its degrees of freedom;
    infinite if what cannot happen did. They add up over samples."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    assert abs(float(counts.sum() - expected.sum())) < 1e-6 * float(counts.sum()), "the totals differ"
    if bool((counts[expected <= 0] > 0).any()):
        return float("inf"), 1
    small = expected < FEWEST
    pooled = torch.stack([expected[small].sum(), counts[small].sum()])
    wanted, seen = expected[~small], counts[~small]
    if float(pooled[0]) > 0:
        wanted, seen = torch.cat([wanted, pooled[:1]]), torch.cat([seen, pooled[1:]])
    return float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def upper_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for X chi-square with that many degrees of freedom."""
    if statistic == float("inf"):
        return 0.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def total_variation(counts: Tensor, expected: Tensor) -> float:
    """Half the L1 distance between the two laws."""
    return float((counts.double() / counts.sum() - expected / expected.sum()).abs().sum() / 2)


def joint_p_value(groups: list[Group], outputs: list[list[int]], laws) -> tuple[float, float, float]:
    """Return the p-value and the total variation of all groups together, and the variation that chance alone gives."""
    statistic, freedom, variation, by_chance = 0.0, 0, 0.0, 0.0
    for group, law in laws.items():
        seen = Counter(tuple(tokens) for other, tokens in zip(groups, outputs, strict=True) if other == group)
        if n := seen.total():
            assert seen.keys() <= law.keys(), "a sequence of another length, or beyond its stop token"
            counts = torch.tensor([seen[tokens] for tokens in law])
            probs = torch.tensor(list(law.values()), dtype=torch.float64)
            part, degrees = chi_square(counts, probs * n)
            statistic, freedom = statistic + part, freedom + degrees
            share = n / len(groups)
            variation += share * total_variation(counts, probs)
            # The mean of |count - expected| / n of a binomial count is about sqrt(2 p (1 - p) / (pi n)).
            by_chance += share * float((2 * probs * (1 - probs) / (math.pi * n)).sqrt().sum()) / 2
    return upper_tail(statistic, freedom), variation, by_chance
