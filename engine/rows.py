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
    """The number of tokens whose entries a row holds, and the last two tokens of its text; the cache lacks the last."""

    length: int = 0
    previous: int = 0
    current: int = 0


class Rows:
    """The requests of a cache's rows. A row without one idles at its last length, where its writes harm nobody.

    followed: how much of each row's text each drafter, by its index, has followed; absent: nothing. computed: the rows
    that the last round computed, with their requests, in the order of its batch.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.requests: list[Request | None] = [None] * runner.max_batch
        self.followed: list[dict[int, int]] = [{} for _ in self.requests]
        self._state = [State() for _ in self.requests]
        self._left_at, self._clock = [0] * runner.max_batch, 0
        self.computed: list[tuple[int, Request | None]] = []
        self._batch: Batch | None = None

    def busy(self) -> list[tuple[int, Request]]:
        return [(row, request) for row, request in enumerate(self.requests) if request]

    def place_for(self, prompt: Sequence[int], reuses: bool) -> int:
        """Return a free row: if prefixes are reused, the one that holds most of the prompt, where that is at least
        half; else the one that was left longest ago, so that other texts can go on."""
        free = [row for row, request in enumerate(self.requests) if request is None]
        if not reuses:
            return free[0]

        def worth(row: int) -> tuple[int, int]:
            n_shared = self._runner.shared_prefix(row, prompt)
            return n_shared if 2 * n_shared >= len(prompt) else 0, -self._left_at[row]

        return max(free, key=worth)

    def leave(self, row: int, request: Request) -> None:
        """Free a row, which still holds the request's text."""
        self.requests[row] = None
        if request.tokens:
            self._state[row] = _state_of(request)
        self._clock += 1
        self._left_at[row] = self._clock
        if request.error is None:
            self._runner.keep_answer(row, request.tokens[:-1])

    def begin(self, row: int, n_held: int, followed: dict[int, int]) -> None:
        """Start another prompt in a row that holds its first `n_held` tokens; drafters have followed `followed`."""
        self.followed[row] = followed
        self._park(row, n_held)

    def advance(self, row: int, n_tokens: int) -> int:
        """Count `n_tokens` more of the prompt; return how many the row now holds."""
        self._park(row, self._state[row].length + n_tokens)
        return self._state[row].length

    def catch_up_plan(self, drafter: int, most: int | None) -> tuple[list[tuple[int, Request, int]], bool]:
        """Return row lengths to show a drafter before it drafts, and whether that brings it up to date.

        Lengths are those of the prompts; but if it has missed more than `most` tokens, `most` of these and of what a
        round has added.
        """
        busy = self.busy()
        missed = [] if most is None else [r.length - self.followed[row].get(drafter, 0) for row, r in busy]
        if most is None or sum(missed) <= most:
            return [(row, request, len(request.prompt)) for row, request in busy], True
        ends = [min(end, most + len(busy)) for end in accumulate(missed)]
        some = [end - begin for begin, end in pairwise([0, *ends])]
        return [(row, r, r.length - n + m) for (row, r), n, m in zip(busy, missed, some, strict=True)], False

    def _park(self, row: int, length: int) -> None:
        self._state[row], self.computed = State(length), []

    def gather(self, whole: Batch) -> Batch:
        """Return a batch of the busy rows, and of idle ones up to a number that rounds are made for."""
        n_busy = len(self.busy())
        # The shortest idle rows: a round reads as far as its longest row.
        idle = sorted((row for row, held in enumerate(self.requests) if held is None), key=self._state.__getitem__)
        filling = idle[: self._runner.n_computed(n_busy) - n_busy]
        computed = [(row, request) for row, request in enumerate(self.requests) if request or row in filling]
        batch = whole.first(len(computed))
        if computed != self.computed or batch is not self._batch:
            self.computed, self._batch = computed, batch
            for row in filling:
                if self._state[row].length == 0:  # it idles at position 0, and overwrites what it may hold
                    self._runner.cache.prefilled.pop(row, None)
            requests = [request or IDLE for _, request in computed]
            sampling, ids = [request.sampling for request in requests], [request.id for request in requests]
            batch.set_rows(sampling, ids, [row for row, _ in computed])
            batch.idle.copy_(torch.tensor([request is None for _, request in computed]))
            self.set_state(batch)
        return batch

    def set_state(self, batch: Batch) -> None:
        """Set the lengths and last tokens of the computed rows in their batch."""
        for row, request in self.busy():
            self._state[row] = _state_of(request)
        batch.set_state(*zip(*(self._state[row] for row, _ in self.computed), strict=True))


def _state_of(request: Request) -> State:
    return State(request.length, *request.text[-2:])
