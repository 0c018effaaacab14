"""Runs and times rounds of given choices while all rows decode; their tokens are dropped."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from engine.decoding import Decoder
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice
from engine.requests import Request, make_requests
from engine.runner import ModelRunner, not_finite
from engine.stats import AcceptanceRate, verified_positions
from engine.timing import PhaseTimer


class Rehearsal:
    """A `Pacing` that decodes prompts in rounds of given choices; when a row ends, all rows begin anew.

    gamma: the largest gamma of any choice. how: arguments of `generate`. `timed`: for each choice, the seconds of the
    parts "resume", which is catching up, "draft", "verify" and "other" of every round. `refreshes`: for each drafter,
    the seconds of every refresh of its selection. `seconds`: seconds of all rounds. Errors: UserError if logits are not
    finite.
    """

    def __init__(
        self, runner: ModelRunner, drafters: Sequence[Drafter], prompts: Sequence[Sequence[int]], gamma: int, **how: Any
    ) -> None:
        self.drafters, self.max_gamma, self.prompts = tuple(drafters), gamma, prompts[: runner.max_batch]
        assert self.prompts and how["max_new_tokens"] > 1, "no round would have a row that decodes"
        names = ("max_new_tokens", "sampling", "numbered_from")
        self._request_options = {name: how.pop(name) for name in names if name in how}
        self.runner, self._how = runner, how
        self._phases = PhaseTimer(runner.device, runner.ranks.timeout)
        self._requests: list[Request] = []
        self._next = PLAIN
        self.seconds = 0.0
        self._forget()

    def run(self, choices: Sequence[Choice], n_rounds: int, until: float = math.inf) -> None:
        """Run `n_rounds` of each choice, interleaved. Once all rounds have taken `until` seconds, only choices without
        a timed round get one."""
        is_over = False
        for choice in [*choices] * n_rounds:
            # The leader's clock decides, so that all ranks run the same rounds.
            is_over = is_over or (until < math.inf and self.runner.ranks.shared(lambda: self.seconds >= until))
            if is_over and choice in self.timed:
                continue
            started = time.perf_counter()
            self._next = choice
            self._round()
            self.seconds += time.perf_counter() - started

    def keep(self, n_rows: int) -> None:
        """Continue with the first `n_rows` prompts, and forget times and acceptance."""
        self.prompts = self.prompts[:n_rows]
        for request in self._requests[n_rows:]:
            self._decoder.cancel(request)
        del self._requests[n_rows:]
        self._forget()

    @property
    def acceptance(self) -> list[AcceptanceRate | None]:
        """The acceptance rate of each drafter; None if it had no rounds."""
        pairs = zip(self._accepted, self._verified, strict=True)
        return [AcceptanceRate(accepted / verified, verified) if verified else None for accepted, verified in pairs]

    def choose(self, n_busy: int, n_joining: int, context: float) -> Choice:
        return self._next

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        if choice.drafter is not None:
            self._accepted[choice.drafter] += sum(accepted)
            self._verified[choice.drafter] += sum(verified_positions(choice.gamma, accepted))

    def _forget(self) -> None:
        self.timed: dict[Choice, list[dict[str, float]]] = defaultdict(list)
        self.refreshes: list[list[float]] = [[] for _ in self.drafters]
        self._verified, self._accepted = [0] * len(self.drafters), [0] * len(self.drafters)

    def _round(self) -> None:
        if not self._requests or any(request.finish_reason for request in self._requests):
            self._decoder = Decoder(self.runner, self, phase=self._phases, **self._how)
            self._requests = make_requests(self.prompts, **self._request_options)
            for request in self._requests:
                self._decoder.submit(request)
        refreshes = self._phases.seconds["refresh"]
        n_before = len(refreshes)
        round_ = self._decoder.step()
        if broken := [f"row {request.index}: {request.error}" for request in self._requests if request.error]:
            raise not_finite("measuring costs", "; ".join(broken[:8]))
        assert round_ is not None, "there are rows, and they are not done"
        resume, draft, verify = (self._phases.seconds[name][-1] for name in ("resume", "draft", "verify"))
        other = round_.seconds - resume - draft - verify
        parts = {"resume": resume, "draft": draft, "verify": verify, "other": other}
        if self._next.drafter is not None and (refresh := sum(refreshes[n_before:])):
            self.refreshes[self._next.drafter].append(refresh)
            parts["draft"] -= refresh
        self.timed[self._next].append(parts)
