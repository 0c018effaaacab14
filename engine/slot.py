"""Slot: one row of the batch, the request that it decodes, and how far each drafter has followed it."""

from dataclasses import dataclass, field

from engine.drafters import Drafter
from engine.requests import Request
from engine.round import Outcome


@dataclass
class Slot:
    """A row without a request idles: it stays parked at its last length, where its writes harm nobody.

    length: tokens committed to the target's cache. current: the token behind them.
    """

    row: int
    request: Request | None = None
    length: int = 0
    current: int = 0
    # The length up to which each drafter, by its index, has followed; absent: it does not know the prompt.
    _followed: dict[int, int] = field(default_factory=dict)

    def start(self, request: Request, token: int) -> None:
        """The row holds the request's prompt, and `token` follows it."""
        self.request, self.current, self._followed = request, token, {}

    def show_prompt(self, index: int, drafter: Drafter) -> bool:
        """Whether the drafter did not know the prompt, and now does."""
        if self.request is None or index in self._followed:
            return False
        drafter.follow(self.row, self.request.id, self.request.prompt, 0)
        self._followed[index] = len(self.request.prompt)
        return True

    def catch_up(self, index: int, drafter: Drafter) -> None:
        """Show a drafter what it missed behind the prompt."""
        if self.request and self._followed[index] != self.length:
            drafter.follow(self.row, self.request.id, self.request.committed, self._followed[index])
            self._followed[index] = self.length

    def commit(self, outcome: Outcome, drafter: int | None) -> int:
        """Cut an accepted block at its first stop token or limit, then set the length, then count; the row is free
        if that ends its request. Returns how many tokens were emitted. drafter: the index of the one that drafted."""
        block, request = outcome.block, self.request
        assert request is not None
        bad = next((i for i, ok in enumerate(outcome.finite[: len(block)]) if not ok), None)
        kept = request.extend(block if bad is None else block[:bad])
        request.counts.add_round(outcome.drafted, len(block) - 1, kept)
        if bad is not None and request.finish_reason is None:
            request.fail(self.length + bad)
        if request.finish_reason is None:
            self.length += kept
            self.current = block[-1]
            if drafter is not None:
                self._followed[drafter] = self.length
        else:
            self.request = None
        return kept
