"""Measures what rounds cost: plain steps and rounds of every gamma, interleaved, over a filled cache."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from statistics import median, median_low

import numpy as np

from bench.auto.costs import Costs
from bench.auto.rehearsal import Rehearsal
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice

# Bounds of the timed rounds of each choice, as many as fit into MEASURING_SECONDS.
FEWEST_TIMED, MOST_TIMED = 2, 16
MEASURING_SECONDS = 12.0
# Rounds of each choice before the timed ones; a captured round first runs, is captured, and is replayed.
UNTIMED_ROUNDS, UNTIMED_ROUNDS_CAPTURED = 1, 3
# Measuring for a decode may take this share of the time of its plain steps.
MOST_SHARE = 0.15
# Saved costs hold if the ratio that CHECKED_ROUNDS rounds of each choice measure is off by MOST_OFF at most.
CHECKED_ROUNDS, MOST_OFF = 2, 0.2


def measure_costs(
    rehearsal: Rehearsal, gammas: Sequence[int], seconds: float = MEASURING_SECONDS, deadline: float = math.inf
) -> list[Costs]:
    """Return the costs of each drafter: medians of interleaved rounds while all rows decode.

    The first drafter of each kind, whose rounds cost most, is measured at every gamma that it has. The others only add
    their draft step, at the middle gamma. seconds: limit of all rounds, unless the fewest take longer. deadline:
    seconds after which only choices without a timed round run. Code has to be compiled and captured before. Errors:
    UserError if logits are not finite.
    """
    n_untimed = UNTIMED_ROUNDS if rehearsal.runner.graphs is None else UNTIMED_ROUNDS_CAPTURED
    choices = [PLAIN]
    for first, *others in kinds(rehearsal.drafters):
        choices += [Choice(first, gamma) for gamma in within(gammas, rehearsal.drafters[first])]
        choices += [Choice(index, middle(within(gammas, rehearsal.drafters[index]))) for index in others]
    rehearsal.run(choices, n_untimed + FEWEST_TIMED, deadline)
    for index, seconds_of_refreshes in enumerate(rehearsal.refreshes):
        if not seconds_of_refreshes and (every := rehearsal.drafters[index].refresh_every):
            rehearsal.run([next(choice for choice in choices if choice.drafter == index)], every, deadline)
    rehearsal.run(choices, MOST_TIMED - FEWEST_TIMED, seconds)
    return costs_of_rounds(rehearsal, n_untimed)


def measure_for_decode(rehearsal: Rehearsal, gammas: Sequence[int], n_steps: int) -> dict[int, list[Costs]]:
    """Return the costs of rounds by the number of busy rows, for a decode of `n_steps` plain steps.

    A short decode is measured at the middle gamma and the largest; a longer decode at all gammas, and with the fewest
    rows that are computed. This takes MEASURING_SECONDS at most, unless the first rounds of those two gammas take
    longer.
    """
    runner, n_rows, deadline = rehearsal.runner, len(rehearsal.prompts), MEASURING_SECONDS
    few = sorted({middle(gammas), gammas[-1]})
    costs = measure_costs(rehearsal, few, 0.0, deadline)
    few_rows = runner.n_computed(1)
    for_few_rows = fewest_seconds(costs, rehearsal.drafters, few) if few_rows < n_rows else 0.0

    def seconds_for_more() -> float:
        """Return the limit of rounds with all rows, or 0 if there is no time for all gammas."""
        rest = deadline - for_few_rows
        has_rest = rehearsal.seconds + fewest_seconds(costs, rehearsal.drafters, gammas) <= rest
        is_long = has_time(costs, rehearsal.drafters, gammas, n_steps)
        return min(rest, MOST_SHARE * n_steps * costs[0].plain_ms / 1e3) if has_rest and is_long else 0.0

    if not (seconds := runner.ranks.shared(seconds_for_more)):
        return {n_rows: costs}
    found = {n_rows: measure_costs(rehearsal, gammas, seconds, deadline)}
    if few_rows < n_rows:
        rehearsal.keep(few_rows)
        found[few_rows] = measure_costs(rehearsal, few, 0.0, deadline)
    return found


def has_time(costs: Sequence[Costs], drafters: Sequence[Drafter], gammas: Sequence[int], n_steps: int) -> bool:
    """Return whether rounds of all gammas and drafters take a small share of a decode of `n_steps` plain steps."""
    share = MOST_SHARE * n_steps * costs[0].plain_ms / 1e3
    return fewest_seconds(costs, drafters, gammas) <= min(share, MEASURING_SECONDS)


def fewest_seconds(costs: Sequence[Costs], drafters: Sequence[Drafter], gammas: Sequence[int]) -> float:
    """Return the expected seconds of the fewest rounds of all drafters at these gammas."""
    ms = [costs[0].plain_ms, *(cost.round_ms(middle(gammas)) for cost in costs)]
    ms += [costs[first].round_ms(gamma) for first, *_ in kinds(drafters) for gamma in within(gammas, drafters[first])]
    return (UNTIMED_ROUNDS + FEWEST_TIMED) * sum(ms) / 1e3


def still_hold(known: Mapping[int, Sequence[Costs]], rehearsal: Rehearsal) -> dict[int, list[Costs]] | None:
    """Return saved costs, scaled to the present speed of this machine, with the acceptance of a check.

    The check runs plain steps and rounds of the first drafter of each kind; the fastest of each count. Returns None if
    a ratio of these, on which choices depend, has changed by more than MOST_OFF.
    """
    saved = known[max(known)]
    drafted = {first: Choice(first, middle(saved[first].at)) for first, *_ in kinds(rehearsal.drafters)}
    rehearsal.run([PLAIN, *drafted.values()], CHECKED_ROUNDS)

    def fastest(choice: Choice) -> float:
        return 1e3 * min(sum(parts.values()) - parts["resume"] for parts in rehearsal.timed[choice])

    def slower() -> float | None:
        """Return the present over the saved time of a plain step; None if saved costs do not hold."""
        times = fastest(PLAIN) / saved[0].plain_ms
        saved_ms = {i: replace(saved[i], refresh_ms=0.0).round_ms(choice.gamma) for i, choice in drafted.items()}
        holds = all(abs(fastest(drafted[i]) / (times * ms) - 1) <= MOST_OFF for i, ms in saved_ms.items())
        return times if holds else None

    if (times := rehearsal.runner.ranks.shared(slower)) is None:
        return None
    rates = rehearsal.acceptance
    return {
        n_rows: [replace(cost.slower(times), acceptance=rate) for cost, rate in zip(costs, rates, strict=True)]
        for n_rows, costs in known.items()
    }


def middle(gammas: Sequence[int]) -> int:
    """Return the middle gamma, or the lower of two, whose rounds are shorter."""
    return gammas[(len(gammas) - 1) // 2]


def kinds(drafters: Sequence[Drafter]) -> list[list[int]]:
    """Return the indices of neighbouring drafters that differ only in the cache that they draft over: those of the same
    class. Beside text drafters, the model's class counts."""
    each = [type(getattr(drafter, "model", drafter)) for drafter in drafters]
    return [[*same] for _, same in groupby(range(len(each)), key=each.__getitem__)]


def within(gammas: Sequence[int], drafter: Drafter) -> list[int]:
    """Return the gammas, each lowered to what the drafter can draft."""
    return sorted({min(gamma, drafter.gamma) for gamma in gammas})


def costs_of_rounds(rehearsal: Rehearsal, n_untimed: int) -> list[Costs]:
    """Return the costs of each drafter from all rounds but the first `n_untimed` of each choice, or from these if there
    was no time for others."""

    def ms(choice: Choice, part: str) -> float:
        times = rehearsal.timed[choice][n_untimed:] or rehearsal.timed[choice]
        return 1e3 * median_low(parts[part] for parts in times)  # the faster of two was disturbed less

    return [cost for same in kinds(rehearsal.drafters) for cost in _costs_of_kind(rehearsal, same, ms)]


def _costs_of_kind(rehearsal: Rehearsal, same: Sequence[int], ms: Callable[[Choice, str], float]) -> list[Costs]:
    """Return the costs of drafters of a kind. ms: the time of a part of a choice's rounds.

    Noise is removed from draft steps: they take as long with any policy of the same size, and no longer than with a
    larger budget.
    """
    drafted = {i: sorted(choice for choice in rehearsal.timed if choice.drafter == i) for i in same}
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
        every, refreshes = rehearsal.drafters[drafter].refresh_every, rehearsal.refreshes[drafter] or [plain_ms / 1e3]
        refresh_ms.append(1e3 * median_low(refreshes) / every if every else 0.0)
        resume_ms.append(max(ms(choice, "resume") for choice in choices))  # others drafted before some rounds only
    # KV entries of a row; None without a cache.
    sizes = [getattr(getattr(rehearsal.drafters[i], "cache", None), "capacity", None) for i in same]
    by_size = {size: median(ms for ms, other in zip(draft_ms, sizes, strict=True) if other == size) for size in sizes}
    draft_ms = [ms if size is None else by_size[size] for ms, size in zip(draft_ms, sizes, strict=True)]
    other_ms = median(ms(choice, "other") for choice in first)
    verify_ms, rates = tuple(ms(choice, "verify") for choice in first), rehearsal.acceptance
    return [
        Costs(plain_ms, tuple(gammas), verify_ms, draft, other_ms, rates[i], refresh, resume, fixed_ms)
        for i, draft, refresh, resume in zip(same, accumulate(draft_ms, min), refresh_ms, resume_ms, strict=True)
    ]
