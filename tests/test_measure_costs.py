"""What rounds cost and accept, measured before they are chosen by it."""

import time
from typing import Any

import pytest
from tiny import TINY, full_cache, random_prompts, recomputed, tiny_model

from common.errors import ConfigError, UserError
from engine import ModelRunner, SavedText, SelfSpeculation, StandaloneDraft, generate
from engine.acceptance import AcceptanceRate
from engine.cost_model.measure import FEWEST_TIMED, MOST_TIMED, costs_of_rounds, measure_costs
from engine.decoding import GenerateOutput
from engine.pacing import PLAIN, Choice


@pytest.fixture
def runner() -> ModelRunner:
    model = tiny_model()
    return ModelRunner(model, full_cache(model, 2))


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[GenerateOutput]:
    """What every decode of a measurement did."""
    outputs: list[GenerateOutput] = []

    def kept(*args: Any, **kwargs: Any) -> GenerateOutput:
        outputs.append(generate(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr("engine.cost_model.measure.generate", kept)
    return outputs


@pytest.mark.parametrize("max_new_tokens", [2, 40])
def test_costs_and_acceptance_are_those_of_each_drafter(runner, max_new_tokens):
    """The target itself accepts all, another seed's model next to nothing; and rows decode as before afterwards."""
    prompts, other = random_prompts([30, 30]), tiny_model(seed=5)
    own = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=4)
    foreign = StandaloneDraft(ModelRunner(other, full_cache(other, 2)), gamma=4)
    both = measure_costs(runner, [own, foreign], prompts, gammas=[1, 2, 4], max_new_tokens=max_new_tokens)
    assert [one.at for one in both] == [(1, 2, 4)] * 2
    assert all(min(one.plain_ms, one.draft_ms, *one.verify_ms) > 0 for one in both)
    assert both[0].verify_ms == both[1].verify_ms and both[0].plain_ms == both[1].plain_ms
    seen = [one.acceptance for one in both]
    assert all(one and one.n for one in seen) and seen[0].value == 1 and seen[1].value < 0.5
    out = generate(runner, prompts, max_new_tokens=10, drafter=own)
    assert out.tokens == recomputed(runner.model, prompts, 10)


def test_costs_cannot_be_measured_where_no_round_is_full(runner):
    """A row whose logits are not finite, no prompts, nothing to decode: said, and no endless loop."""
    prompts = random_prompts([30, 30])
    drafters = [SelfSpeculation(runner, full_cache(runner.model, 2), gamma=4)]
    for given, n in ((prompts[:0], 9), (prompts, 1)):
        with pytest.raises(ConfigError, match="no round has all rows"):
            measure_costs(runner, drafters, given, gammas=[1, 2], max_new_tokens=n)
    runner.model.tok_embeddings.weight[prompts[1][3]] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        measure_costs(runner, drafters, prompts, gammas=[1, 2], max_new_tokens=9)


def test_a_row_that_ends_early_does_not_prolong_the_measurement(runner, decodes):
    """One row accepts everything, the other one nothing: rounds of the slow row alone measure nothing."""
    prompts = random_prompts([30, 11])
    quick, slow = recomputed(runner.model, prompts, 30)
    drafter = SavedText(runner, {0: quick, 1: [(token + 1) % TINY.vocab_size for token in slow]}, gamma=4)
    (measured,) = measure_costs(runner, [drafter], prompts, gammas=[2, 4], max_new_tokens=20, seconds=0.0)
    rounds = [[round_.busy for round_ in output.stats.rounds] for output in decodes]
    assert len(rounds) > 1 and all(busy.count(1) <= 1 for busy in rounds)
    assert sum(busy.count(2) for busy in rounds) == 3 * (1 + FEWEST_TIMED)
    # Also where the slow row ends right behind the quick one.
    decodes.clear()
    measure_costs(runner, [drafter], prompts, gammas=[2, 4], max_new_tokens=4, seconds=0.0)
    assert all(output.stats.rounds for output in decodes)
    # Of the quick row all positions of a block, of the slow one the first: 2 of 3 with gamma 2, 4 of 5 with 4.
    assert measured.acceptance is not None and measured.acceptance.value == pytest.approx((2 + 4) / (3 + 5))


def timed(draft: float, verify: float = 50) -> list[dict[str, float]]:
    """Three rounds, ms; the one that something else held up counts for nothing."""
    usual = {"draft": draft / 1e3, "verify": verify / 1e3, "other": 0.002}
    return [usual, dict.fromkeys(usual, 1.0), usual]


def test_a_draft_step_is_that_of_all_gammas_that_were_measured():
    rounds = {PLAIN: timed(0, 40), Choice(0, 1): timed(11), Choice(0, 3): timed(29, 70), Choice(1, 3): timed(12, 90)}
    rates = [AcceptanceRate(0.9, 20), AcceptanceRate(0.8, 20)]
    first, second = costs_of_rounds(rounds, [1, 3], rates)
    assert (first.plain_ms, first.other_ms, first.draft_ms) == pytest.approx((42, 2, (11 + 29) / (1 + 3)))
    assert first.verify_ms == second.verify_ms == pytest.approx((50, 70)) and second.draft_ms == pytest.approx(12 / 3)
    assert [first.acceptance, second.acceptance] == rates


def test_a_draft_step_takes_no_longer_than_with_a_larger_budget():
    """Those that seem to have a mean; of the first drafter more was measured."""
    rounds = {PLAIN: timed(0), Choice(0, 1): timed(10), Choice(0, 3): timed(30)}
    rounds |= {Choice(index, 2): timed(2 * ms) for index, ms in enumerate((12, 6, 9, 5), start=1)}
    found = costs_of_rounds(rounds, [1, 3], [AcceptanceRate(0.8, 20)] * 5)
    first = (10 * 4 + 12 * 2) / 6
    assert [one.draft_ms for one in found] == pytest.approx([first, first, 7.5, 7.5, 5])


@pytest.mark.parametrize("max_new_tokens,seconds,n_timed", [(2, 0.0, FEWEST_TIMED), (2, 1e6, MOST_TIMED), (90, 0.0, 4)])
def test_costs_take_more_rounds_where_time_allows(runner, decodes, max_new_tokens, seconds, n_timed):
    """Of each kind at least the fewest and at most the most, however long or short a round is."""
    drafter, flags = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=4), {"gammas": [1, 3]}
    prompts = random_prompts([30, 30])
    measure_costs(runner, [drafter], prompts, max_new_tokens=max_new_tokens, seconds=seconds, **flags)
    # With two tokens a row, one round a decode; with many, all in one, which ends when all were measured.
    n_rounds = [len(output.stats.rounds) for output in decodes]
    assert sum(n_rounds) == 3 * (1 + n_timed) and len(n_rounds) == (sum(n_rounds) if max_new_tokens == 2 else 1)


@pytest.mark.parametrize("seconds,n_decodes", [(1.0, 1), (1.5, 1), (1e6, 2)])
def test_a_draft_models_runs_of_the_prompts_count_as_measuring(runner, decodes, seconds, n_decodes):
    """They are in no round, 0.8 s in every decode: there is time for another one or there is not."""
    own = StandaloneDraft(ModelRunner(tiny_model(seed=1), full_cache(runner.model, 2)), gamma=3)
    follow = own.follow

    def slow(*args: Any) -> None:
        time.sleep(0.4)
        follow(*args)

    own.follow = slow  # type: ignore[method-assign]
    measure_costs(runner, [own], random_prompts([30, 30]), gammas=[1, 3], max_new_tokens=90, seconds=seconds)
    most = [3 * (1 + FEWEST_TIMED), 3 * (MOST_TIMED - FEWEST_TIMED)]
    n_rounds = [len(output.stats.rounds) for output in decodes]
    assert n_rounds[:1] == most[:1] and sum(n_rounds) == sum(most[:n_decodes])
