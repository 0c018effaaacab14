"""Rows: the request that each row of a cache decodes, and what rows without one are left with."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from engine.batch import Batch
from engine.requests import Request
from engine.runner import ModelRunner

IDLE = Request(prompt=(), limit=0)


class State(NamedTuple):
    """Tokens whose KV a row holds, and the two last tokens of its text, of which the cache lacks the last."""

    length: int = 0
    previous: int = 0
    current: int = 0


class Rows:
    """A row without a request idles: it stays parked at its last length, where its writes harm nobody. followed: of
    each row's text, how much each drafter, by its index, has followed; absent: nothing."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.requests: list[Request | None] = [None] * runner.max_batch
        self.followed: list[dict[int, int]] = [{} for _ in self.requests]
        self._state = [State() for _ in self.requests]
        self._left_at, self._clock = [0] * runner.max_batch, 0
        # The rows that the last round computed, with what each held, in the batch that it read.
        self.computed: list[tuple[int, Request | None]] = []
        self._batch: Batch | None = None

    def busy(self) -> list[tuple[int, Request]]:
        return [(row, request) for row, request in enumerate(self.requests) if request]

    def place_for(self, prompt: Sequence[int], reuses: bool) -> int:
        """A free row: if it may reuse what that holds, the one that holds most of the prompt, where that is at least
        half; else the one that was left longest ago, so that others can go on."""
        free = [row for row, request in enumerate(self.requests) if request is None]
        if not reuses:
            return free[0]

        def worth(row: int) -> tuple[int, int]:
            n_shared = self._runner.shared_prefix(row, prompt)
            return n_shared if 2 * n_shared >= len(prompt) else 0, -self._left_at[row]

        return max(free, key=worth)

    def leave(self, row: int, request: Request) -> None:
        """The row is free; it still holds the request's text."""
        self.requests[row] = None
        if request.tokens:
            self._state[row] = _state_of(request)
        self._clock += 1
        self._left_at[row] = self._clock
        if request.error is None:
            self._runner.keep_answer(row, request.tokens[:-1])

    def begin(self, row: int, n_held: int, followed: dict[int, int]) -> None:
        """The row takes another prompt, of which it holds so many tokens, and drafters have followed so many."""
        self.followed[row] = followed
        self._park(row, n_held)

    def advance(self, row: int, n_tokens: int) -> int:
        """So many more tokens of the prompt are held; returns how many in all."""
        self._park(row, self._state[row].length + n_tokens)
        return self._state[row].length

    def catch_up_plan(self, drafter: int, most: int | None) -> tuple[list[tuple[int, Request, int]], bool]:
        """How far a drafter is to be shown each busy row before it drafts, and whether it can draft then: as far as the
        prompts; but where it has missed more than `most` tokens, no more of those and of what a round has added."""
        busy = self.busy()
        missed = [] if most is None else [one.length - self.followed[row].get(drafter, 0) for row, one in busy]
        if most is None or sum(missed) <= most:
            return [(row, one, len(one.prompt)) for row, one in busy], True
        ends = [min(end, most + len(busy)) for end in accumulate(missed)]
        shown = [end - begin for begin, end in pairwise([0, *ends])]
        return [(row, one, one.length - n + m) for (row, one), n, m in zip(busy, missed, shown, strict=True)], False

    def _park(self, row: int, length: int) -> None:
        self._state[row], self.computed = State(length), []

    def gather(self, whole: Batch) -> Batch:
        """The busy rows of the whole batch, and as many idle ones as make up a number that rounds are made for."""
        n_busy = len(self.busy())
        # What a round reads goes as far as its longest row.
        idle = sorted((row for row, one in enumerate(self.requests) if one is None), key=self._state.__getitem__)
        filling = idle[: self._runner.n_computed(n_busy) - n_busy]
        computed = [(row, request) for row, request in enumerate(self.requests) if request or row in filling]
        batch = whole.first(len(computed))
        if computed != self.computed or batch is not self._batch:
            self.computed, self._batch = computed, batch
            for row in filling:
                if self._state[row].length == 0:  # it idles at position 0, and writes over what it may hold
                    self._runner.cache.prefilled.pop(row, None)
            requests = [request or IDLE for _, request in computed]
            sampling, ids = [request.sampling for request in requests], [request.id for request in requests]
            batch.set_rows(sampling, ids, [row for row, _ in computed])
            batch.idle.copy_(torch.tensor([request is None for _, request in computed]))
            self.set_state(batch)
        return batch

    def set_state(self, batch: Batch) -> None:
        """Let the batch of the computed rows know what they hold now."""
        for row, request in self.busy():
            self._state[row] = _state_of(request)
        batch.set_state(*zip(*(self._state[row] for row, _ in self.computed), strict=True))


def _state_of(request: Request) -> State:
    return State(request.length, *request.text[-2:])
