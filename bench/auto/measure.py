"""Measures what rounds cost: plain steps and rounds of every gamma, interleaved, over a filled cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median, median_low

from bench.auto.costs import Costs
from bench.auto.rehearsal import Rehearsal
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


def measure_costs(rehearsal: Rehearsal, gammas: Sequence[int], seconds: float = MEASURING_SECONDS) -> list[Costs]:
    """Return the costs of each drafter: medians of interleaved rounds while all rows decode.

    The first drafter, whose rounds cost most, is measured at every gamma. The others only add their draft step, at the
    middle gamma. seconds: limit of all rounds, unless the fewest take longer. Code has to be compiled and captured
    before. Errors: UserError if logits are not finite.
    """
    runner = rehearsal.runner
    n_untimed = UNTIMED_ROUNDS if runner.graphs is None else UNTIMED_ROUNDS_CAPTURED
    others = [Choice(index, middle(gammas)) for index in range(1, len(rehearsal.drafters))]
    choices, fewest = [PLAIN, *(Choice(0, gamma) for gamma in gammas), *others], n_untimed + FEWEST_TIMED
    rehearsal.run(choices, fewest)
    for index, seconds_of_refreshes in enumerate(rehearsal.refreshes):
        if not seconds_of_refreshes and (every := rehearsal.drafters[index].refresh_every):
            rehearsal.run([next(choice for choice in choices if choice.drafter == index)], every)
    # The leader's clock decides, so that all ranks run the same rounds.
    n_more = runner.ranks.shared(lambda: int((seconds / rehearsal.seconds - 1) * fewest))
    rehearsal.run(choices, min(max(0, n_more), MOST_TIMED - FEWEST_TIMED))
    return costs_of_rounds(rehearsal, gammas, n_untimed)


def measure_for_decode(rehearsal: Rehearsal, gammas: Sequence[int], n_steps: int) -> dict[int, list[Costs]]:
    """Return the costs of rounds by the number of busy rows, for a decode of `n_steps` plain steps.

    A short decode is measured at the middle gamma; a longer one at all gammas, and with the fewest rows that are
    computed.
    """
    runner, n_rows = rehearsal.runner, len(rehearsal.prompts)
    costs = measure_costs(rehearsal, [middle(gammas)], 0.0)
    if not runner.ranks.shared(lambda: has_time(costs, gammas, n_steps)):
        return {n_rows: costs}
    seconds = min(MEASURING_SECONDS, MOST_SHARE * n_steps * costs[0].plain_ms / 1e3)
    found = {n_rows: measure_costs(rehearsal, gammas, seconds)}
    if (few_rows := runner.n_computed(1)) < n_rows:
        rehearsal.keep(few_rows)
        found[few_rows] = measure_costs(rehearsal, [middle(gammas)], 0.0)
    return found


def has_time(costs: Sequence[Costs], gammas: Sequence[int], n_steps: int) -> bool:
    """Return whether rounds of all gammas and drafters take a small share of a decode of `n_steps` plain steps."""
    plain_ms = costs[0].plain_ms
    ms = [plain_ms, *(costs[0].round_ms(gamma) for gamma in gammas), *(cost.round_ms(middle(gammas)) for cost in costs)]
    return (UNTIMED_ROUNDS + FEWEST_TIMED) * sum(ms) <= MOST_SHARE * n_steps * plain_ms


def still_hold(known: Mapping[int, Sequence[Costs]], rehearsal: Rehearsal) -> dict[int, list[Costs]] | None:
    """Return saved costs, scaled to the present speed of this machine, with the acceptance of a check.

    The check runs plain steps and rounds of the first drafter; the fastest of each count. Returns None if the ratio of
    the two, on which choices depend, has changed by more than MOST_OFF.
    """
    saved = known[max(known)][0]
    drafted = Choice(0, middle(saved.at))
    rehearsal.run([PLAIN, drafted], CHECKED_ROUNDS)

    def slower() -> float | None:
        """Return the present over the saved time of a plain step; None if saved costs do not hold."""
        timed = (rehearsal.timed[choice] for choice in (PLAIN, drafted))
        plain, round_ = (1e3 * min(sum(parts.values()) for parts in rounds) for rounds in timed)
        saved_ratio = replace(saved, refresh_ms=0.0).round_ms(drafted.gamma) / saved.plain_ms
        return plain / saved.plain_ms if abs(round_ / plain / saved_ratio - 1) <= MOST_OFF else None

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


def costs_of_rounds(rehearsal: Rehearsal, gammas: Sequence[int], n_untimed: int) -> list[Costs]:
    """Return the costs of each drafter from all rounds but the first `n_untimed` of each choice.

    Noise is removed from draft steps: they take as long with any policy of the same size, and no longer than with a
    larger budget.
    """

    def ms(choice: Choice, part: str) -> float:
        times = rehearsal.timed[choice][n_untimed:]
        return 1e3 * median_low(parts[part] for parts in times)  # the faster of two was disturbed less

    draft_ms, refresh_ms = [], []
    for drafter, refreshes in enumerate(rehearsal.refreshes):
        drafted = [choice for choice in rehearsal.timed if choice.drafter == drafter]
        draft_ms.append(sum(ms(choice, "draft") for choice in drafted) / sum(choice.gamma for choice in drafted))
        every = rehearsal.drafters[drafter].refresh_every
        refresh_ms.append(1e3 * median_low(refreshes) / every if every else 0.0)
    # KV entries of a row; None without a cache.
    sizes = [getattr(getattr(drafter, "cache", None), "capacity", None) for drafter in rehearsal.drafters]
    by_size = {size: median(ms for ms, other in zip(draft_ms, sizes, strict=True) if other == size) for size in sizes}
    draft_ms = [ms if size is None else by_size[size] for ms, size in zip(draft_ms, sizes, strict=True)]
    # A plain step has a little of every part but drafts.
    plain_ms = sum(ms(PLAIN, part) for part in ("draft", "verify", "other"))
    other_ms = median(ms(Choice(0, gamma), "other") for gamma in gammas)
    verify_ms = tuple(ms(Choice(0, gamma), "verify") for gamma in gammas)
    return [
        Costs(plain_ms, tuple(gammas), verify_ms, draft, other_ms, acceptance, refresh)
        for draft, acceptance, refresh in zip(accumulate(draft_ms, min), rehearsal.acceptance, refresh_ms, strict=True)
    ]
