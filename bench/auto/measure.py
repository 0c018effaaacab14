"""Measures what rounds cost: plain steps and rounds of every gamma, interleaved, over a filled cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median, median_low
from typing import NamedTuple

from bench.auto.costs import Costs
from bench.auto.rehearsal import Rehearsal
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice

# Rounds of each kind that are timed: as many as fit, but neither fewer nor more than these ...
FEWEST_TIMED, MOST_TIMED = 2, 16
# ... into what all may take, those included that are not timed, of each kind the first ones ...
MEASURING_SECONDS = 12.0
# ... which are so many: one runs, or one runs, one captures, one replays.
UNTIMED_ROUNDS, UNTIMED_ROUNDS_CAPTURED = 1, 3
# Measuring for one decode may take this share of what its plain steps would.
MOST_SHARE = 0.15
# Costs that were measured before are right if a check of so many rounds is off by no more than this.
CHECKED_ROUNDS, MOST_OFF = 2, 0.2


def measure_costs(rehearsal: Rehearsal, gammas: Sequence[int], seconds: float = MEASURING_SECONDS) -> list[Costs]:
    """The costs of each drafter's rounds in ms, medians of interleaved rounds, while all rows decode. Of drafters but
    the first, which come in the order of what they cost, the dearest first, only the draft step is measured, at the
    middle one of the gammas, which ascend. `seconds`: what everything may take, unless the fewest rounds take longer;
    what first compiles or captures should have run before. Errors: as of `Rehearsal`."""
    runner = rehearsal.runner
    n_untimed = UNTIMED_ROUNDS if runner.graphs is None else UNTIMED_ROUNDS_CAPTURED
    choices, fewest = _choices(rehearsal.drafters, gammas), n_untimed + FEWEST_TIMED
    _run_first(rehearsal, choices, fewest)
    # The leader's clock decides, so that all ranks run the same rounds.
    n_more = runner.ranks.shared(lambda: int((seconds / rehearsal.seconds - 1) * fewest))
    rehearsal.run(choices, min(max(0, n_more), MOST_TIMED - FEWEST_TIMED))
    return costs_of_rounds(rehearsal, gammas, n_untimed)


class Scope(NamedTuple):
    """What is measured behind the first rounds: few rows? which other gammas, how many more rounds of each."""

    few_rows: bool
    gammas: tuple[int, ...]
    n_more: int


def scope(
    costs: Sequence[Costs], gammas: Sequence[int], n_steps: int, has_few_rows: bool, spent_ms: float | None = None
) -> Scope:
    """What there is time for, by the costs of all rows (of few they are no higher), in a decode of so many plain steps.
    spent_ms: what the first rounds took, if not what these costs say."""
    ms, fewest = [costs[0].plain_ms, *(one.round_ms(_middle(gammas)) for one in costs)], UNTIMED_ROUNDS + FEWEST_TIMED
    first_ms = fewest * sum(ms)
    left = min(1e3 * MEASURING_SECONDS, MOST_SHARE * n_steps * costs[0].plain_ms)
    left -= first_ms if spent_ms is None else spent_ms
    few_rows = has_few_rows and first_ms <= left
    left -= first_ms * few_rows
    chosen = []
    # The largest first: no larger one is chosen than was measured.
    for gamma in (gammas[-1], *gammas[:-1]):
        round_ms = costs[0].round_ms(gamma)
        if gamma != _middle(gammas) and fewest * round_ms <= left:
            chosen.append(gamma)
            ms.append(round_ms)
            left -= fewest * round_ms
    return Scope(few_rows, tuple(chosen), min(max(0, int(left / sum(ms))), MOST_TIMED - FEWEST_TIMED))


def measure_for_decode(rehearsal: Rehearsal, gammas: Sequence[int], n_steps: int) -> dict[int, list[Costs]]:
    """The same by how many rows decode, all and the fewest that are computed, for a decode of so many plain steps: of
    each drafter at the middle gamma, then what there is time for (`scope`), in which what was rehearsed before counts.
    What first compiles or captures has to have run, with any number of rows."""
    runner, middle = rehearsal.runner, _middle(gammas)
    n_rows, fewest_rows, first = len(rehearsal.prompts), runner.n_computed(1), _choices(rehearsal.drafters, [middle])
    fewest = UNTIMED_ROUNDS + FEWEST_TIMED
    _run_first(rehearsal, first, fewest)
    costs, spent_ms = costs_of_rounds(rehearsal, [middle], UNTIMED_ROUNDS), 1e3 * rehearsal.seconds
    more = runner.ranks.shared(lambda: scope(costs, gammas, n_steps, fewest_rows < n_rows, spent_ms))
    others = [Choice(0, gamma) for gamma in more.gammas]
    rehearsal.run(others, fewest)
    rehearsal.run([*first, *others], more.n_more)
    found = {n_rows: costs_of_rounds(rehearsal, sorted([middle, *more.gammas]), UNTIMED_ROUNDS)}
    if more.few_rows:
        rehearsal.keep(fewest_rows)
        _run_first(rehearsal, first, fewest)
        found[fewest_rows] = costs_of_rounds(rehearsal, [middle], UNTIMED_ROUNDS)
    return found


def still_hold(known: Mapping[int, Sequence[Costs]], rehearsal: Rehearsal) -> dict[int, list[Costs]] | None:
    """The known costs as this machine has them now, with the acceptance seen in a check of plain steps and rounds of
    the first drafter, of which the fastest count. None if such a round is now more or fewer plain steps, by MOST_OFF:
    what pays depends on that alone."""
    of_all_rows = known[max(known)]
    gamma = _middle(of_all_rows[0].at)
    rehearsal.run([PLAIN, Choice(0, gamma)], CHECKED_ROUNDS)

    def slower() -> float | None:
        """How many times as long everything takes."""
        fastest = (min(sum(parts.values()) for parts in rehearsal.timed[one]) for one in (PLAIN, Choice(0, gamma)))
        plain, round_ = (1e3 * seconds for seconds in fastest)
        then = replace(of_all_rows[0], refresh_ms=0.0).round_ms(gamma) / of_all_rows[0].plain_ms
        return plain / of_all_rows[0].plain_ms if abs(round_ / plain / then - 1) <= MOST_OFF else None

    if (times := rehearsal.runner.ranks.shared(slower)) is None:
        return None
    return {
        n_rows: [
            replace(one.slower(times), acceptance=rate) for one, rate in zip(each, rehearsal.acceptance, strict=True)
        ]
        for n_rows, each in known.items()
    }


def _run_first(rehearsal: Rehearsal, choices: Sequence[Choice], n_rounds: int) -> None:
    """So many rounds of each, and more where those chose no entries anew of a drafter that does now and then."""
    rehearsal.run(choices, n_rounds)
    for index, seen in enumerate(rehearsal.refreshes):
        if not seen and (every := rehearsal.drafters[index].refresh_every):
            rehearsal.run([next(choice for choice in choices if choice.drafter == index)], every)


def _middle(gammas: Sequence[int]) -> int:
    """The lower one of two: its rounds are the shorter ones."""
    return gammas[(len(gammas) - 1) // 2]


def _choices(drafters: Sequence[Drafter], gammas: Sequence[int]) -> list[Choice]:
    """Plain rounds, those of the first drafter at every gamma, those of the others at the middle one."""
    others = [Choice(index, _middle(gammas)) for index in range(1, len(drafters))]
    return [PLAIN, *(Choice(0, gamma) for gamma in gammas), *others]


def costs_of_rounds(rehearsal: Rehearsal, gammas: Sequence[int], n_untimed: int) -> list[Costs]:
    """One a drafter, of all rounds of each choice but the first `n_untimed`. A draft step takes no longer than one of
    the drafter before it, and as long with any policy of one size."""

    def ms(choice: Choice, part: str) -> float:
        times = rehearsal.timed[choice][n_untimed:]
        return 1e3 * median_low(parts[part] for parts in times)  # of two, the one that nothing held up

    draft_ms, refresh_ms = [], []
    for drafter, seen in enumerate(rehearsal.refreshes):
        drafted = [choice for choice in rehearsal.timed if choice.drafter == drafter]
        draft_ms.append(sum(ms(choice, "draft") for choice in drafted) / sum(choice.gamma for choice in drafted))
        every = rehearsal.drafters[drafter].refresh_every
        refresh_ms.append(1e3 * median_low(seen) / every if every else 0.0)
    # KV entries a row that each reads; None if it has no cache of its own.
    sizes = [getattr(getattr(one, "cache", None), "capacity", None) for one in rehearsal.drafters]
    of_size = {size: median(ms for ms, own in zip(draft_ms, sizes, strict=True) if own == size) for size in sizes}
    draft_ms = [own if size is None else of_size[size] for own, size in zip(draft_ms, sizes, strict=True)]
    # A plain step has a little of everything but drafts.
    plain_ms = sum(ms(PLAIN, part) for part in ("draft", "verify", "other"))
    other_ms = median(ms(Choice(0, gamma), "other") for gamma in gammas)
    verify_ms = tuple(ms(Choice(0, gamma), "verify") for gamma in gammas)
    return [
        Costs(plain_ms, tuple(gammas), verify_ms, draft, other_ms, seen, refresh)
        for draft, seen, refresh in zip(accumulate(draft_ms, min), rehearsal.acceptance, refresh_ms, strict=True)
    ]
