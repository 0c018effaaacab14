"""Measures what rounds cost: plain steps and rounds of every gamma, interleaved, over a filled cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Any

import numpy as np

from engine.acceptance import AcceptanceRate
from engine.cost_model.costs import Costs
from engine.cost_model.rehearsal import Rehearsal
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
    # The leader's clock decides, so that all ranks run the same rounds.
    n_more = runner.ranks.shared(lambda: int((seconds / rehearsal.seconds - 1) * fewest))
    rehearsal.run(choices, min(max(0, n_more), MOST_TIMED - FEWEST_TIMED))
    return _costs(rehearsal, gammas, _n_untimed(runner))


def measure_for_decode(
    runner: ModelRunner,
    drafters: Sequence[Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    gammas: Sequence[int],
    n_steps: float,
    **how: Any,
) -> dict[int, list[Costs]]:
    """The same by how many rows decode, all and the fewest that are computed, for a decode of so many plain steps.

    Measuring takes MOST_SHARE of those and MEASURING_SECONDS at most, unless the fewest rounds take longer: plain ones,
    and of each drafter those of the middle gamma. What else there is time for comes in this order: the same while the
    fewest rows decode, other gammas, more rounds.
    """
    rehearsal, untimed = Rehearsal(runner, drafters, prompts, gamma=gammas[-1], **how), _n_untimed(runner)
    n_rows, fewest_rows, middle = len(rehearsal.prompts), runner.n_computed(1), _middle(gammas)
    choices, fewest = _choices(drafters, [middle]), untimed + FEWEST_TIMED
    rehearsal.run(choices, fewest)
    n_first = len(choices)

    def n_kinds_left() -> int:
        """For how many more kinds of rounds there is time."""
        plain_seconds = _costs(rehearsal, [middle], untimed)[0].plain_ms / 1e3
        left = min(MEASURING_SECONDS, MOST_SHARE * n_steps * plain_seconds) - rehearsal.seconds
        return int(left / rehearsal.seconds * n_first)

    n_left = runner.ranks.shared(n_kinds_left)
    has_few = fewest_rows < n_rows and n_left >= n_first
    # The largest first, since costs beyond what was measured are further off than those between.
    others = [gamma for gamma in (gammas[-1], *gammas[:-1]) if gamma != middle]
    others = others[: max(0, n_left - n_first * has_few)]
    rehearsal.run([Choice(0, gamma) for gamma in others], fewest)
    choices += [Choice(0, gamma) for gamma in others]
    n_more = (n_left - n_first * has_few - len(others)) * fewest // len(choices)
    rehearsal.run(choices, min(max(0, n_more), MOST_TIMED - FEWEST_TIMED))
    found = {n_rows: _costs(rehearsal, sorted([middle, *others]), untimed)}
    if has_few:
        rehearsal.keep(fewest_rows)
        rehearsal.run(choices[:n_first], fewest)
        found[fewest_rows] = _costs(rehearsal, [middle], untimed)
    return found


def still_hold(
    known: Sequence[Costs],
    runner: ModelRunner,
    drafters: Sequence[Drafter],
    prompts: Sequence[Sequence[int]],
    **how: Any,
) -> list[Costs] | None:
    """The known costs with the acceptance that a check saw; None unless it found them: two plain steps, and two rounds
    of the first drafter, whose faster ones differ by the same factor but for MOST_OFF.

    What pays depends on that factor alone: a machine that does everything more slowly chooses as before.
    """
    gamma = known[0].at[0]
    rehearsal = Rehearsal(runner, drafters, prompts, gamma=gamma, **how)
    rehearsal.run([PLAIN, Choice(0, gamma)], CHECKED_ROUNDS)

    def hold() -> bool:
        plain, round_ = (
            min(sum(parts.values()) for parts in rehearsal.timed[one]) for one in (PLAIN, Choice(0, gamma))
        )
        return abs(round_ / plain * known[0].plain_ms / known[0].round_ms(gamma) - 1) <= MOST_OFF

    seen = zip(known, rehearsal.acceptance, strict=True)
    return [replace(one, acceptance=rate) for one, rate in seen] if runner.ranks.shared(hold) else None


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
    return costs_of_rounds(timed, gammas, rehearsal.acceptance)


def costs_of_rounds(
    timed: Mapping[Choice, Sequence[Mapping[str, float]]],
    gammas: Sequence[int],
    acceptance: Sequence[AcceptanceRate | None],
) -> list[Costs]:
    """One a drafter, of the seconds that the rounds of each choice took in its parts "draft", "verify" and "other".

    A draft step takes no longer than one of the drafter before it.
    """

    def ms(choice: Choice, part: str) -> float:
        return 1e3 * median_low(times[part] for times in timed[choice])  # of two, the one that nothing held up

    draft_ms, n_drafted = [], []
    for drafter in range(len(acceptance)):
        drafted = [choice for choice in timed if choice.drafter == drafter]
        n_drafted.append(sum(choice.gamma for choice in drafted))
        draft_ms.append(sum(ms(choice, "draft") for choice in drafted) / n_drafted[-1])
    # A plain step has a little of everything but drafts.
    plain_ms = sum(ms(PLAIN, part) for part in ("draft", "verify", "other"))
    other_ms = median(ms(Choice(0, gamma), "other") for gamma in gammas)
    verify_ms = tuple(ms(Choice(0, gamma), "verify") for gamma in gammas)
    return [
        Costs(plain_ms, tuple(gammas), verify_ms, draft, other_ms, seen)
        for draft, seen in zip(_non_increasing(draft_ms, n_drafted), acceptance, strict=True)
    ]


def _non_increasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence that never grows and is nearest to the values, in weighted squares: of the means of all stretches
    around a place, the least over their beginnings of the largest over their ends (Ayer et al. 1955, Annals of
    Mathematical Statistics 26(4), 641-647).
    """

    def mean(first: int, last: int) -> float:
        return float(np.average(values[first : last + 1], weights=weights[first : last + 1]))

    n = len(values)
    return [min(max(mean(first, last) for last in range(at, n)) for first in range(at + 1)) for at in range(n)]
