"""What pays best, chosen before every round: its rules on a simulated machine, and that no token changes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pacings import Scripted
from recorded_graph import RecordedGraph, RecordedGraphs
from tiny import TINY, continue_by_recomputing, full_cache, random_prompts, tiny_model
from torch._dynamo.testing import CompileCounter

from common.errors import ConfigError, UserError
from engine import ModelRunner, NGram, SamplingParams, SavedText, SelfSpeculation, StandaloneDraft, generate
from engine.acceptance import AcceptanceRate
from engine.cost_model.adaptive import (
    LONGEST_PAUSE,
    SHORTEST_PAUSE,
    TRIAL_PLACES,
    TRIAL_SHARE,
    WORTH_A_CHANGE,
    Acceptance,
    Adaptive,
)
from engine.cost_model.costs import Costs, tokens_per_round
from engine.cost_model.isotonic import non_increasing
from engine.cost_model.measure import FEWEST_TIMED, MOST_TIMED, costs_of_rounds, measure_costs
from engine.decoding import GenerateOutput
from engine.pacing import PLAIN, Choice, InTurn
from engine.parallel.ranks import Ranks
from kv_cache import StreamingKVCache
from models.pointwise import compiled, use_pointwise

GAMMAS = range(7)


class Named:
    """Stands for a drafter where nothing is drafted."""

    gamma = 6


def costs(plain: float, draft: float, verify: tuple[float, float]) -> Costs:
    """Verification of 1 and of 6 drafts."""
    return Costs(plain, (1, 6), verify, draft, 1.0)


def simulate(adaptive: Adaptive, alphas, n_rounds: int, n_rows: int = 8, seed: int = 0) -> tuple[list[Choice], float]:
    """Rounds on a machine that has those very costs; `alphas(round)[drafter]` drafts are accepted.

    Returns the choices, and the speedup over plain decoding of the last half of them.
    """
    rng, choices, tokens, ms = random.Random(seed), [], 0.0, 0.0
    for n in range(n_rounds):
        choice = adaptive.choose()
        choices.append(choice)
        accepted = [0] * n_rows
        if choice.drafter is not None:
            alpha = alphas(n)[choice.drafter]
            for row in range(n_rows):
                while accepted[row] < choice.gamma and rng.random() < alpha:
                    accepted[row] += 1
        adaptive.observe(choice, accepted)
        if n >= n_rounds // 2:
            measured = adaptive.costs[choice.drafter or 0]
            tokens += 1 + sum(accepted) / n_rows
            ms += measured.plain_ms if choice == PLAIN else measured.round_ms(choice.gamma)
    return choices, tokens * adaptive.costs[0].plain_ms / ms


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("measured", [costs(100, 10, (110, 150)), costs(100, 30, (120, 260)), costs(40, 25, (45, 60))])
def test_the_choice_is_that_of_the_true_acceptance(alpha, measured):
    """Within 4% of the best fixed gamma, plain decoding included, though it begins without knowing alpha."""
    adaptive = Adaptive([Named()], [measured], GAMMAS)
    _, speedup = simulate(adaptive, lambda n: [alpha], 600)
    best = max(1.0, *(measured.speedup(tokens_per_round(alpha, gamma), gamma) for gamma in GAMMAS[1:]))
    assert speedup > 0.96 * best


def test_speculation_that_loses_gives_way_and_is_tried_again_ever_more_rarely():
    measured = costs(100, 60, (130, 250))
    choices, speedup = simulate(Adaptive([Named()], [measured], GAMMAS), lambda n: [0.2], 800)
    drafted = [n for n, choice in enumerate(choices) if choice != PLAIN]
    assert drafted[0] == 0
    gaps = [later - earlier for earlier, later in itertools.pairwise(drafted) if later > earlier + 1]
    assert gaps[0] > SHORTEST_PAUSE and gaps == sorted(gaps) and gaps[-1] > 4 * SHORTEST_PAUSE
    assert speedup > 0.98


def choices_after(accepted: list[int], measured: Costs, gammas: Sequence[int], n_rows: int = 1) -> list[Choice]:
    """What is chosen in rounds of which every row accepts so many drafts, or as many as there are."""
    adaptive, choices = Adaptive([Named()], [measured], gammas), []
    for n_accepted in accepted:
        choices.append(adaptive.choose())
        adaptive.observe(choices[-1], [min(n_accepted, choices[-1].gamma)] * n_rows)
    return choices


def test_a_single_row_gets_a_trial_that_says_something():
    """A few rounds of one row are a handful of drafts: one unlucky block does not end a trial, several do."""
    measured, draft = costs(44, 25, (52, 59)), Choice(0, 2)
    assert choices_after([0, 2, 2, 2, 2, 2, 2, 2, 2, 2], measured, [0, 2]) == [draft] * 10
    assert PLAIN in choices_after([0] * 5, measured, [0, 2])


def test_a_trial_of_what_may_pay_ends_when_enough_places_were_reached():
    """A round of gamma 2 costs 2.5 steps and emits 2.45 tokens: it may pay as long as little was seen."""
    measured = Costs(100, (1, 2), (130, 189), 30, 1)
    accepted = [2, 2, 0, 2, 2, 0, 1, 2, 2, 1, 2, 0, 2, 2, 1] * 2
    choices = choices_after(accepted, measured, [0, 2])
    reached = itertools.accumulate(min(n + 1, 2) for n in accepted)
    enough = next(n for n, places in enumerate(reached, 1) if places >= TRIAL_PLACES)
    assert choices.index(PLAIN) == enough


def test_pauses_double_and_are_long_enough_for_what_was_lost():
    """After trials that lose next to nothing they double from the shortest to the longest; after a dear one, by it."""
    pauses = pauses_of(choices_after([0] * 2500, Costs(100, (1, 2), (100.5, 100.6), 0.1, 0.0), [0, 1, 2], n_rows=64))
    assert pauses[:6] == [32, 64, 128, 256, 512, 512] == [SHORTEST_PAUSE * 2**n for n in range(5)] + [LONGEST_PAUSE]
    dear = choices_after([0] * 300, Costs(100, (1, 2), (150, 161), 20, 0.0), [0, 2], n_rows=64)
    # One round of 64 rows: two draft steps and a verification, 2.01 steps for one token.
    assert dear[:2] == [Choice(0, 2), PLAIN] and pauses_of(dear)[0] == round(1.01 / TRIAL_SHARE)


def pauses_of(choices: Sequence[Choice]) -> list[int]:
    """The lengths of the stretches of plain rounds, the last one left out: it may not be over."""
    stretches = [len(list(rounds)) for choice, rounds in itertools.groupby(choices) if choice == PLAIN]
    return stretches[:-1]


def test_speculation_that_earned_back_its_losses_starts_with_the_shortest_pause_again():
    adaptive = Adaptive([Named()], [Costs(100, (1, 2), (100.5, 100.6), 0.1, 0.0)], [0, 2])
    choices: list[Choice] = []
    easy = 10  # rounds, behind the second pause
    while len(pauses_of(choices)) < 4:
        choices.append(adaptive.choose())
        is_easy = choices[-1] != PLAIN and choices.count(PLAIN) == 32 + 64 and easy > 0
        easy -= is_easy
        adaptive.observe(choices[-1], [2 if is_easy else 0] * 64)
    first, second, third, fourth = pauses_of(choices)
    assert (first, second) == (32, 64) and third < second < fourth  # not 128, and it doubles again


def test_a_drafter_that_cannot_beat_the_active_one_is_not_tried_to_the_end():
    """A second look at a drafter that would pay, but less than the one that drafts, takes a few rounds."""

    def looks(other_draft_ms: float) -> list[int]:
        """How long the other one drafts, each time, if every block but its last draft is accepted."""
        good, other = (Costs(100, (1, 3), (110, 120), draft_ms, 1) for draft_ms in (5, other_draft_ms))
        adaptive, choices = Adaptive([Named(), Named()], [good, other], [3]), []
        for _ in range(500):
            choices.append(adaptive.choose())
            adaptive.observe(choices[-1], [2])
        return [len(list(rounds)) for choice, rounds in itertools.groupby(choices) if choice.drafter == 1]

    assert len(looks(14)) >= 3 and max(looks(14)) <= 3 < TRIAL_PLACES / 3
    assert looks(45) == [1]  # the first trial; it could not win even if all were accepted


def test_a_drafter_that_pays_a_little_is_not_passed_over_for_plain_rounds():
    """The active one just does not pay any more, another one just does, by less than a change has to be worth."""
    dear, cheap = Costs(100, (1, 3), (110, 121), 22.8, 1), Costs(100, (1, 3), (110, 121), 21.3, 1)
    adaptive, choices = Adaptive([Named(), Named()], [dear, cheap], [0, 3]), []
    accepted = [0] * 32 + [1] * 16 + [2] * 8 + [3] * 8  # every place half the time: 1.875 tokens
    for _ in range(60):
        choices.append(adaptive.choose())
        adaptive.observe(choices[-1], accepted if choices[-1] != PLAIN else [0] * 64)
    assert dear.speedup(1.875, 3) < 1 < cheap.speedup(1.875, 3) < WORTH_A_CHANGE * dear.speedup(1.875, 3)
    assert choices[5:] == [Choice(1, 3)] * 55


def test_it_comes_back_when_the_text_becomes_easy():
    measured = costs(100, 15, (115, 160))
    choices, _ = simulate(Adaptive([Named()], [measured], GAMMAS), lambda n: [0.05 if n < 60 else 0.95], 300)
    assert choices[20:60].count(PLAIN) > 30
    assert all(choice.gamma >= 3 for choice in choices[-50:])


def test_what_was_seen_while_costs_were_measured_is_where_it_begins():
    """No trial: the best gamma of the best drafter, or a plain round, from the first round on."""

    def first_choice(*alphas: float) -> Choice:
        measured = [replace(costs(100, 15, (115, 160)), acceptance=AcceptanceRate(alpha, 400)) for alpha in alphas]
        return Adaptive([Named() for _ in alphas], measured, GAMMAS).choose()

    true = costs(100, 15, (115, 160))
    for alpha in (0.6, 0.9):
        best = max(GAMMAS[1:], key=lambda gamma: true.speedup(tokens_per_round(alpha, gamma), gamma))
        assert first_choice(alpha) == Choice(0, best)
    assert first_choice(0.1) == PLAIN
    assert first_choice(0.95, 0.5).drafter == 0
    dear, cheap = (
        replace(costs(100, draft_ms, (115, 160)), acceptance=AcceptanceRate(alpha, 400))
        for draft_ms, alpha in ((60, 0.95), (15, 0.85))
    )
    assert Adaptive([Named(), Named()], [dear, cheap], GAMMAS).choose().drafter == 1


@pytest.mark.parametrize("n_rows", [1, 2, 8])
@pytest.mark.parametrize("measured,true", [(0.05, 0.95), (0.15, 0.9), (0.4, 0.95), (0.95, 0.05), (0.9, 0.2)])
def test_what_was_measured_of_another_text_is_outweighed(measured, true, n_rows):
    """However much was measured: speculation is neither locked out nor held on to."""
    seen = replace(costs(100, 15, (115, 160)), acceptance=AcceptanceRate(measured, 1e6))
    adaptive = Adaptive([Named()], [seen], GAMMAS)
    choices, speedup = simulate(adaptive, lambda n: [true], 1200, n_rows=n_rows)
    late = choices[-200:]
    if true > 0.5:
        assert all(choice.gamma >= 2 for choice in late) and speedup > 2
    else:
        assert late.count(PLAIN) > 150 and speedup > 0.95


def test_what_cannot_pay_is_never_tried():
    """Even if every draft were accepted."""
    adaptive = Adaptive([Named()], [costs(100, 90, (300, 600))], GAMMAS)
    choices, _ = simulate(adaptive, lambda n: [1.0], 100)
    assert set(choices) == {PLAIN}


def test_the_best_of_several_budgets_is_found():
    """A large budget that is accepted more against a small one that costs less, without anything measured before."""
    large, small = costs(100, 40, (110, 150)), costs(100, 10, (110, 150))
    for alphas, wanted in (((0.9, 0.85), 1), ((0.95, 0.3), 0)):
        adaptive = Adaptive([Named(), Named()], [large, small], [3])
        choices, _ = simulate(adaptive, lambda n, alphas=alphas: alphas, 200)
        tried = [choice.drafter for choice in choices[:4]]
        assert tried[0] == 0 and 1 in tried
        assert {choice.drafter for choice in choices[-50:]} == {wanted}


def test_another_drafter_gets_a_second_look():
    """What was dismissed is accepted more now; what was best does as before, so nothing else tells of it."""
    large, small = costs(100, 20, (110, 150)), costs(100, 10, (110, 150))
    adaptive = Adaptive([Named(), Named()], [large, small], GAMMAS)
    choices, _ = simulate(adaptive, lambda n: (0.6, 0.58) if n < 100 else (0.95, 0.58), 600)
    assert {choice.drafter for choice in choices[50:100]} == {1}
    assert {choice.drafter for choice in choices[-60:]} == {0}


def test_a_drafter_without_hope_does_not_keep_the_others_from_coming_back():
    dear, cheap = costs(100, 95, (300, 600)), costs(100, 15, (115, 160))
    adaptive = Adaptive([Named(), Named()], [dear, cheap], GAMMAS)
    choices, _ = simulate(adaptive, lambda n: (1.0, 0.05) if n < 60 else (1.0, 0.95), 400)
    assert 0 not in {choice.drafter for choice in choices}
    assert choices[55] == PLAIN and choices[-1].drafter == 1


def test_expected_tokens_are_those_of_the_counts():
    """Places with much evidence go by their own rates, which fall along the block here; others by all together."""
    rates, rng, seen = [0.9, 0.6, 0.3], random.Random(3), Acceptance(6)
    for _ in range(400):
        accepted = []
        for _ in range(8):
            n = 0
            while n < 3 and rng.random() < rates[n]:
                n += 1
            accepted.append(n)
        seen.add(3, accepted)
    wanted = 1 + 0.9 + 0.9 * 0.6 + 0.9 * 0.6 * 0.3
    assert abs(seen.tokens(3) - wanted) < 0.15
    assert seen.tokens(1) < seen.tokens(3) < seen.tokens(6) < seen.tokens(3) + 1
    assert Acceptance(6).tokens(2) == pytest.approx(1 + 0.8 + 0.64)


def drafters_of(runner: ModelRunner) -> list:
    """One of each kind that can fall behind: two budgets, a model of its own, and the row's own text."""
    small, large = (StreamingKVCache(TINY, runner.max_batch, n, 2, dtype=torch.float64) for n in (10, 24))
    own = StreamingKVCache(TINY, runner.max_batch, 24, 2, dtype=torch.float64, rotate_on_read=True)
    return [
        SelfSpeculation(runner, large, gamma=4),
        SelfSpeculation(runner, small, gamma=4),
        StandaloneDraft(ModelRunner(tiny_model(seed=1), own), gamma=4),
        NGram(runner, gamma=4),
    ]


SCRIPT = [Choice(0, 3), PLAIN, PLAIN, PLAIN, Choice(2, 2), Choice(1, 4), Choice(3, 1), Choice(1, 0), Choice(2, 4)]
SCRIPT += [PLAIN, Choice(0, 1), Choice(2, 1), PLAIN, Choice(3, 4)]


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("captured", [False, True])
def test_changing_drafters_and_gammas_changes_no_token(mode, captured):
    """Ragged, refilled rows; what fell behind catches up. Captured, each choice has graphs of its own."""
    model, prompts = tiny_model(), random_prompts([40, 7, 23, 1, 31])
    graphs: list[RecordedGraph] = []

    new_graphs = partial(RecordedGraphs, recorded=graphs) if captured else None
    runner = ModelRunner(model, full_cache(model, 2), prefill_chunk=8, new_graphs=new_graphs)
    sampling = SamplingParams(0.0 if mode == "greedy" else 0.9, seed=5)
    drafters, limits = drafters_of(runner), [40, 9, 33, 30, 41]
    for _ in range(3):
        pacing = Scripted(drafters, SCRIPT)
        out = generate(runner, prompts, max_new_tokens=limits, pacing=pacing, sampling=sampling, verification=mode)
        assert out.tokens == [
            continue_by_recomputing(model, prompt, n, sampling, i)
            for i, (prompt, n) in enumerate(zip(prompts, limits, strict=True))
        ]
    assert {round_.choice for round_ in out.stats.rounds} == set(SCRIPT)
    # Four graphs of every choice, three of a plain step.
    assert len(graphs) == (4 * (len(set(SCRIPT)) - 1) + 3 if captured else 0)


def test_a_drafter_that_fell_behind_drafts_as_if_it_had_followed():
    """The target itself over a full cache is always right: also after rounds without it."""
    model, prompts = tiny_model(), random_prompts([30, 11])
    runner = ModelRunner(model, full_cache(model, 2))
    perfect = StandaloneDraft(ModelRunner(model, full_cache(model, 2)), gamma=3)
    shadow = SelfSpeculation(runner, full_cache(model, 2), gamma=3)
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

    ranks, model, prompts = Waiting(), tiny_model(), random_prompts([30, 11])
    runner = ModelRunner(model, full_cache(model, 2), ranks=ranks)
    own = StandaloneDraft(ModelRunner(tiny_model(seed=1), full_cache(model, 2), ranks=ranks), gamma=3)
    follow = own.follow

    def watched(*args: Any) -> None:
        if args[3] == 0:  # a prompt
            admitted.append(now[0])
        follow(*args)

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
    assert out.tokens == [continue_by_recomputing(model, prompt, 20) for prompt in prompts]


def test_changing_gamma_compiles_nothing():
    counter = CompileCounter()
    torch._dynamo.reset()
    model = tiny_model()
    use_pointwise(model, compiled(counter))
    runner = ModelRunner(model, full_cache(model, 3), prefill_chunk=8)
    drafter = SelfSpeculation(runner, StreamingKVCache(TINY, 3, 12, 2, dtype=torch.float64), gamma=6)
    generate(runner, random_prompts([9, 20, 33]), max_new_tokens=20, drafter=drafter)
    generate(runner, random_prompts([9, 20, 33]), max_new_tokens=5)
    warm = counter.frame_count
    choices = [Choice(0, gamma) for gamma in GAMMAS] + [PLAIN]
    out = generate(runner, random_prompts([17, 40, 3]), max_new_tokens=60, pacing=InTurn([drafter], choices, 3, 2))
    assert {round_.choice for round_ in out.stats.rounds} == set(choices)
    assert warm > 0 and counter.frame_count == warm
    torch._dynamo.reset()


def test_costs_cannot_be_measured_where_no_round_is_full():
    """A row whose logits are not finite, too few prompts, nothing to decode: said, and no endless loop."""
    model, prompts = tiny_model(), random_prompts([30, 30])
    runner = ModelRunner(model, full_cache(model, 2))
    drafters = drafters_of(runner)[:1]
    for given, n in ((prompts[:1], 9), (prompts, 1)):
        with pytest.raises(ConfigError, match="no round has all rows"):
            measure_costs(runner, drafters, given, gammas=[1, 2], max_new_tokens=n)
    model.tok_embeddings.weight[prompts[1][3]] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        measure_costs(runner, drafters, prompts, gammas=[1, 2], max_new_tokens=9)


def test_a_pacing_can_end_the_decode():
    """Rows keep what they have, a prompt that waited has nothing, and the next decode is none the wiser."""
    model, prompts = tiny_model(), random_prompts([30, 11, 20])
    runner = ModelRunner(model, full_cache(model, 2))
    (drafter, *_) = drafters_of(runner)
    pacing = InTurn([drafter], [Choice(0, 2), PLAIN], 2, 3)
    out = generate(runner, prompts, max_new_tokens=60, pacing=pacing)
    assert pacing.done and [round_.choice for round_ in out.stats.rounds] == [Choice(0, 2), PLAIN] * 3
    assert out.finish_reasons == [None] * 3 and out.tokens[2] == []
    for prompt, tokens in zip(prompts[:2], out.tokens, strict=False):
        assert 7 <= len(tokens) <= 13 and tokens == continue_by_recomputing(model, prompt, len(tokens))
    again = generate(runner, prompts, max_new_tokens=10, drafter=drafter)
    assert again.tokens == [continue_by_recomputing(model, prompt, 10) for prompt in prompts]


def test_a_row_that_ends_early_does_not_prolong_the_measurement(monkeypatch: pytest.MonkeyPatch):
    """One row accepts everything, the other one nothing: rounds of the slow row alone measure nothing."""
    model, prompts = tiny_model(), random_prompts([30, 11])
    runner = ModelRunner(model, full_cache(model, 2))
    quick, slow = (continue_by_recomputing(model, prompt, 30) for prompt in prompts)
    drafter = SavedText(runner, {0: quick, 1: [(token + 1) % TINY.vocab_size for token in slow]}, gamma=4)
    decodes: list[GenerateOutput] = []

    def kept(*args: Any, **kwargs: Any) -> GenerateOutput:
        decodes.append(generate(*args, **kwargs))
        return decodes[-1]

    monkeypatch.setattr("engine.cost_model.measure.generate", kept)
    (measured,) = measure_costs(runner, [drafter], prompts, gammas=[2, 4], max_new_tokens=20, seconds=0.0)
    rounds = [[round_.busy for round_ in output.stats.rounds] for output in decodes]
    assert len(rounds) > 1 and all(busy.count(1) <= 1 for busy in rounds)
    assert sum(busy.count(2) for busy in rounds) == 3 * (1 + FEWEST_TIMED)
    # Also where the slow row ends right behind the quick one.
    decodes.clear()
    measure_costs(runner, [drafter], prompts, gammas=[2, 4], max_new_tokens=4, seconds=0.0)
    assert all(output.stats.rounds for output in decodes)
    # Of the quick row all places of a block, of the slow one the first: 2 of 3 with gamma 2, 4 of 5 with 4.
    assert measured.acceptance is not None and measured.acceptance.value == pytest.approx((2 + 4) / (3 + 5))


def test_a_pacing_cannot_ask_for_more_than_its_drafter_has():
    model, prompts = tiny_model(), random_prompts([30, 11])
    runner = ModelRunner(model, full_cache(model, 2))
    (drafter, *_) = drafters_of(runner)
    with pytest.raises(ConfigError, match="more than its drafter can"):
        generate(runner, prompts, max_new_tokens=9, pacing=Scripted([drafter], [Choice(0, 5)]))
    with pytest.raises(ConfigError, match="brings its own drafters"):
        generate(runner, prompts, max_new_tokens=9, pacing=Scripted([drafter], [PLAIN]), drafter=drafter)


@pytest.mark.parametrize("max_new_tokens", [2, 40])
def test_costs_are_measured_for_every_choice(max_new_tokens):
    """Also where rows end after a round or two; and the rows decode as before afterwards."""
    model, prompts = tiny_model(), random_prompts([30, 30])
    runner = ModelRunner(model, full_cache(model, 2))
    drafters = drafters_of(runner)[:2]
    measured = measure_costs(runner, drafters, prompts, gammas=[1, 2, 4], max_new_tokens=max_new_tokens)
    assert [one.at for one in measured] == [(1, 2, 4)] * 2
    assert all(min(one.plain_ms, one.draft_ms, *one.verify_ms) > 0 for one in measured)
    assert measured[0].verify_ms == measured[1].verify_ms and measured[0].plain_ms == measured[1].plain_ms
    seen = [one.acceptance for one in measured]
    assert all(one is not None and one.n and 0 <= one.value <= 1 for one in seen)
    out = generate(runner, prompts, max_new_tokens=10, drafter=drafters[0])
    assert out.tokens == [continue_by_recomputing(model, prompt, 10) for prompt in prompts]


def test_the_acceptance_that_is_seen_meanwhile_is_the_drafters_own():
    """A draft that is the target accepts all; one from another seed next to nothing."""
    model, prompts = tiny_model(), random_prompts([30, 30])
    runner = ModelRunner(model, full_cache(model, 2))
    own = SelfSpeculation(runner, full_cache(model, 2), gamma=3)
    other = tiny_model(seed=5)
    foreign = StandaloneDraft(ModelRunner(other, full_cache(other, 2)), gamma=3)
    measured = measure_costs(runner, [own, foreign], prompts, gammas=[1, 3], max_new_tokens=20)
    assert measured[0].acceptance is not None and measured[0].acceptance.value == 1
    assert measured[1].acceptance is not None and measured[1].acceptance.value < 0.5


def test_a_draft_step_is_that_of_all_gammas_that_were_measured():
    """Of three rounds each, the one that something else held up counts for nothing."""

    def times(draft: float, verify: float) -> list[dict[str, float]]:
        usual = {"draft": draft / 1e3, "verify": verify / 1e3, "other": 0.002}
        return [usual, dict.fromkeys(usual, 1.0), usual]

    timed = {PLAIN: times(0, 40), Choice(0, 1): times(11, 50), Choice(0, 3): times(29, 70), Choice(1, 3): times(12, 90)}
    rates = [AcceptanceRate(0.9, 20), AcceptanceRate(0.8, 20)]
    first, second = costs_of_rounds(timed, [1, 3], rates)
    assert (first.plain_ms, first.other_ms, first.draft_ms) == pytest.approx((42, 2, (11 + 29) / (1 + 3)))
    assert first.verify_ms == second.verify_ms == pytest.approx((50, 70)) and second.draft_ms == pytest.approx(12 / 3)
    assert [first.acceptance, second.acceptance] == rates


def test_values_that_grow_are_pooled():
    values, weights = [0.9, 0.7, 0.8, 0.5, 1.0, 0.1], [300, 30, 10, 20, 20, 5]
    # 0.5 and 1.0 have 0.75, which is more than the 0.725 of 0.7 and 0.8.
    assert non_increasing(values, weights) == pytest.approx([0.9, *[(21 + 8 + 10 + 20) / 80] * 4, 0.1])
    assert non_increasing([], []) == []


def test_a_few_rejected_blocks_are_no_reason_for_a_smaller_budget():
    """What was measured is alike, and a draft step too; then one row has rounds that go badly."""
    seen = AcceptanceRate(0.85, 60)
    both = [replace(costs(100, draft_ms, (115, 160)), acceptance=seen) for draft_ms in (15, 14.5)]
    adaptive, drafted = Adaptive([Named(), Named()], both, GAMMAS), []
    for n_accepted in (3, 0, 0, 2, 0, 1, 3, 3):
        choice = adaptive.choose()
        drafted.append(choice.drafter)
        adaptive.observe(choice, [min(n_accepted, choice.gamma)])
    assert set(drafted) == {0}


@pytest.mark.parametrize("n_rows", [1, 8])
@pytest.mark.parametrize("n_drafters", [1, 2, 5])
def test_what_idle_drafters_showed_does_not_keep_losing_speculation_alive(n_drafters, n_rows):
    """All were accepted while costs were measured, and none is now: the one that drafts is judged by its own rounds,
    and the smaller ones, of which no more is expected, do not draft one after another to learn the same.
    """
    seen = AcceptanceRate(0.95, 60)
    each = [replace(costs(100, 15 - index / 10, (115, 160)), acceptance=seen) for index in range(n_drafters)]
    adaptive = Adaptive([Named()] * n_drafters, each, GAMMAS)
    choices, _ = simulate(adaptive, lambda n: [0.05] * n_drafters, 40, n_rows)
    assert choices.index(PLAIN) < (30 if n_rows == 1 else 8)
    assert {choice.drafter for choice in choices[: choices.index(PLAIN)]} == {0}


def test_of_budgets_that_share_a_promise_the_one_that_paid_drafts():
    """The two smaller ones cost the same, and much less; the first of them would not pay by what it showed itself."""
    measured = [AcceptanceRate(0.8, 60), AcceptanceRate(0.2, 60), AcceptanceRate(1.0, 60)]
    each = [
        replace(costs(100, draft_ms, (115, 160)), acceptance=seen)
        for draft_ms, seen in zip((60, 15, 15), measured, strict=True)
    ]
    choice = Adaptive([Named()] * 3, each, GAMMAS).choose()
    assert choice.drafter == 2


def test_speculation_that_does_not_pay_keeps_its_budget():
    """None of them pays: the one that drafted is the one that another has to beat later on, too."""
    both = [replace(costs(100, ms, (300, 600)), acceptance=AcceptanceRate(0.5, 60)) for ms in (20, 10)]
    adaptive = Adaptive([Named(), Named()], both, GAMMAS)
    choices, _ = simulate(adaptive, lambda n: (0.5, 0.5), 20)
    assert set(choices) == {PLAIN} and adaptive._active == 0


@pytest.mark.parametrize("seen_small,wanted", [((1.0, 6), 0), ((0.89, 300), 1)])
def test_a_lucky_budget_is_not_preferred_for_its_luck(seen_small, wanted):
    """All of 6 places were accepted, against 0.9 of 300 with a larger budget, and drafts cost hardly less."""
    large = replace(costs(100, 15, (115, 160)), acceptance=AcceptanceRate(0.9, 300))
    draft_ms = 14.8 if wanted == 0 else 10
    small = replace(costs(100, draft_ms, (115, 160)), acceptance=AcceptanceRate(*seen_small))
    assert Adaptive([Named(), Named()], [large, small], GAMMAS).choose().drafter == wanted


def test_a_draft_step_takes_no_longer_than_with_a_larger_budget():
    """Those that seem to have a mean; of the first drafter more was measured."""

    def times(draft_ms: float) -> list[dict[str, float]]:
        return [{"draft": draft_ms / 1e3, "verify": 0.05, "other": 0.001}]

    timed = {PLAIN: times(0), Choice(0, 1): times(10), Choice(0, 3): times(30)}
    timed |= {Choice(index, 2): times(2 * ms) for index, ms in enumerate((12, 6, 9, 5), start=1)}
    found = costs_of_rounds(timed, [1, 3], [AcceptanceRate(0.8, 20)] * 5)
    first = (10 * 4 + 12 * 2) / 6
    assert [one.draft_ms for one in found] == pytest.approx([first, first, 7.5, 7.5, 5])


@pytest.mark.parametrize("seconds,passes", [(1.0, 1), (1.5, 1), (1e6, 2)])
def test_a_draft_models_runs_of_the_prompts_count_as_measuring(monkeypatch: pytest.MonkeyPatch, seconds, passes):
    """They are in no round, 0.8 s in every decode: there is time for another one or there is not."""
    model, prompts = tiny_model(), random_prompts([30, 30])
    runner = ModelRunner(model, full_cache(model, 2))
    own = StandaloneDraft(ModelRunner(tiny_model(seed=1), full_cache(model, 2)), gamma=3)
    follow, n_rounds = own.follow, []

    def slow(*args: Any) -> None:
        time.sleep(0.4 if args[3] == 0 else 0)
        follow(*args)

    def counted(*args: Any, **kwargs: Any) -> GenerateOutput:
        out = generate(*args, **kwargs)
        n_rounds.append(len(out.stats.rounds))
        return out

    own.follow = slow  # type: ignore[method-assign]
    monkeypatch.setattr("engine.cost_model.measure.generate", counted)
    measure_costs(runner, [own], prompts, gammas=[1, 3], max_new_tokens=90, seconds=seconds)
    most = [3 * (1 + FEWEST_TIMED), 3 * (MOST_TIMED - FEWEST_TIMED)]
    assert n_rounds[:1] == most[:1] and sum(n_rounds) == sum(most[:passes])


def test_costs_take_more_rounds_where_time_allows(monkeypatch: pytest.MonkeyPatch):
    """Of each kind at least the fewest and at most the most, however long or short a round is."""
    n_rounds: list[int] = []
    model, prompts = tiny_model(), random_prompts([30, 30])
    runner = ModelRunner(model, full_cache(model, 2))
    drafters = drafters_of(runner)[:1]

    def counted(*args: Any, **kwargs: Any) -> GenerateOutput:
        out = generate(*args, **kwargs)
        n_rounds.append(len(out.stats.rounds))
        return out

    monkeypatch.setattr("engine.cost_model.measure.generate", counted)
    n_fewest, n_most = 3 * (1 + FEWEST_TIMED), 3 * (1 + MOST_TIMED)  # plain, gamma 1, gamma 3
    for max_new_tokens, seconds, n_wanted in ((2, 0.0, n_fewest), (2, 1e6, n_most), (90, 0.0, n_fewest)):
        n_rounds.clear()
        measure_costs(runner, drafters, prompts, gammas=[1, 3], max_new_tokens=max_new_tokens, seconds=seconds)
        # With two tokens a row, one round a decode; with many, all in one, which ends when all were measured.
        assert sum(n_rounds) == n_wanted and len(n_rounds) == (n_wanted if max_new_tokens == 2 else 1)
