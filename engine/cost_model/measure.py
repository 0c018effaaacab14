"""Measures what rounds cost: plain steps and rounds of every gamma, interleaved, over a filled cache."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from common.errors import ConfigError
from engine.acceptance import AcceptanceRate
from engine.cost_model.costs import Costs
from engine.decoding import generate
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice, Interleaved
from engine.runner import ModelRunner
from engine.stats import Stats
from engine.timing import PhaseTimer

# Rounds of each kind that are timed: as many as fit, but neither fewer nor more than these ...
FEWEST_TIMED, MOST_TIMED = 4, 16
# ... into what all may take, those included that are not timed, of each kind the first ones ...
MEASURING_SECONDS = 12.0
# ... which are so many: one runs, or one runs, one captures, one replays.
UNTIMED_ROUNDS, UNTIMED_ROUNDS_CAPTURED = 1, 3


def interleaved_rounds(
    runner: ModelRunner, pacing: Interleaved, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, **how: Any
) -> Iterator[tuple[Stats, PhaseTimer]]:
    """Decode behind the prompts, as often as it takes, until the pacing is done.

    how: sampling and verification, as of `generate`. Yields what each decode did, and its phases' times.
    Errors: ConfigError for fewer prompts than the pacing's rows, or if nothing is to be decoded behind the first token;
    UserError if logits are not finite.
    """
    if not 0 < pacing.n_rows <= min(len(prompts), runner.max_batch) or max_new_tokens < 2:
        seen = f"{len(prompts)} prompts for {pacing.n_rows} rows, {max_new_tokens} new tokens"
        what, required = "no round has all rows decoding", "a prompt for every row, and 2 new tokens or more"
        fix = "give more prompts, or a cache with more room"
        raise ConfigError(what, "interleaved_rounds: prompts, max_new_tokens", seen, required, fix)
    while not pacing.done:
        pacing.restart()
        timer, filling = PhaseTimer(runner.device), prompts[: pacing.n_rows]
        output = generate(runner, filling, max_new_tokens=max_new_tokens, pacing=pacing, phase=timer, **how)
        output.require_finite("measuring costs")
        yield output.stats, timer


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
    captures should have run before. `how`, errors: as of `interleaved_rounds`.
    """
    middle = gammas[len(gammas) // 2]
    choices = [PLAIN, *(Choice(0, gamma) for gamma in gammas)]
    choices += [Choice(index, middle) for index in range(1, len(drafters))]
    untimed = UNTIMED_ROUNDS if runner.graphs is None else UNTIMED_ROUNDS_CAPTURED
    fewest = untimed + FEWEST_TIMED
    n_rows = min(runner.max_batch, len(prompts))
    pacing = Interleaved(drafters, choices, n_rows, fewest)
    found: dict[Choice, list[dict[str, float]]] = defaultdict(list)
    decodes: list[Stats] = []

    def measure(n_rounds: int) -> None:
        """Until every choice had so many rounds."""
        pacing.n_rounds = n_rounds
        for stats, timer in interleaved_rounds(runner, pacing, prompts, **how):
            decodes.append(stats)
            phases = (timer.seconds[name] for name in ("resume", "draft", "verify"))
            for round_, resume, draft, verify in zip(stats.rounds, *phases, strict=True):
                other = round_.seconds - resume - draft - verify
                if round_.busy == n_rows:
                    found[round_.choice].append({"draft": draft, "verify": verify, "other": other})

    measure(fewest)
    taken = sum(stats.draft_prefill_seconds + stats.decode_seconds for stats in decodes)
    # A draft model runs the prompts in every decode, so also in one for a single round more.
    left = seconds - taken - decodes[-1].draft_prefill_seconds
    # The leader's clock decides, so that all ranks run the same rounds.
    n_more = runner.ranks.shared(lambda: int(left / taken * fewest))
    measure(fewest + min(max(0, n_more), MOST_TIMED - FEWEST_TIMED))
    timed = {choice: times[untimed:] for choice, times in found.items()}
    return costs_of_rounds(timed, gammas, pacing.acceptance)


def costs_of_rounds(
    timed: Mapping[Choice, Sequence[Mapping[str, float]]], gammas: Sequence[int], acceptance: Sequence[AcceptanceRate]
) -> list[Costs]:
    """One a drafter, of the seconds that the rounds of each choice took in its parts "draft", "verify" and "other".

    A draft step takes no longer than one of the drafter before it.
    """

    def ms(choice: Choice, part: str) -> float:
        return 1e3 * median(times[part] for times in timed[choice])

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
