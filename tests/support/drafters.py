"""Drafters of every kind over tiny runners, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine import ModelRunner, SelfSpeculation, StandaloneDraft
from engine.batch import Batch
from engine.drafters import Drafter, RowUpdate
from engine.drafters.combined import Combined
from engine.drafters.markov import Markov
from engine.drafters.medusa import Medusa
from engine.drafters.ngram import NGram
from engine.drafters.ngram_table import NGramTable
from engine.drafters.oracle import Oracle
from engine.drafters.speculated import Speculated
from engine.drafters.suffix import Suffix
from engine.sampling.noise import Stream, uniform
from kv_cache import KVCache
from kv_cache.base import KVShape
from tests.support.controllers import scheduled
from tests.support.heads import HEADS, WIDTH, random_medusa, with_head
from tests.support.policies import POLICIES, Size

GUESSES = ("oracle", "reject", "upto", "ragged", "random")


class Guesses(Oracle):
    """An oracle that errs in a controlled way: it knows each request's future and proposes a part of it, by `kind`.

    All of it ("oracle"), nothing but errors ("reject"), a right beginning of random length and errors after it
    ("upto"; "ragged" also drops a random number of the last drafts), or noise ("random"). Guesses for a request at a
    position do not depend on the batch.
    """

    def __init__(self, runner: ModelRunner, texts: Mapping[int, Sequence[int]], gamma: int, kind: str) -> None:
        super().__init__(runner, texts, gamma)
        self.kind, self.vocab_size = kind, runner.vocab_size
        self.requests = torch.zeros(runner.max_batch, dtype=torch.int64)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        super().follow(rows)
        for row, request, *_ in rows:
            self.requests[row] = request

    def guess(self, batch: Batch, gamma: int) -> tuple[Tensor, Tensor]:
        (tokens, n_tokens), at = super().guess(batch, gamma), (self.requests[batch.rows], batch.lengths)
        if self.kind == "random":
            return self._below(self.vocab_size, *at, gamma), n_tokens
        n_right = {"oracle": gamma, "reject": 0}.get(self.kind)
        right = self._below(gamma + 1, *at, 1) if n_right is None else n_right
        wrong = (tokens + 1) % self.vocab_size
        tokens = torch.where(torch.arange(gamma) < right, tokens, wrong)
        if self.kind == "ragged":
            n_tokens = torch.minimum(n_tokens, self._below(gamma + 1, at[0], at[1] + 1000, 1)[:, 0])
        return tokens, n_tokens

    def _below(self, bound: int, requests: Tensor, lengths: Tensor, n: int) -> Tensor:
        numbers = uniform(torch.tensor(0), requests, lengths, Stream.DRAFT, max(n, 1))[:, :n]
        return (numbers * bound).long()


def counted(vocab_size: int) -> NGramTable:
    """Return a table of what follows what in random text."""
    rng, table = random.Random(vocab_size), NGramTable(2)
    table.learn([rng.randrange(vocab_size) for _ in range(400)])
    return table


# What needs no model, made of a runner and gamma.
TEXT_DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "markov": lambda runner, gamma: Markov(runner, gamma, counted(runner.vocab_size)),
}


@dataclass(frozen=True)
class Drafters:
    """Makes a runner's drafters by name: a kind, the policy of its cache, and a schedule, such as "streaming" (which
    drafts with the target), "standalone, snapkv", "dflash, whole, full" or "full: confidence".

    model: what runs over a self-draft's cache in place of the target; inner_model: the same in the draft of a draft.
    outer: the draft that has a draft. new_runner: the runner of a standalone draft, by policy; else the target's model
    fills a cache of the policy. texts: of "saved" and GUESSES, by request id. dim: the width of the target's states.
    windows: of the layers of a DFlash head.
    """

    runner: ModelRunner
    gamma: int
    size: Size
    model: Any = None
    inner_model: Any = None
    outer: str = "streaming"
    new_runner: Callable[[str], Any] | None = None
    texts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    dim: int = WIDTH
    windows: tuple[int | None, ...] | None = None

    def __call__(self, name: str) -> Drafter | None:
        name, _, schedule = name.partition(": ")
        drafter = self._drafter(name)
        return scheduled(drafter, schedule, self.runner.max_batch) if drafter else None

    def _drafter(self, name: str) -> Drafter | None:
        runner, gamma, config = self.runner, self.gamma, self.runner.model.config
        kind, _, rest = name.partition(", ")
        head = next((head for head in sorted(HEADS, reverse=True) if name.startswith(f"{head}, ")), None)
        if name == "none":
            return None
        if name in TEXT_DRAFTERS:
            return TEXT_DRAFTERS[name](runner, gamma)
        if name == "saved":
            return Oracle(runner, self.texts, gamma)
        if name in GUESSES:
            return Guesses(runner, self.texts, gamma, name)
        if name == "medusa":
            return Medusa(runner, random_medusa(config, self.dim).to(runner.device), gamma)
        if head:
            windows = {"windows": self.windows} if kind == "dflash" and self.windows else {}
            size = replace(self.size, window=max(self.size.window, 2 * gamma * (kind == "P-EAGLE")))
            new_cache = partial(POLICIES[name.removeprefix(f"{head}, ")].make, size=size)
            return with_head(head, runner, new_cache, gamma, dim=self.dim, **windows)
        if kind == "combined":
            texts = [Suffix(runner, gamma), Suffix(runner, gamma, keep_answers=99)]
            return Combined(runner, self(rest), texts, least_match=1)
        if kind == "speculated":
            return Speculated(self(self.outer), self._inner(rest))
        if kind == "standalone":
            return StandaloneDraft((self.new_runner or self._runner_over)(rest), gamma)
        return SelfSpeculation(runner, self._cache(name, config), gamma, self.model)

    def _inner(self, kind: str) -> Drafter:
        """Return the draft of a draft, with gamma 2; its cache has fewer sinks than the outer draft's."""
        size = replace(self.size, n_kept=self.size.n_kept // 2, window=self.gamma + 3)
        inner = replace(self, gamma=2, size=size, model=self.inner_model)
        if kind != "model":
            return inner(kind)
        if self.new_runner:
            return StandaloneDraft(self.new_runner("streaming"), 2)
        model = self.inner_model or self.runner.model
        return StandaloneDraft(ModelRunner(model, inner._cache("streaming", model.config)), 2)

    def _runner_over(self, policy: str) -> ModelRunner:
        model = self.runner.model
        return ModelRunner(model, self._cache(policy, model.config), self.runner.prefill_chunk)

    def _cache(self, policy: str, shape: KVShape) -> KVCache:
        return POLICIES[policy].make(shape, self.size)


def watch(drafter: Drafter) -> list[tuple[int, int, int, list[int], Tensor | None]]:
    """Return a list that grows by the drafter's proposals: request, length, current token, drafts, distributions."""
    seen, requests, follow, propose = [], {}, drafter.follow, drafter.propose

    def following(rows):
        follow(rows)
        requests.update((row, request) for row, request, *_ in rows)

    def proposing(batch, verification, gamma):
        drafts = propose(batch, verification, gamma)
        for place, row in enumerate(batch.rows.tolist()):
            if gamma and row in requests and not batch.idle[place]:
                state = requests[row], int(batch.lengths[place]), int(batch.current[place])
                probs = None if drafts.probs is None else drafts.probs[place]
                seen.append((*state, drafts.tokens[place].tolist(), probs))
        return drafts

    drafter.follow, drafter.propose = following, proposing
    return seen


def three_drafters(runner: ModelRunner, gamma: int = 3) -> list[Drafter]:
    """Return a drafter that is written through, one that runs a model, and one that copies text."""
    size = Size(runner.max_batch, runner.cache.capacity, n_kept=1, window=7, dtype=runner.cache.keys.dtype)
    return [*map(Drafters(runner, gamma, size), ("streaming", "standalone, full", "ngram"))]
