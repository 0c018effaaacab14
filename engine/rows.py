"""Rows: the request that each row of a cache decodes, and the batch of rows that a round computes."""

from collections.abc import Sequence

import torch

from engine.batch import Batch
from engine.requests import Request
from engine.runner import ModelRunner

IDLE = Request(prompt=(), limit=0)


class Rows:
    """The requests of a cache's rows. A row without a request idles at its last length, where its writes harm nobody.

    computed: the rows that the last round computed, with their requests, in the order of its batch.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.requests: list[Request | None] = [None] * runner.max_batch
        # Length and last two tokens of each idle row: a draft model rewrites the entry of the last but one, which stays
        # as it is for a later prompt that begins with this text.
        self._idle = [(0, 0, 0)] * runner.max_batch
        self._by_leaving = [*range(runner.max_batch)]  # the row that was left longest ago comes first
        self.computed: list[tuple[int, Request | None]] = []
        self._batch: Batch | None = None

    def busy(self) -> list[tuple[int, Request]]:
        return [(row, request) for row, request in enumerate(self.requests) if request]

    def place_for(self, prompt: Sequence[int], reuses: bool) -> int:
        """Return a free row. If prefixes are reused, this is the row that holds most of the prompt, if that is at least
        half of it; else the row that was left longest ago, since recent texts are the likeliest to go on."""
        free = [row for row in self._by_leaving if self.requests[row] is None]
        if not reuses:
            return min(free)

        def n_worth(row: int) -> int:
            n_shared = self._runner.shared_prefix(row, prompt)
            return n_shared if 2 * n_shared >= len(prompt) else 0

        return max(free, key=n_worth)

    def leave(self, row: int, request: Request) -> None:
        """Free a row, which still holds the request's text."""
        self.requests[row] = None
        if request.tokens:
            self._idle[row] = _state_of(request)
        self._by_leaving = [*filter(row.__ne__, self._by_leaving), row]
        if request.error is None:
            self._runner.keep_answer(row, request.tokens[:-1])

    def forget_free(self) -> None:
        """Free the rows of requests that have ended, and forget what free rows hold."""
        for row, request in enumerate(self.requests):
            if request is None or request.finish_reason is not None:
                self.requests[row] = None
                self._runner.cache.reset_row(row)
                self.begin(row, 0)

    def begin(self, row: int, n_held: int) -> None:
        """Start another prompt in a row that holds its first `n_held` tokens."""
        self._idle[row], self.computed = (n_held, 0, 0), []

    def gather(self, whole: Batch) -> Batch:
        """Return a batch of the busy rows, and of idle rows up to a number that rounds are made for."""
        n_busy = len(self.busy())
        # The shortest idle rows: a round reads as far as its longest row.
        idle = sorted((row for row, r in enumerate(self.requests) if r is None), key=self._idle.__getitem__)
        filling = idle[: self._runner.n_computed(n_busy, whole.distribution.filters) - n_busy]
        computed = [(row, request) for row, request in enumerate(self.requests) if request or row in filling]
        batch = whole.first(len(computed))
        if computed != self.computed or batch is not self._batch:
            self.computed, self._batch = computed, batch
            for row in filling:
                if self._idle[row][0] == 0:  # it idles at position 0, and overwrites the entry there
                    self._runner.cache.prefilled.pop(row, None)
            requests = [request or IDLE for _, request in computed]
            sampling, ids = [request.sampling for request in requests], [request.id for request in requests]
            batch.set_rows(sampling, ids, [row for row, _ in computed])
            batch.idle.copy_(torch.tensor([request is None for _, request in computed]))
            self.set_state(batch)
        return batch

    def set_state(self, batch: Batch) -> None:
        """Set the lengths and last two tokens of the computed rows in their batch."""
        states = [_state_of(request) if request else self._idle[row] for row, request in self.computed]
        lengths, previous, current = zip(*states, strict=True)
        batch.set_state(lengths, previous, current, [request or IDLE for _, request in self.computed])


def _state_of(request: Request) -> tuple[int, int, int]:
    """Return a request's length, and the last two tokens of its text."""
    previous, current = request.text[-2:]
    return request.length, previous, current
