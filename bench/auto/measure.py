"""Measures what rounds cost: plain steps and rounds of every gamma, interleaved, over a filled cache."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median, median_low
from typing import Any

import numpy as np

from bench.auto.costs import Costs
from bench.progress import BarProgress, progress_bar
from bench.session import Session
from engine.controller import PLAIN, RoundChoice
from engine.drafters import Drafter
from engine.generation import Generation
from engine.runner import ModelRunner
from engine.stats import AcceptanceRate, verified_positions
from engine.timing import PhaseTimer

# Bounds of the timed rounds of each choice, as many as fit into MEASURING_SECONDS.
FEWEST_TIMED, MOST_TIMED = 2, 16
MEASURING_SECONDS = 12.0
# Rounds of each choice before the timed ones; a captured round first runs, is captured, and is replayed.
UNTIMED_ROUNDS, UNTIMED_ROUNDS_CAPTURED = 1, 3
# Measuring for a decode may take this share of the time of its plain steps.
MOST_SHARE = 0.15


@dataclass(frozen=True)
class RunCosts:
    """Costs of rounds after `context` tokens.

    by_rows: costs of each drafter, by the number of busy rows. seconds: duration of measuring them.
    """

    context: int
    by_rows: Mapping[int, Sequence[Costs]]
    seconds: float


def costs_of(session: Session, drafters: Sequence[Drafter], n_steps: float | None = None) -> RunCosts | None:
    """Return the costs of a session's rounds, measured from the prefilled state; None if nothing is to be chosen.

    Models are measured without the text drafters next to them: a guess in every row would leave the model out. Every
    rank has to call this, and gets the leader's costs. n_steps: plain steps of the decode to come; None: derived from
    the session's prompts.
    """
    plan = session.plan
    if not plan.chooses:
        return None
    started, n_rows = time.perf_counter(), min(plan.target.n_rows, len(session.prompts))
    n_steps = n_steps or plan.target.gen_len * math.ceil(len(session.prompts) / n_rows)
    with progress_bar(f"costs ({MEASURING_SECONDS:.0f} s or less)", None) as bar:
        how = {**session.how, "gamma": plan.gamma, "progress": BarProgress(bar)}
        # Captured rounds always run the model, and are captured for the drafter that decodes.
        captures = session.runner.graphs is not None
        models = [each if captures else without_texts(each) for each in drafters]
        profiler = CostProfiler(session.runner, models, session.prompts, **how)
        costs = measure_costs(profiler, plan.gammas, n_steps)
    costs = session.ranks.broadcast_object(lambda: costs)
    return RunCosts(plan.target.prefix_len, costs, time.perf_counter() - started)


class CostProfiler:
    """A `Controller` that decodes prompts in rounds of given choices; when a row ends, all rows begin anew.

    gamma: the largest gamma of any choice. how: arguments of `generate`. `timed`: for each choice, the seconds of the
    parts "resume", which is catching up, "draft", "verify" and "other" of every round. `refreshes`: for each drafter,
    the seconds of every refresh of its selection. `seconds`: of all rounds of these prompts. Errors: UserError if
    logits are not finite.
    """

    def __init__(
        self, runner: ModelRunner, drafters: Sequence[Drafter], prompts: Sequence[Sequence[int]], gamma: int, **how: Any
    ) -> None:
        self.drafters, self.max_gamma, self.prompts = tuple(drafters), gamma, prompts[: runner.max_batch]
        assert self.prompts and how["max_new_tokens"] > 1, "no round would have a row that decodes"
        self.runner, self._how = runner, how
        self._phases = PhaseTimer(runner.device, runner.ranks.timeout)
        self._generation: Generation | None = None
        self._next = PLAIN
        self._forget()

    def run(self, choices: Sequence[RoundChoice], n_rounds: int, until: float = math.inf) -> None:
        """Run `n_rounds` of each choice, interleaved. Once all rounds have taken `until` seconds, only choices without
        a timed round get one."""
        is_over = False
        for choice in [*choices] * n_rounds:
            # The leader's clock decides, so that all ranks run the same rounds.
            is_over = is_over or (
                until < math.inf and self.runner.ranks.broadcast_object(lambda: self.seconds >= until)
            )
            if is_over and choice in self.timed:
                continue
            started = time.perf_counter()
            self._next = choice
            self._round()
            self.seconds += time.perf_counter() - started

    def keep(self, n_rows: int) -> None:
        """Continue with the first `n_rows` prompts, and forget times and acceptance."""
        self.prompts = self.prompts[:n_rows]
        if self._generation:
            for request in self._generation.requests[n_rows:]:
                self._generation.decoder.cancel(request)
            del self._generation.requests[n_rows:]
        self._forget()

    @property
    def acceptance(self) -> list[AcceptanceRate | None]:
        """The acceptance rate of each drafter; None if it had no rounds."""
        pairs = zip(self._accepted, self._verified, strict=True)
        return [AcceptanceRate(accepted / verified, verified) if verified else None for accepted, verified in pairs]

    def choose(self, n_busy: int, n_joining: int, context: float) -> RoundChoice:
        return self._next

    def observe(self, choice: RoundChoice, accepted: Sequence[int]) -> None:
        if choice.drafter is not None:
            self._accepted[choice.drafter] += sum(accepted)
            self._verified[choice.drafter] += sum(verified_positions(choice.gamma, accepted))

    def _forget(self) -> None:
        self.seconds = 0.0
        self.timed: dict[RoundChoice, list[dict[str, float]]] = defaultdict(list)
        self.refreshes: list[list[float]] = [[] for _ in self.drafters]
        self._verified, self._accepted = [0] * len(self.drafters), [0] * len(self.drafters)

    def _round(self) -> None:
        if self._generation is None or any(request.finish_reason for request in self._generation.requests):
            self._generation = Generation(self.runner, self.prompts, controller=self, phase=self._phases, **self._how)
        refreshes = self._phases.seconds["refresh"]
        n_before = len(refreshes)
        round_ = self._generation.decoder.step()
        self._generation.output.require_finite("measuring costs")
        assert round_ is not None, "there are rows, and they are not done"
        resume, draft, verify = (self._phases.seconds[name][-1] for name in ("resume", "draft", "verify"))
        other = round_.seconds - resume - draft - verify
        parts = {"resume": resume, "draft": draft, "verify": verify, "other": other}
        if self._next.drafter is not None and (refresh := sum(refreshes[n_before:])):
            self.refreshes[self._next.drafter].append(refresh)
            parts["draft"] -= refresh
        self.timed[self._next].append(parts)


def measure_costs(profiler: CostProfiler, gammas: Sequence[int], n_steps: float = math.inf) -> dict[int, list[Costs]]:
    """Return the costs of each drafter by the number of busy rows, for a decode of `n_steps` plain steps, of which a
    server's is without end: medians of interleaved rounds.

    The first drafter of each kind, whose rounds cost most, is measured at the least, the middle and the largest gamma.
    The others only add their draft step, at the middle gamma. All rows decode, for MEASURING_SECONDS and a share of the
    decode at most, unless the fewest rounds take longer; in a long decode also the fewest rows that are computed. Code
    has to be compiled and captured before. Errors: UserError if logits are not finite.
    """
    runner, n_rows, choices = profiler.runner, len(profiler.prompts), [PLAIN]
    points = sorted({gammas[0], middle(gammas), gammas[-1]})
    for first, *others in kinds(profiler.drafters):
        choices += [RoundChoice(first, gamma) for gamma in within(points, profiler.drafters[first])]
        choices += [RoundChoice(index, middle(within(points, profiler.drafters[index]))) for index in others]
    n_untimed = UNTIMED_ROUNDS if runner.graphs is None else UNTIMED_ROUNDS_CAPTURED

    def fewest_rounds() -> list[Costs]:
        profiler.run(choices, n_untimed + FEWEST_TIMED, MEASURING_SECONDS)
        for index, seconds_of_refreshes in enumerate(profiler.refreshes):
            if not seconds_of_refreshes and (every := profiler.drafters[index].refresh_every):
                profiler.run([next(choice for choice in choices if choice.drafter == index)], every, MEASURING_SECONDS)
        return costs_of_rounds(profiler, n_untimed)

    share = MOST_SHARE * n_steps * fewest_rounds()[0].plain_ms / 1e3
    few_rows = min(n_rows, runner.n_computed(1))
    until = min(MEASURING_SECONDS, share) / (1 if few_rows == n_rows else 2)
    most_before_few = MEASURING_SECONDS if n_steps == math.inf else until
    is_long = runner.ranks.broadcast_object(lambda: profiler.seconds < most_before_few)
    profiler.run(choices, MOST_TIMED - FEWEST_TIMED, until)
    found = {n_rows: costs_of_rounds(profiler, n_untimed)}
    if few_rows < n_rows and is_long:
        profiler.keep(few_rows)
        found[few_rows] = fewest_rounds()
    return found


def middle(gammas: Sequence[int]) -> int:
    """Return the middle gamma, or the lower of two, whose rounds are shorter."""
    return gammas[(len(gammas) - 1) // 2]


def without_texts(drafter: Drafter) -> Drafter:
    """Return the drafter, without drafts from text in front of its own."""
    return drafter if drafter.skips_model is None else without_texts(drafter.parts[0])


def kinds(drafters: Sequence[Drafter]) -> list[list[int]]:
    """Return the indices of neighbouring drafters that differ only in the cache that they draft over: those of the same
    classes, parts included. Next to text drafters, the model's classes count."""

    def classes(drafter: Drafter) -> list[Any]:
        return [type(drafter), *map(classes, drafter.parts)]

    each = [classes(without_texts(drafter)) for drafter in drafters]
    return [[*same] for _, same in groupby(range(len(each)), key=each.__getitem__)]


def n_entries(drafter: Drafter) -> int | None:
    """Return the entries of a row in the cache that a drafter, or the main one of its parts, drafts over; None without
    a cache."""
    cache = getattr(drafter, "cache", None)
    return cache.capacity if cache else n_entries(drafter.parts[0]) if drafter.parts else None


def within(gammas: Sequence[int], drafter: Drafter) -> list[int]:
    """Return the gammas, each lowered to what the drafter can draft."""
    return sorted({min(gamma, drafter.gamma) for gamma in gammas})


def costs_of_rounds(profiler: CostProfiler, n_untimed: int) -> list[Costs]:
    """Return the costs of each drafter from all rounds but the first `n_untimed` of each choice, or from these if there
    was no time for others."""

    def ms(choice: RoundChoice, part: str) -> float:
        times = profiler.timed[choice][n_untimed:] or profiler.timed[choice]
        return 1e3 * median_low(parts[part] for parts in times)  # the faster of two was disturbed less

    return [cost for same in kinds(profiler.drafters) for cost in _costs_of_kind(profiler, same, ms)]


def _costs_of_kind(profiler: CostProfiler, same: Sequence[int], ms: Callable[[RoundChoice, str], float]) -> list[Costs]:
    """Return the costs of drafters of a kind. ms: the time of a part of a choice's rounds.

    Noise is removed from draft steps: they take as long with any policy of the same size, and no longer than with a
    larger budget.
    """
    drafted = {i: sorted(choice for choice in profiler.timed if choice.drafter == i) for i in same}
    first = drafted[same[0]]
    gammas, drafts = [choice.gamma for choice in first], [ms(choice, "draft") for choice in first]
    at_no_gamma = float(np.polyfit(gammas, drafts, 1)[1]) if len(gammas) > 1 else 0.0
    fixed_ms = min(max(0.0, at_no_gamma), *drafts)
    # A plain step has a little of every part but drafts.
    plain_ms = sum(ms(PLAIN, part) for part in ("draft", "verify", "other"))
    draft_ms, refresh_ms, resume_ms = [], [], []
    for drafter, choices in drafted.items():
        n_tokens = sum(choice.gamma for choice in choices)
        draft_ms.append(max(0.0, sum(ms(choice, "draft") - fixed_ms for choice in choices) / n_tokens))
        # Choosing entries reads all of them, as a plain step does, which stands in for a refresh that had no time.
        every, refreshes = profiler.drafters[drafter].refresh_every, profiler.refreshes[drafter] or [plain_ms / 1e3]
        refresh_ms.append(1e3 * median_low(refreshes) / every if every else 0.0)
        resume_ms.append(max(ms(choice, "resume") for choice in choices))  # others drafted before some rounds only
    sizes = [n_entries(profiler.drafters[i]) for i in same]
    by_size = {size: median(ms for ms, other in zip(draft_ms, sizes, strict=True) if other == size) for size in sizes}
    draft_ms = [ms if size is None else by_size[size] for ms, size in zip(draft_ms, sizes, strict=True)]
    other_ms = median(ms(choice, "other") for choice in first)
    verify_ms, rates = tuple(ms(choice, "verify") for choice in first), profiler.acceptance
    return [
        Costs(plain_ms, tuple(gammas), verify_ms, draft, other_ms, rates[i], refresh, resume, fixed_ms)
        for i, draft, refresh, resume in zip(same, accumulate(draft_ms, min), refresh_ms, resume_ms, strict=True)
    ]
