"""Costs and acceptance of rounds are measured before rounds are chosen by them."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench.auto import measure
from bench.auto.costs import Costs
from common.errors import UserError
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, generate
from engine.controller import PLAIN
from engine.controller import RoundChoice as Choice
from engine.decoding import Decoder
from engine.drafters.oracle import Oracle
from engine.stats import AcceptanceRate, RoundStats
from models.llama import Transformer
from tests.support.controllers import Clock
from tests.support.tiny import TINY, full_cache, random_prompts, recomputed, tiny_model, tiny_runner

Decode = list[RoundStats]


@pytest.fixture
def runner() -> ModelRunner:
    return tiny_runner(2)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[Decode]:
    """The rounds of every decode of a measurement."""
    every: list[Decode] = []

    def watched(*args: Any, **kwargs: Any) -> Decoder:
        decoder, decode = Decoder(*args, **kwargs), Decode()
        step = decoder.step
        decoder.step = lambda: decode.append(step()) or decode[-1]
        every.append(decode)
        return decoder

    monkeypatch.setattr("engine.generation.Decoder", watched)
    return every


@pytest.mark.parametrize("max_new_tokens", [2, 40])
def test_costs_and_acceptance_are_those_of_each_drafter(runner, max_new_tokens):
    """The target itself accepts all, another seed's model next to nothing; and rows decode as before afterwards."""
    prompts, other = random_prompts([30, 30]), tiny_model(seed=5)
    own = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=4)
    foreign = StandaloneDraft(ModelRunner(other, full_cache(other, 2)), gamma=4)
    rounds = measure.CostProfiler(runner, [own, foreign], prompts, gamma=4, max_new_tokens=max_new_tokens)
    both = measure.measure_costs(rounds, [1, 2, 4])[2]
    assert [one.at for one in both] == [(1, 2, 4)] * 2
    assert all(min(one.plain_ms, one.draft_ms, *one.verify_ms) > 0 for one in both)
    assert both[0].verify_ms != both[1].verify_ms and both[0].plain_ms == both[1].plain_ms
    seen = [one.acceptance for one in both]
    assert all(one and one.n for one in seen) and seen[0].value == 1 and seen[1].value < 0.5
    out = generate(runner, prompts, max_new_tokens=10, drafter=own)
    assert out.tokens == recomputed(runner.model, prompts, 10)


def test_costs_cannot_be_measured_where_no_round_is_full(runner):
    """Where a row's logits are not finite: said, and no endless loop."""
    prompts = random_prompts([30, 30])
    drafters = [SelfSpeculation(runner, full_cache(runner.model, 2), gamma=4)]
    runner.model.tok_embeddings.weight[prompts[1][3]] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        measure.measure_costs(measure.CostProfiler(runner, drafters, prompts, gamma=2, max_new_tokens=9), [1, 2])


def test_a_row_that_ends_early_does_not_prolong_the_measurement(runner, decodes):
    """A row accepts everything, another nothing: rounds of the slow row alone measure nothing."""
    prompts = random_prompts([30, 11])
    quick, slow = recomputed(runner.model, prompts, 30)
    drafter = Oracle(runner, {0: quick, 1: [(token + 1) % TINY.vocab_size for token in slow]}, gamma=4)
    rounds = measure.CostProfiler(runner, [drafter], prompts, gamma=4, max_new_tokens=20)
    ((measured,),) = measure.measure_costs(rounds, [2, 4], n_steps=0).values()
    assert len(decodes) > 1 and all(round_.busy == 2 for decode in decodes for round_ in decode)
    assert sum(map(len, decodes)) == 3 * (1 + measure.FEWEST_TIMED)
    # Of the quick row all positions of a block, of the slow one the first: 2 of 3 with gamma 2, 4 of 5 with 4.
    assert measured.acceptance is not None and measured.acceptance.value == pytest.approx((2 + 4) / (3 + 5))


def timed(draft: float, verify: float = 50) -> list[dict[str, float]]:
    """Three rounds, ms; the one that something else held up counts for nothing."""
    usual = {"resume": 0.001, "draft": draft / 1e3, "verify": verify / 1e3, "other": 0.002}
    return [usual, dict.fromkeys(usual, 1.0), usual]


def rehearsed(timed: dict[Choice, Any], rates: list[Any], refresh: list[int], sizes: list[int]) -> Any:
    """A profiler of drafters that take 9 ms to choose entries anew, every so many rounds, and have so many entries."""
    pairs = zip(refresh, sizes, strict=True)
    caches = [(n, SimpleNamespace(capacity=size)) for n, size in pairs]
    drafters = [SimpleNamespace(refresh_every=n, skips_model=None, cache=cache, parts=()) for n, cache in caches]
    seen = [[0.009] if n else [] for n in refresh]
    return SimpleNamespace(timed=timed, acceptance=rates, drafters=drafters, refreshes=seen)


def test_a_draft_step_is_that_of_all_gammas_that_were_measured():
    rounds = {PLAIN: timed(0, 40), Choice(0, 1): timed(10), Choice(0, 3): timed(32, 70), Choice(1, 3): timed(12, 90)}
    rates = [AcceptanceRate(0.9, 20), AcceptanceRate(0.8, 20)]
    first, second = measure.costs_of_rounds(rehearsed(rounds, rates, [0, 0], [40, 20]), 0)
    assert (first.plain_ms, first.other_ms, first.draft_ms) == pytest.approx((42, 2, (10 + 32) / (1 + 3)))
    assert first.verify_ms == second.verify_ms == pytest.approx((50, 70)) and second.draft_ms == pytest.approx(12 / 3)
    assert [first.acceptance, second.acceptance] == rates
    # A head that drafts in one forward costs nearly the same at every gamma.
    rounds = {PLAIN: timed(0, 40), Choice(0, 1): timed(14), Choice(0, 3): timed(18, 70), Choice(1, 3): timed(5, 70)}
    first, second = measure.costs_of_rounds(rehearsed(rounds, [None] * 2, [0, 0], [40, 20]), 0)
    assert (first.draft_ms, first.fixed_ms, second.draft_ms) == pytest.approx((2, 12, 0))
    assert [first.round_ms(gamma) for gamma in (1, 2, 3)] == pytest.approx([66, 78, 90])


def test_choosing_entries_anew_costs_every_round_its_share():
    rounds = {PLAIN: timed(0), Choice(0, 3): timed(30), Choice(1, 3): timed(30)}
    first, second = measure.costs_of_rounds(rehearsed(rounds, [None] * 2, [0, 3], [40, 40]), 0)
    assert second.round_ms(3) - first.round_ms(3) == pytest.approx(3)


GAMMAS = [*range(1, 7)]


def measured() -> dict[int, Sequence[Costs]]:
    """A measurement for a long decode, by two drafters of four rows."""
    runner = tiny_runner(4)
    drafters = [SelfSpeculation(runner, full_cache(runner.model, 4), gamma=6) for _ in range(2)]
    rounds = measure.CostProfiler(runner, drafters, random_prompts([30, 11, 20, 25]), gamma=6, max_new_tokens=30)
    return measure.measure_costs(rounds, GAMMAS)


FIRST = [PLAIN, Choice(0, 1), Choice(0, 3), Choice(0, 6), Choice(1, 3)]


def test_a_long_decode_is_measured_for_with_few_rows_too(decodes):
    found = measured()
    assert [*found] == [4, 2] and all(costs.at == (1, 3, 6) for each in found.values() for costs in each)
    n_of = Counter((round_.busy, round_.choice) for decode in decodes for round_ in decode)
    few, most = 1 + measure.FEWEST_TIMED, 1 + measure.MOST_TIMED
    assert {one for n_rows, one in n_of if n_rows == 4} == {*FIRST}
    assert all(n_of[2, one] == few and n_of[4, one] <= most for one in FIRST)


@pytest.mark.parametrize("seconds", [0.02, 0.4, 6.0])
def test_measuring_ends_in_time_however_slow_the_machine_is(seconds, decodes, monkeypatch):
    """Each forward takes so many seconds. No round begins too late, but for those without which there are no costs."""
    clock, forward = Clock(), Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda *given, **more: clock.wait(seconds) or forward(*given, **more))
    for module in ("engine.timing", "engine.decoding", "bench.auto.measure"):
        monkeypatch.setattr(f"{module}.time", clock)
    began = clock.perf_counter()
    found = measured()
    rounds, took = sum(map(len, decodes)), clock.perf_counter() - began
    assert took <= len(found) * measure.MEASURING_SECONDS + seconds + 0.1 or rounds == len(FIRST)
    assert all(cost.plain_ms >= 900 * seconds for each in found.values() for cost in each)
    assert len(found) == (1 if seconds > 1 else 2)
