"""The controller chooses before every round what pays best: its rule on a simulated machine."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.auto.adaptive import Adaptive
from bench.auto.costs import Costs, tokens_per_round
from engine.controller import PLAIN, RoundChoice
from engine.stats import AcceptanceRate

GAMMAS = range(7)
# What a controller reads of a drafter.
DRAFTER: Any = SimpleNamespace(gamma=6, skips_model=None, is_written_through=False)


def costs(plain: float, draft: float, verify: tuple[float, float], seen: AcceptanceRate | None = None) -> Costs:
    """Verification of 1 and of 6 drafts; to catch up takes as long as a draft."""
    return Costs(plain, (1, 6), verify, draft, 1.0, seen, resume_ms=draft)


CHEAP = costs(100, 15, (115, 160))


def adaptive(by_rows: dict[int, Sequence[Costs]]) -> Adaptive:
    """A controller by the costs of those numbers of rows."""
    n_drafters = len(next(iter(by_rows.values())))
    return Adaptive([DRAFTER] * n_drafters, {1000: by_rows}, GAMMAS)


def simulate(each: Sequence[Costs], alphas: Sequence[float]) -> list[tuple[RoundChoice, float, float]]:
    """Return the choices of rounds of 8 rows on a machine that has those very costs, their ms, and their tokens a row;
    each round has another probability that a draft is accepted."""
    controller, rng, rounds = adaptive({8: each}), random.Random(0), []
    for alpha in alphas:
        choice = controller.choose(8)
        accepted = [next(n for n in GAMMAS if n == choice.gamma or rng.random() >= alpha) for _ in range(8)]
        controller.observe(choice, accepted)
        ms = each[0].plain_ms if choice == PLAIN else each[choice.drafter].round_ms(choice.gamma)
        rounds.append((choice, ms, 1 + sum(accepted) / 8))
    return rounds


def speedup(rounds: Sequence[tuple[RoundChoice, float, float]]) -> float:
    """Return the speedup over plain decoding, whose rounds take 100 ms."""
    return 100 * sum(tokens for *_, tokens in rounds) / sum(ms for _, ms, _ in rounds)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("measured", [costs(100, 10, (110, 150)), costs(100, 30, (120, 260))])
def test_the_choice_is_that_of_the_true_acceptance(alpha, measured):
    """Within 4% of the best fixed gamma or plain decoding, though it begins without knowing alpha."""
    best = max(1.0, *(measured.speedup(tokens_per_round(alpha, gamma), gamma) for gamma in GAMMAS[1:]))
    assert speedup(simulate([measured], [alpha] * 600)[300:]) > 0.96 * best


def test_the_controller_comes_near_an_oracle_where_acceptance_changes_and_no_fixed_gamma_does():
    """The oracle knows the acceptance rate of each stretch of a text; a score is its ms per token over the rule's."""
    stretches = (0.95, 0.2, 0.75)
    rounds = simulate([CHEAP], [alpha for alpha in stretches for _ in range(200)])
    round_ms = [CHEAP.plain_ms, *(CHEAP.round_ms(gamma) for gamma in GAMMAS[1:])]
    ms_a_token = [[ms / tokens_per_round(alpha, gamma) for gamma, ms in enumerate(round_ms)] for alpha in stretches]
    oracle_ms = sum(tokens * min(ms_a_token[n // 200]) for n, (*_, tokens) in enumerate(rounds))
    fixed = [sum(min(each) / each[gamma] for each in ms_a_token) / len(stretches) for gamma in GAMMAS]
    assert oracle_ms / sum(ms for _, ms, _ in rounds) > 0.95 > max(fixed)


@pytest.mark.parametrize("n_drafters", [1, 5])
def test_speculation_that_loses_gives_way_and_is_tried_again_now_and_then(n_drafters):
    """Only the largest of several budgets is tried: none is expected to do better."""
    each = [costs(100, 60 - index / 10, (130, 150)) for index in range(n_drafters)]
    rounds = simulate(each, [0.2] * 800)
    tried = [choice for choice, *_ in rounds if choice != PLAIN]
    assert rounds[0][0] != PLAIN and {choice.drafter for choice in tried} == {0}
    assert 3 <= len(tried) <= 12 and speedup(rounds[400:]) > 0.97


def test_a_drafter_that_missed_rounds_has_to_pay_for_catching_up():
    """In a third of the rounds that it missed. A draft model runs what it missed, which never pays where a verification
    grows much with every token; what copies the target's entries does not mind."""
    runs, copies = (SimpleNamespace(**vars(DRAFTER) | {"is_written_through": copies}) for copies in (False, True))

    def rounds_without(drafter: Any, verify: tuple[float, float]) -> list[int]:
        """Return twice how many plain rounds come in between. Expected are 1.95 tokens of gamma 1 and so on."""
        controller, missed = Adaptive([drafter], {1000: {8: [costs(100, 40, verify)]}}, GAMMAS), []
        for _ in range(2):
            assert controller.choose(8) != PLAIN
            missed.append(0)
            while missed[-1] < 300 and (not missed[-1] or controller.choose(8) == PLAIN):
                controller.observe(PLAIN, [0] * 8)
                missed[-1] += 1
            controller.observe(RoundChoice(0, 1), [])
        return missed

    assert rounds_without(copies, (115, 190)) == [5, 5] and rounds_without(runs, (115, 190)) == [11, 11]
    assert rounds_without(copies, (120, 300)) == [7, 7] and rounds_without(runs, (120, 300)) == [300, 300]


@pytest.mark.parametrize("drafting", [{"draft_ms": 40}, {"draft_ms": 0, "fixed_ms": 300}])
def test_drafts_are_charged_where_their_model_runs(drafting):
    """Drafts that cost much pay while guesses from text take their place, and no longer than that."""
    drafter: Any = SimpleNamespace(gamma=6, skips_model=True, is_written_through=False)
    each = replace(costs(100, 0, (110, 130)), acceptance=AcceptanceRate(0.8, 400), **drafting)
    controller, chosen = Adaptive([drafter], {1000: {1: [each]}}, GAMMAS), []
    for n in range(120):
        drafter.skips_model = n < 60
        chosen.append(controller.choose(1).gamma)
        controller.observe(RoundChoice(0, 5), [4])
    assert chosen[59] == 6 and max(chosen[0], chosen[-1]) <= 3


def test_a_drafter_gets_no_larger_gamma_than_it_drafts():
    """The costs of drafters of a kind are those of the first, at its gammas."""
    short: Any = SimpleNamespace(**vars(DRAFTER) | {"gamma": 3})
    fast, slow = costs(100, 5, (101, 102)), costs(100, 90, (101, 102))
    assert Adaptive([DRAFTER, short], {1000: {8: [slow, fast]}}, GAMMAS).choose(8) == RoundChoice(1, 3)


def test_the_choice_is_that_of_the_rows_that_are_left_and_of_the_context():
    """A few rows verify many drafts for the price of one, all rows do not; in between what lies in between pays."""
    few, all_rows = costs(50, 3, (51, 55)), costs(100, 15, (130, 500))
    controller = adaptive({8: [all_rows], 2: [few]})
    chosen = [controller.choose(n_busy).gamma for n_busy in range(1, 10)]
    assert chosen[0] == chosen[1] == 6 and chosen[7] == chosen[8] < 4 and chosen == sorted(chosen, reverse=True)
    assert len(set(chosen)) > 2
    # After short texts a verification and a draft step cost more plain steps than after long ones.
    short, long = costs(40, 20, (70, 170)), costs(100, 15, (115, 160))
    controller = Adaptive([DRAFTER], {2000: {8: [long], 2: [long]}, 100: {8: [short], 2: [short]}}, GAMMAS)
    chosen = [controller.choose(8, 0, context).gamma for context in (1, 100, 400, 800, 1400, 2000, 9000)]
    assert chosen[:2] == [0, 0] and chosen == sorted(chosen) and chosen[-2:] == [6, 6] and len(set(chosen)) > 2


@pytest.mark.parametrize("alpha,n_chunks,most", [(0.75, 6, 1.02), (0.9, 2, 0.9)])
def test_a_queue_of_requests_takes_no_longer_than_in_plain_rounds(alpha: float, n_chunks: int, most: float) -> None:
    """A prompt joins after so many rounds, where a row is free; costs of 8 rows after 1500 tokens, measured on two
    cores. Prefilling, which takes as long with any rounds, is left out."""
    few, all_rows = costs(25, 10.3, (25.4, 32)), costs(40, 18, (43.4, 73.5))
    by_rows = {8: [all_rows], 2: [few]}

    def ms_of(controller: Adaptive | None) -> float:
        rng, waiting, chunks, left, ms = random.Random(0), 48, 0, list[int](), 0.0
        while waiting or left:
            n_joining = min(8 - len(left), waiting)
            chunks += n_joining > 0
            if n_joining and chunks >= n_chunks:
                waiting, chunks = waiting - 1, 0
                left.append(63)
            if left:
                n_busy = len(left)
                choice = controller.choose(n_busy, min(8 - n_busy, waiting)) if controller else PLAIN
                ends = [one.plain_ms if choice == PLAIN else one.round_ms(choice.gamma) for one in (few, all_rows)]
                ms += float(np.interp(n_busy, [2, 8], ends))
                accepted = [next(n for n in range(9) if n == choice.gamma or rng.random() >= alpha) for _ in left]
                left = [n for n in (n - one - 1 for n, one in zip(left, accepted, strict=True)) if n > 0]
                if controller:
                    controller.observe(choice, accepted)
        return ms

    assert ms_of(adaptive(by_rows)) < most * ms_of(None)
