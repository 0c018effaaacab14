"""Measures what rounds cost: plain steps and rounds of every gamma in turn, over a filled cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from engine.acceptance import AcceptanceRate
from engine.cost_model import Costs
from engine.decoding import generate
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice, InTurn
from engine.runner import ModelRunner
from engine.sampling import SamplingParams
from engine.stats import Round
from engine.timing import PhaseTimer
from kv_cache.errors import ConfigError

# Rounds of each kind that are timed: as many as fit, but neither fewer nor more than these ...
FEWEST_TIMED, MOST_TIMED = 4, 16
# ... into what all rounds may take, those included that are not timed, of each kind the first ones ...
MEASURING_SECONDS = 12.0
# ... which are so many: one runs, or one runs, one captures, one replays.
UNTIMED_ROUNDS, UNTIMED_ROUNDS_CAPTURED = 1, 3


def rounds_in_turn(
    runner: ModelRunner,
    pacing: InTurn,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    verification: str = "auto",
) -> Iterator[tuple[Sequence[Round], PhaseTimer]]:
    """Decode behind the prompts, as often as it takes, until the pacing is done.

    Yields the rounds of each decode, and their phases' times. Errors: ConfigError for fewer prompts than rows, or
    if nothing is to be decoded behind the first token; UserError if logits are not finite.
    """
    if len(prompts) < runner.max_batch or max_new_tokens < 2:
        raise ConfigError(
            "no round has all rows decoding",
            where="rounds_in_turn: prompts, max_new_tokens",
            seen=f"{len(prompts)} prompts in {runner.max_batch} rows, {max_new_tokens} new tokens",
            required="a prompt for every row, and 2 new tokens or more",
            fix="give more prompts, or a cache with more room",
        )
    while not pacing.done:
        pacing.restart()
        timer = PhaseTimer(runner.device)
        output = generate(
            runner,
            prompts[: runner.max_batch],
            max_new_tokens=max_new_tokens,
            pacing=pacing,
            sampling=sampling,
            verification=verification,
            phase=timer,
        )
        output.require_finite("measuring costs")
        yield output.stats.rounds, timer


def measure_costs(
    runner: ModelRunner,
    drafters: Sequence[Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    gammas: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    verification: str = "auto",
    seconds: float = MEASURING_SECONDS,
) -> list[Costs]:
    """The costs of each drafter's rounds behind prompts that fill the runner's rows: ms, medians of rounds in turn.

    Only the first drafter's rounds are measured at every one of the gammas, which ascend; its draft step is that of all
    of them. What the others' differ in is their draft step, which is measured at the middle gamma. `max_new_tokens`, 2
    or more, is what the cache has room for. As many prompts as the runner has rows. `seconds`: what all rounds may
    take, unless the fewest take longer; what first compiles or captures should have run before.
    Errors: as of `rounds_in_turn`.
    """
    gammas = tuple(gammas)
    middle = gammas[len(gammas) // 2]
    choices = [PLAIN, *(Choice(0, gamma) for gamma in gammas)]
    choices += [Choice(index, middle) for index in range(1, len(drafters))]
    untimed = UNTIMED_ROUNDS if runner.new_graph is None else UNTIMED_ROUNDS_CAPTURED
    fewest, most = untimed + FEWEST_TIMED, untimed + MOST_TIMED
    pacing = InTurn(drafters, choices, runner.max_batch, fewest)
    found: dict[Choice, list[dict[str, float]]] = defaultdict(list)

    def measure(n_rounds: int) -> float:
        """Until every choice had so many rounds; returns the seconds of those that were missing."""
        pacing.n_rounds, taken = n_rounds, 0.0
        for rounds, timer in rounds_in_turn(
            runner,
            pacing,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            verification=verification,
        ):
            phases = (timer.seconds[name] for name in ("resume", "draft", "verify"))
            for round_, resume, draft, verify in zip(rounds, *phases, strict=True):
                taken += round_.seconds
                other = round_.seconds - resume - draft - verify
                if round_.busy == runner.max_batch:
                    found[round_.choice].append({"draft": draft, "verify": verify, "other": other})
        return taken

    taken = measure(fewest)
    # The leader's clock decides, so that all ranks run the same rounds.
    n_fitting = runner.ranks.shared(lambda: int(fewest * seconds / taken))
    measure(max(fewest, min(n_fitting, most)))

    timed = {choice: times[untimed:] for choice, times in found.items()}
    return costs_of_rounds(timed, gammas, pacing.acceptance)


def costs_of_rounds(
    timed: Mapping[Choice, Sequence[Mapping[str, float]]], gammas: Sequence[int], acceptance: Sequence[AcceptanceRate]
) -> list[Costs]:
    """One a drafter, of the seconds that the rounds of each choice took in its parts "draft", "verify" and "other"."""

    def ms(choice: Choice, part: str) -> float:
        return 1e3 * median(times[part] for times in timed[choice])

    def draft_ms(drafter: int) -> float:
        drafted = [choice for choice in timed if choice.drafter == drafter]
        return sum(ms(choice, "draft") for choice in drafted) / sum(choice.gamma for choice in drafted)

    # A plain step has a little of everything but drafts.
    plain_ms = sum(ms(PLAIN, part) for part in ("draft", "verify", "other"))
    other_ms = median(ms(Choice(0, gamma), "other") for gamma in gammas)
    verify_ms = tuple(ms(Choice(0, gamma), "verify") for gamma in gammas)
    return [
        Costs(plain_ms, tuple(gammas), verify_ms, draft_ms(drafter), other_ms, seen)
        for drafter, seen in enumerate(acceptance)
    ]
