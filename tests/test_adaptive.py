"""What pays best, chosen before every round: the rule on a simulated machine, and that no token changes."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pacings import Ending, Scripted
from recorded_graph import RecordedGraph, RecordedGraphs
from tiny import TINY, full_cache, random_prompts, recomputed, tiny_model, tiny_runner

from common.errors import ConfigError
from engine import ModelRunner, NGram, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.cost_model.adaptive import Adaptive
from engine.cost_model.costs import Costs, tokens_per_round
from engine.counts import AcceptanceRate
from engine.drafters import Shown
from engine.pacing import PLAIN, Choice
from engine.parallel.ranks import Ranks
from kv_cache import StreamingKVCache

GAMMAS = range(7)


def costs(plain: float, draft: float, verify: tuple[float, float], seen: AcceptanceRate | None = None) -> Costs:
    """Verification of 1 and of 6 drafts."""
    return Costs(plain, (1, 6), verify, draft, 1.0, seen)


CHEAP = costs(100, 15, (115, 160))


def adaptive(*each: Costs, policies: Sequence[str] | None = None) -> Adaptive:
    return of_rows({8: each}, policies)


def of_rows(by_rows: dict[int, Sequence[Costs]], policies: Sequence[str] | None = None) -> Adaptive:
    n_drafters = len(next(iter(by_rows.values())))
    return Adaptive([NGram] * n_drafters, by_rows, GAMMAS, policies)  # type: ignore[list-item]  # nothing is drafted


def simulate(
    each: Sequence[Costs], alphas, n_rounds: int, n_rows: int = 8, policies: Sequence[str] | None = None
) -> tuple[list[Choice], float]:
    """Rounds on a machine that has those very costs; `alphas(round)[drafter]` drafts are accepted.

    Returns the choices, and the speedup over plain decoding of the last half of them.
    """
    pacing, rng, choices, tokens, ms = adaptive(*each, policies=policies), random.Random(0), [], 0.0, 0.0
    for n in range(n_rounds):
        choice = pacing.choose(n_rows)
        choices.append(choice)
        accepted = [0] * n_rows
        for row in range(n_rows):
            while accepted[row] < choice.gamma and rng.random() < alphas(n)[choice.drafter]:
                accepted[row] += 1
        pacing.observe(choice, accepted)
        if n >= n_rounds // 2:
            tokens += 1 + sum(accepted) / n_rows
            ms += each[0].plain_ms if choice == PLAIN else each[choice.drafter].round_ms(choice.gamma)
    return choices, tokens * each[0].plain_ms / ms


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("measured", [costs(100, 10, (110, 150)), costs(100, 30, (120, 260)), costs(40, 25, (45, 60))])
def test_the_choice_is_that_of_the_true_acceptance(alpha, measured):
    """Within 4% of the best fixed gamma or plain decoding, though it begins without knowing alpha."""
    _, speedup = simulate([measured], lambda n: [alpha], 600)
    best = max(1.0, *(measured.speedup(tokens_per_round(alpha, gamma), gamma) for gamma in GAMMAS[1:]))
    assert speedup > 0.96 * best


@pytest.mark.parametrize("n_drafters", [1, 5])
def test_speculation_that_loses_gives_way_and_is_tried_again_now_and_then(n_drafters):
    """Of budgets only the largest: none is expected to do better."""
    each = [costs(100, 60 - index / 10, (130, 150)) for index in range(n_drafters)]
    choices, speedup = simulate(each, lambda n: [0.2] * n_drafters, 800)
    tried = [choice for choice in choices if choice != PLAIN]
    assert choices[0] != PLAIN and {choice.drafter for choice in tried} == {0}
    assert 3 <= len(tried) <= 12 and speedup > 0.97


def test_what_cannot_pay_is_never_tried():
    assert adaptive(costs(100, 90, (300, 600))).choose(8) == PLAIN


def test_a_drafter_that_missed_rounds_has_to_pay_for_catching_up():
    """In a third of the rounds that it missed. A draft model runs what it missed, which takes longer the more that is,
    and never pays where a verification grows so much with every token; what copies the target's entries does not mind.
    """
    runs, copies = (SimpleNamespace(runs_missed=runs) for runs in (True, False))

    def rounds_without(drafter: Any, verify: tuple[float, float]) -> list[int]:
        """How many plain ones come in between, twice; it drafts at first, and in the round behind one that it drafted.

        Expected are 1.95 tokens of gamma 1 and so on, since nothing is observed.
        """
        pacing, missed = Adaptive([drafter], {8: [costs(100, 40, verify)]}, GAMMAS), []
        for _ in range(2):
            assert pacing.choose(8) != PLAIN
            missed.append(0)
            while missed[-1] < 300 and (not missed[-1] or pacing.choose(8) == PLAIN):
                pacing.observe(PLAIN, [0] * 8)
                missed[-1] += 1
            pacing.observe(Choice(0, 1), [])
        return missed

    assert rounds_without(copies, (115, 190)) == [5, 5] and rounds_without(runs, (115, 190)) == [11, 11]
    assert rounds_without(copies, (120, 300)) == [7, 7] and rounds_without(runs, (120, 300)) == [300, 300]


@pytest.mark.parametrize("n_rows", [1, 8])
def test_it_comes_back_when_the_text_becomes_easy(n_rows):
    choices, _ = simulate([CHEAP], lambda n: [0.05 if n < 60 else 0.95], 300, n_rows)
    assert choices[20:60].count(PLAIN) > 30 and PLAIN not in choices[-150:]
    assert {choice.gamma for choice in choices[-50:]} <= {5, 6}


def test_what_was_seen_while_costs_were_measured_is_where_it_begins():
    """The best gamma of the best drafter, or a plain round."""
    for alpha in (0.6, 0.9):
        best = max(GAMMAS[1:], key=lambda gamma, alpha=alpha: CHEAP.speedup(tokens_per_round(alpha, gamma), gamma))
        assert abs(adaptive(replace(CHEAP, acceptance=AcceptanceRate(alpha, 400))).choose(8).gamma - best) <= 1
    assert adaptive(replace(CHEAP, acceptance=AcceptanceRate(0.1, 400))).choose(8) == PLAIN
    dear, cheap = (costs(100, ms, (115, 160), AcceptanceRate(alpha, 400)) for ms, alpha in ((60, 0.95), (15, 0.85)))
    assert adaptive(dear, cheap).choose(8).drafter == 1


@pytest.mark.parametrize("n_rows", [1, 8])
@pytest.mark.parametrize("measured,true", [(0.05, 0.95), (0.4, 0.95), (0.95, 0.05), (0.9, 0.2)])
def test_what_was_measured_of_another_text_is_outweighed(measured, true, n_rows):
    """However much was measured: speculation is neither locked out nor held on to."""
    seen = replace(CHEAP, acceptance=AcceptanceRate(measured, 1e6))
    choices, speedup = simulate([seen], lambda n: [true], 300, n_rows)
    if true > 0.5:
        assert PLAIN not in choices[150:] and speedup > 2
    else:
        assert choices[150:].count(PLAIN) > 110 and speedup > 0.95


@pytest.mark.parametrize("alphas,wanted", [((0.9, 0.85), 1), ((0.95, 0.3), 0), ((0.6, 0.58), 1)])
def test_the_best_of_several_budgets_is_found_and_found_again(alphas, wanted):
    """A large one that is accepted more against a small one that costs less, without anything measured before; then
    nothing but the large one's acceptance changes.
    """
    each = [costs(100, 20, (110, 150)), costs(100, 10, (110, 150))]
    choices, _ = simulate(each, lambda n: alphas if n < 200 else (0.97, alphas[1]), 600)
    assert [choice.drafter for choice in choices[150:200]].count(wanted) > 40
    assert [choice.drafter for choice in choices[-100:]].count(0) > 75


@pytest.mark.parametrize("alphas,wanted", [((0.2, 0.2, 0.9, 0.85), 1), ((0.9, 0.88, 0.3, 0.3), 0), ((0.1,) * 4, None)])
def test_the_best_policy_is_found_whatever_another_one_does(alphas, wanted):
    """Two policies of two budgets each; choosing entries anew costs one of them a little."""
    large, small = costs(100, 20, (110, 150)), costs(100, 10, (110, 150))
    each = [large, small, replace(large, refresh_ms=4.0), replace(small, refresh_ms=4.0)]
    choices, _ = simulate(each, lambda n: alphas, 400, policies=["a", "a", "b", "b"])
    drafted = [None if choice == PLAIN else choice.drafter // 2 for choice in choices[100:]]
    assert drafted.count(wanted) > 250


def test_what_choosing_entries_anew_costs_decides_between_policies():
    dear = replace(CHEAP, refresh_ms=40.0, acceptance=AcceptanceRate(0.9, 300))
    cheap = replace(dear, refresh_ms=2.0)
    for each, wanted in (((dear, cheap), 1), ((cheap, dear), 0)):
        assert adaptive(*each, policies=["a", "b"]).choose(8).drafter == wanted


@pytest.mark.parametrize("small,wanted", [((14.9, 1.0, 6), 0), ((14.5, 0.9, 300), 0), ((10, 0.9, 300), 1)])
def test_another_budget_is_preferred_for_its_costs_not_for_its_luck(small, wanted):
    """Against 0.9 of 300 positions with a larger budget; and a change has to be worth it."""
    draft_ms, *seen = small
    each = [costs(100, ms, (115, 160), AcceptanceRate(*rate)) for ms, rate in ((15, (0.9, 300)), (draft_ms, seen))]
    assert adaptive(*each).choose(8).drafter == wanted


def test_the_choice_is_that_of_the_rows_that_are_left():
    """A few rows verify many drafts for the price of one, all rows do not; in between what lies in between pays."""
    few, all_rows = costs(50, 3, (51, 55)), costs(100, 15, (130, 500))
    pacing = of_rows({8: [all_rows], 2: [few]})
    chosen = [pacing.choose(n_busy).gamma for n_busy in range(1, 10)]
    assert chosen[0] == chosen[1] == 6 and chosen[7] == chosen[8] < 4 and chosen == sorted(chosen, reverse=True)
    assert len(set(chosen)) > 2


def test_few_rows_are_not_hurried_while_others_are_about_to_join():
    """Plain rounds with those would emit more in the same time; near the full batch speculation pays again."""
    few, all_rows = costs(50, 3, (51, 70)), costs(100, 8, (110, 160))
    pacing = of_rows({8: [all_rows], 2: [few]})
    assert pacing.choose(2).gamma > 0
    chosen = [pacing.choose(n_busy, 8 - n_busy) != PLAIN for n_busy in range(1, 9)]
    assert not chosen[0] and chosen[6] and chosen[7] and chosen == sorted(chosen)


def test_no_gamma_is_chosen_beyond_those_that_were_measured():
    """Where a verification of 1 costs what a step does, one of 6 would seem to, too."""
    chosen = [of_rows({8: [Costs(100, at, (100.0,) * len(at), 1, 1)]}).choose(8).gamma for at in ((1,), (3,), (1, 6))]
    assert chosen == [1, 3, 6]


def drafters_of(runner: ModelRunner) -> list:
    """One of each kind that can fall behind: two budgets, a model of its own, and the row's own text."""
    sizes = {"max_batch": runner.max_batch, "n_sink": 2, "dtype": torch.float64}
    small, large = (StreamingKVCache(TINY, budget=n, **sizes) for n in (10, 24))
    own = StreamingKVCache(TINY, budget=24, **sizes, rotate_on_read=True)
    return [
        SelfSpeculation(runner, large, gamma=4),
        SelfSpeculation(runner, small, gamma=4),
        StandaloneDraft(ModelRunner(tiny_model(seed=1), own), gamma=4),
        NGram(runner, gamma=4),
    ]


SCRIPT = [Choice(0, 3), PLAIN, PLAIN, PLAIN, Choice(2, 2), Choice(1, 4), Choice(3, 1), Choice(1, 0), Choice(2, 4)]
SCRIPT += [PLAIN, Choice(0, 1), Choice(2, 1), PLAIN, Choice(3, 4)]


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_changing_drafters_and_gammas_changes_no_token_where_rounds_are_captured(mode):
    """Ragged, refilled rows; what fell behind catches up. Each choice has graphs of its own."""
    model, prompts = tiny_model(), random_prompts([40, 7, 23, 1, 31])
    graphs: list[RecordedGraph] = []
    new_graphs = partial(RecordedGraphs, recorded=graphs)
    runner = ModelRunner(model, full_cache(model, 2), prefill_chunk=8, new_graphs=new_graphs)
    sampling = SamplingParams(0.0 if mode == "greedy" else 0.9, seed=5)
    drafters, limits = drafters_of(runner), [40, 9, 33, 30, 41]
    expected = recomputed(model, prompts, limits, sampling)
    for _ in range(3):
        pacing = Scripted(drafters, SCRIPT)
        out = generate(runner, prompts, max_new_tokens=limits, pacing=pacing, sampling=sampling, verification=mode)
        assert out.tokens == expected
    assert {round_.choice for round_ in out.stats.rounds} == set(SCRIPT)
    # Four graphs of every choice, three of a plain step; for two rows, and for the one that is left.
    assert len(graphs) == 2 * (4 * (len(set(SCRIPT)) - 1) + 3)


def two_rows(*lengths: int, **settings: Any) -> tuple[ModelRunner, list[list[int]]]:
    return tiny_runner(2, **settings), random_prompts(lengths)


def test_a_drafter_that_fell_behind_drafts_as_if_it_had_followed():
    """The target itself over a full cache is always right: also after rounds without it."""
    runner, prompts = two_rows(30, 11)
    perfect = StandaloneDraft(ModelRunner(runner.model, full_cache(runner.model, 2)), gamma=3)
    shadow = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=3)
    script = [PLAIN, PLAIN, Choice(0, 3), PLAIN, PLAIN, PLAIN, PLAIN, Choice(1, 2), Choice(0, 1), Choice(1, 3)]
    out = generate(runner, prompts, max_new_tokens=60, pacing=Scripted([perfect, shadow], script))
    assert out.stats.counts.verified > 40 and out.stats.counts.acceptance_rate == 1.0


def test_a_prompt_that_a_drafter_meets_late_is_no_part_of_a_round():
    """A draft model that is first asked behind plain rounds runs the prompts then; all ranks wait for those that do."""
    now, admitted = ["no phase"], []

    class Waiting(Ranks):
        def gathered(self, value: Any) -> list[Any]:
            admitted.append("all ranks")
            return super().gathered(value)

    ranks = Waiting()
    runner, prompts = two_rows(30, 11, ranks=ranks)
    own = StandaloneDraft(ModelRunner(tiny_model(seed=1), full_cache(runner.model, 2), ranks=ranks), gamma=3)
    follow = own.follow

    def watched(rows: Sequence[Shown]) -> None:
        admitted.extend(now[0] for one in rows if one.known == 0)  # a prompt
        follow(rows)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        now[0] = name
        yield
        now[0] = "no phase"

    own.follow = watched  # type: ignore[method-assign]
    pacing = Scripted([own], [Choice(0, 2), PLAIN, PLAIN])
    out = generate(runner, prompts, max_new_tokens=20, pacing=pacing, phase=phase)
    assert [round_.choice for round_ in out.stats.rounds][:3] == [PLAIN, PLAIN, Choice(0, 2)]
    assert admitted == ["no phase"] * 2 + ["all ranks"] and out.stats.draft_prefill_seconds > 0
    assert out.tokens == recomputed(runner.model, prompts, 20)


def test_a_pacing_can_end_the_decode():
    """Rows keep what they have, a prompt that waited has nothing, and the next decode is none the wiser."""
    runner, prompts = two_rows(30, 11, 20)
    (drafter, *_) = drafters_of(runner)
    pacing = Ending([drafter], [Choice(0, 2), PLAIN], 6)
    out = generate(runner, prompts, max_new_tokens=60, pacing=pacing)
    assert [round_.choice for round_ in out.stats.rounds] == [Choice(0, 2), PLAIN] * 3
    assert out.finish_reasons == [None] * 3 and out.tokens[2] == []
    lengths = [len(tokens) for tokens in out.tokens[:2]]
    assert all(7 <= n <= 13 for n in lengths) and out.tokens[:2] == recomputed(runner.model, prompts[:2], lengths)
    again = generate(runner, prompts, max_new_tokens=10, drafter=drafter)
    assert again.tokens == recomputed(runner.model, prompts, 10)


def test_a_pacing_cannot_ask_for_more_than_its_drafter_has():
    runner, prompts = two_rows(30, 11)
    (drafter, *_) = drafters_of(runner)
    with pytest.raises(ConfigError, match="more than its drafter can"):
        generate(runner, prompts, max_new_tokens=9, pacing=Scripted([drafter], [Choice(0, 5)]))
    with pytest.raises(ConfigError, match="brings its own drafters"):
        generate(runner, prompts, max_new_tokens=9, pacing=Scripted([drafter], [PLAIN]), drafter=drafter)
