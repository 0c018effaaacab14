"""Measures what rounds cost: plain steps and rounds of every gamma, interleaved, over a filled cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median, median_low
from typing import Any, NamedTuple

from engine.cost_model.costs import Costs
from engine.cost_model.rehearsal import Rehearsal
from engine.counts import AcceptanceRate
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice
from engine.runner import ModelRunner

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


def measure_costs(
    runner: ModelRunner,
    drafters: Sequence[Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    gammas: Sequence[int],
    seconds: float = MEASURING_SECONDS,
    **how: Any,
) -> list[Costs]:
    """The costs of each drafter's rounds in ms, medians of interleaved rounds, while as many rows decode as there are
    prompts, or all.

    Only the first drafter's rounds are measured at every one of the gammas, which ascend; of the others, which come in
    the order of what they cost, the dearest first, only the draft step is, at the middle gamma. `seconds`: what all
    rounds may take, and a draft model's runs of the prompts, unless the fewest take longer; what first compiles or
    captures should have run before. `how`: sampling, verification and length; errors: as of `Rehearsal`.
    """
    rehearsal = Rehearsal(runner, drafters, prompts, gamma=gammas[-1], **how)
    choices, fewest = _choices(drafters, gammas), _n_untimed(runner) + FEWEST_TIMED
    rehearsal.run(choices, fewest)
    _choose_once(rehearsal, choices)
    # The leader's clock decides, so that all ranks run the same rounds.
    n_more = runner.ranks.shared(lambda: int((seconds / rehearsal.seconds - 1) * fewest))
    rehearsal.run(choices, min(max(0, n_more), MOST_TIMED - FEWEST_TIMED))
    return _costs(rehearsal, gammas, _n_untimed(runner))


class Scope(NamedTuple):
    """What is measured behind the first rounds: whether the few rows are, which other gammas, how many more rounds of
    each kind."""

    few_rows: bool
    gammas: tuple[int, ...]
    n_more: int


def scope(
    costs: Sequence[Costs], gammas: Sequence[int], n_steps: int, has_few_rows: bool, spent_ms: float | None = None
) -> Scope:
    """What there is time for, by the costs of all rows (of few they are no higher), in a decode of so many plain steps.

    Measuring may take MOST_SHARE of those, and MEASURING_SECONDS. spent_ms: what the first rounds took, if not what
    these costs say: plain ones, and of each drafter those of the middle gamma.
    """
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
    """The same by how many rows decode, all and the fewest that are computed, for a decode of so many plain steps.

    First come plain rounds and those of each drafter at the middle gamma, the fewest of each. What else there is time
    for (`scope`) comes in this order: the same while the fewest rows decode, other gammas, more rounds. What was
    rehearsed before, as by `still_hold`, counts. What first compiles or captures has to have run, with any number of
    rows.
    """
    runner, middle = rehearsal.runner, _middle(gammas)
    n_rows, fewest_rows, first = len(rehearsal.prompts), runner.n_computed(1), _choices(rehearsal.drafters, [middle])
    fewest = UNTIMED_ROUNDS + FEWEST_TIMED
    rehearsal.run(first, fewest)
    _choose_once(rehearsal, first)

    def affordable() -> Scope:
        costs = _costs(rehearsal, [middle], UNTIMED_ROUNDS)
        return scope(costs, gammas, n_steps, fewest_rows < n_rows, 1e3 * rehearsal.seconds)

    more = runner.ranks.shared(affordable)
    others = [Choice(0, gamma) for gamma in more.gammas]
    rehearsal.run(others, fewest)
    rehearsal.run([*first, *others], more.n_more)
    found = {n_rows: _costs(rehearsal, sorted([middle, *more.gammas]), UNTIMED_ROUNDS)}
    if more.few_rows:
        rehearsal.keep(fewest_rows)
        rehearsal.run(first, fewest)
        _choose_once(rehearsal, first)
        found[fewest_rows] = _costs(rehearsal, [middle], UNTIMED_ROUNDS)
    return found


def still_hold(known: Mapping[int, Sequence[Costs]], rehearsal: Rehearsal) -> dict[int, list[Costs]] | None:
    """The known costs as this machine has them now, with the acceptance that a check saw: two plain steps, and two
    rounds of the first drafter, of which the faster ones count. None if such a round is now more or fewer plain steps,
    by MOST_OFF: what pays depends on that alone, so a machine that does everything more slowly chooses as before.
    """
    of_all_rows = known[max(known)]
    gamma = _middle(of_all_rows[0].at)
    rehearsal.run([PLAIN, Choice(0, gamma)], CHECKED_ROUNDS)

    def slower() -> float | None:
        """How many times as long everything takes."""
        plain, round_ = (
            1e3 * min(sum(parts.values()) - parts.get("refresh", 0.0) for parts in rehearsal.timed[one])
            for one in (PLAIN, Choice(0, gamma))
        )
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


def _choose_once(rehearsal: Rehearsal, choices: Sequence[Choice]) -> None:
    """More rounds, where those so far chose no entries anew of a drafter that does now and then."""
    for index, seen in enumerate(rehearsal.refreshes()):
        if not seen and (every := rehearsal.drafters[index].refresh_every):
            rehearsal.run([next(choice for choice in choices if choice.drafter == index)], every)


def _n_untimed(runner: ModelRunner) -> int:
    return UNTIMED_ROUNDS if runner.graphs is None else UNTIMED_ROUNDS_CAPTURED


def _middle(gammas: Sequence[int]) -> int:
    """The lower one of two: its rounds are the shorter ones."""
    return gammas[(len(gammas) - 1) // 2]


def _choices(drafters: Sequence[Drafter], gammas: Sequence[int]) -> list[Choice]:
    """Plain rounds, those of the first drafter at every gamma, those of the others at the middle one."""
    others = [Choice(index, _middle(gammas)) for index in range(1, len(drafters))]
    return [PLAIN, *(Choice(0, gamma) for gamma in gammas), *others]


def _costs(rehearsal: Rehearsal, gammas: Sequence[int], n_untimed: int) -> list[Costs]:
    timed = {choice: parts[n_untimed:] for choice, parts in rehearsal.timed.items()}
    every = [one.refresh_every for one in rehearsal.drafters]
    refresh_ms = [
        1e3 * median_low(seen) / n if n else 0.0 for n, seen in zip(every, rehearsal.refreshes(), strict=True)
    ]
    return costs_of_rounds(timed, gammas, rehearsal.acceptance, refresh_ms, [_size(one) for one in rehearsal.drafters])


def _size(drafter: Drafter) -> int | None:
    """KV entries a row that it reads; None if it has no cache of its own."""
    cache = getattr(drafter, "cache", None)
    return None if cache is None else cache.capacity


def costs_of_rounds(
    timed: Mapping[Choice, Sequence[Mapping[str, float]]],
    gammas: Sequence[int],
    acceptance: Sequence[AcceptanceRate | None],
    refresh_ms: Sequence[float],
    sizes: Sequence[int | None],
) -> list[Costs]:
    """One a drafter, of the seconds that the rounds of each choice took in its parts (see `Rehearsal`), and of a
    round's share of what choosing its entries anew takes.

    A draft step takes no longer than one of the drafter before it, and as long with any policy of one size.
    """

    def ms(choice: Choice, part: str) -> float:
        return 1e3 * median_low(times[part] for times in timed[choice])  # of two, the one that nothing held up

    draft_ms = []
    for drafter in range(len(acceptance)):
        drafted = [choice for choice in timed if choice.drafter == drafter]
        draft_ms.append(sum(ms(choice, "draft") for choice in drafted) / sum(choice.gamma for choice in drafted))
    of_size = {size: median(ms for ms, own in zip(draft_ms, sizes, strict=True) if own == size) for size in sizes}
    draft_ms = [own if size is None else of_size[size] for own, size in zip(draft_ms, sizes, strict=True)]
    # A plain step has a little of everything but drafts.
    plain_ms = sum(ms(PLAIN, part) for part in ("draft", "verify", "other"))
    other_ms = median(ms(Choice(0, gamma), "other") for gamma in gammas)
    verify_ms = tuple(ms(Choice(0, gamma), "verify") for gamma in gammas)
    return [
        Costs(plain_ms, tuple(gammas), verify_ms, draft, other_ms, seen, refresh)
        for draft, seen, refresh in zip(accumulate(draft_ms, min), acceptance, refresh_ms, strict=True)
    ]
