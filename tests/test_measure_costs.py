"""What rounds cost and accept, measured before they are chosen by it."""

import math
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pacings import Clock
from tiny import TINY, full_cache, random_prompts, recomputed, tiny_model, tiny_runner

from bench.auto import rehearsal
from bench.auto.costs import Costs
from bench.auto.measure import (
    FEWEST_TIMED,
    MOST_SHARE,
    MOST_TIMED,
    Scope,
    costs_of_rounds,
    measure_costs,
    measure_for_decode,
    scope,
)
from bench.auto.rehearsal import Rehearsal
from common.errors import UserError
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, generate
from engine.counts import AcceptanceRate
from engine.decoding import Decoder
from engine.drafters import RowUpdate
from engine.drafters.saved_text import SavedText
from engine.pacing import PLAIN, Choice
from engine.stats import RoundStats
from kv_cache.verify_topk import VerifyTopK, VerifyTopKCache

Decode = list[RoundStats]


@pytest.fixture
def runner() -> ModelRunner:
    return tiny_runner(2)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[Decode]:
    """The rounds of every decode of a measurement."""
    every: list[Decode] = []

    class Watched(Decoder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            every.append([])

        def step(self) -> RoundStats | None:
            round_ = super().step()
            assert round_ is not None
            every[-1].append(round_)
            return round_

    monkeypatch.setattr(rehearsal, "Decoder", Watched)
    return every


@pytest.mark.parametrize("max_new_tokens", [2, 40])
def test_costs_and_acceptance_are_those_of_each_drafter(runner, max_new_tokens):
    """The target itself accepts all, another seed's model next to nothing; and rows decode as before afterwards."""
    prompts, other = random_prompts([30, 30]), tiny_model(seed=5)
    own = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=4)
    foreign = StandaloneDraft(ModelRunner(other, full_cache(other, 2)), gamma=4)
    rounds = Rehearsal(runner, [own, foreign], prompts, gamma=4, max_new_tokens=max_new_tokens)
    both = measure_costs(rounds, [1, 2, 4])
    assert [one.at for one in both] == [(1, 2, 4)] * 2
    assert all(min(one.plain_ms, one.draft_ms, *one.verify_ms) > 0 for one in both)
    assert both[0].verify_ms == both[1].verify_ms and both[0].plain_ms == both[1].plain_ms
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
        measure_costs(Rehearsal(runner, drafters, prompts, gamma=2, max_new_tokens=9), [1, 2])


def test_a_row_that_ends_early_does_not_prolong_the_measurement(runner, decodes):
    """One row accepts everything, the other one nothing: rounds of the slow row alone measure nothing."""
    prompts = random_prompts([30, 11])
    quick, slow = recomputed(runner.model, prompts, 30)
    drafter = SavedText(runner, {0: quick, 1: [(token + 1) % TINY.vocab_size for token in slow]}, gamma=4)
    rounds = Rehearsal(runner, [drafter], prompts, gamma=4, max_new_tokens=20)
    (measured,) = measure_costs(rounds, [2, 4], seconds=0.0)
    assert len(decodes) > 1 and all(round_.busy == 2 for decode in decodes for round_ in decode)
    assert sum(map(len, decodes)) == 3 * (1 + FEWEST_TIMED)
    # Of the quick row all positions of a block, of the slow one the first: 2 of 3 with gamma 2, 4 of 5 with 4.
    assert measured.acceptance is not None and measured.acceptance.value == pytest.approx((2 + 4) / (3 + 5))


def test_what_follows_with_fewer_rows_is_of_those_alone(runner, decodes):
    """The first row goes on where it was, and what both showed is forgotten."""
    prompts = random_prompts([30, 11])
    first, second = recomputed(runner.model, prompts, 30)
    drafter = SavedText(runner, {5: first, 6: [(token + 1) % TINY.vocab_size for token in second]}, gamma=2)
    rounds = Rehearsal(runner, [drafter], prompts, gamma=2, max_new_tokens=30, numbered_from=5)
    rounds.run([PLAIN, Choice(0, 2)], 2)
    assert rounds.acceptance == [AcceptanceRate(4 / 6, 6)]
    rounds.keep(1)
    assert rounds.acceptance == [None] and not rounds.timed
    rounds.run([Choice(0, 1)], 3)
    assert [round_.busy for round_ in decodes[0]] == [2] * 4 + [1] * 3 and len(decodes) == 1
    assert [*rounds.timed] == [Choice(0, 1)] and rounds.acceptance == [AcceptanceRate(1.0, 3)]


def timed(draft: float, verify: float = 50) -> list[dict[str, float]]:
    """Three rounds, ms; the one that something else held up counts for nothing."""
    usual = {"draft": draft / 1e3, "verify": verify / 1e3, "other": 0.002}
    return [usual, dict.fromkeys(usual, 1.0), usual]


def rehearsed(timed: dict[Choice, Any], rates: list[Any], refresh: list[int], sizes: list[int]) -> Any:
    """A rehearsal of drafters that take 9 ms to choose entries anew, every so many rounds, and have so many entries."""
    pairs = zip(refresh, sizes, strict=True)
    drafters = [SimpleNamespace(refresh_every=n, cache=SimpleNamespace(capacity=size)) for n, size in pairs]
    seen = [[0.009] if n else [] for n in refresh]
    return SimpleNamespace(timed=timed, acceptance=rates, drafters=drafters, refreshes=seen)


def test_a_draft_step_is_that_of_all_gammas_that_were_measured():
    rounds = {PLAIN: timed(0, 40), Choice(0, 1): timed(11), Choice(0, 3): timed(29, 70), Choice(1, 3): timed(12, 90)}
    rates = [AcceptanceRate(0.9, 20), AcceptanceRate(0.8, 20)]
    first, second = costs_of_rounds(rehearsed(rounds, rates, [0, 0], [40, 20]), [1, 3], 0)
    assert (first.plain_ms, first.other_ms, first.draft_ms) == pytest.approx((42, 2, (11 + 29) / (1 + 3)))
    assert first.verify_ms == second.verify_ms == pytest.approx((50, 70)) and second.draft_ms == pytest.approx(12 / 3)
    assert [first.acceptance, second.acceptance] == rates


def test_choosing_entries_anew_costs_every_round_its_share():
    rounds = {PLAIN: timed(0), Choice(0, 3): timed(30), Choice(1, 3): timed(30)}
    first, second = costs_of_rounds(rehearsed(rounds, [None] * 2, [0, 3], [40, 40]), [3], 0)
    assert second.round_ms(3) - first.round_ms(3) == pytest.approx(3)
    assert second.slower(2).round_ms(3) == pytest.approx(2 * second.round_ms(3))


@pytest.mark.parametrize("refresh", [2, 4, 7])
def test_choosing_entries_anew_is_timed_however_many_rows_decode(refresh, monkeypatch):
    """Also where it comes less often than there are rounds of a kind; a clock of 1 ms a look, 30 s for choosing."""
    model, clock = tiny_model(), Clock()
    runner = ModelRunner(model, full_cache(model, 4))
    cache = VerifyTopK(24, 8, refresh=refresh).new_cache(TINY, 4, 0, "cpu", runner.cache.keys.dtype)
    drafters = [SelfSpeculation(runner, full_cache(model, 4), 3), SelfSpeculation(runner, cache, 3)]
    choose = VerifyTopKCache.choose
    monkeypatch.setattr(VerifyTopKCache, "choose", lambda *given: clock.wait(30) or choose(*given))
    for module in ("engine.timing", "engine.decoding", "bench.auto.rehearsal"):
        monkeypatch.setattr(f"{module}.time", clock)
    rounds = Rehearsal(runner, drafters, random_prompts([40, 30, 50, 45]), gamma=3, max_new_tokens=60)
    monkeypatch.setattr("bench.auto.measure.MEASURING_SECONDS", 1e6)
    found = measure_for_decode(rounds, [3], 10**9)
    assert [*found] == [4, 2]
    for plain, chosen in found.values():
        assert plain.refresh_ms == 0 and chosen.refresh_ms == pytest.approx(30e3 / refresh, rel=1e-3)


def test_a_draft_step_takes_no_longer_than_with_a_larger_budget():
    rounds = {PLAIN: timed(0), Choice(0, 1): timed(10), Choice(0, 3): timed(30)}
    rounds |= {Choice(index, 2): timed(2 * ms) for index, ms in enumerate((12, 6, 9, 5), start=1)}
    rates = [AcceptanceRate(0.8, 20)] * 5
    found = costs_of_rounds(rehearsed(rounds, rates, [0] * 5, [50, 40, 30, 20, 10]), [1, 3], 0)
    assert [one.draft_ms for one in found] == pytest.approx([10, 10, 6, 6, 5])


def test_policies_of_one_size_draft_equally_fast():
    """Whichever is listed last: what differs is noise."""
    rounds = {PLAIN: timed(0), Choice(0, 3): timed(30), Choice(1, 3): timed(24), Choice(2, 3): timed(36)}
    rounds |= {Choice(3, 3): timed(15), Choice(4, 3): timed(9)}
    found = costs_of_rounds(rehearsed(rounds, [None] * 5, [0] * 5, [50, 50, 50, 20, 20]), [3], 0)
    assert [one.draft_ms for one in found] == pytest.approx([10, 10, 10, 4, 4])


@pytest.mark.parametrize("max_new_tokens,seconds,n_timed", [(2, 0.0, FEWEST_TIMED), (2, 1e6, MOST_TIMED), (90, 0.0, 2)])
def test_costs_take_more_rounds_where_time_allows(runner, decodes, max_new_tokens, seconds, n_timed):
    """Of each kind at least the fewest and at most the most, however long or short a round is."""
    drafter = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=4)
    rounds = Rehearsal(runner, [drafter], random_prompts([30, 30]), gamma=3, max_new_tokens=max_new_tokens)
    measure_costs(rounds, [1, 3], seconds)
    # With two tokens a row, one round a decode; with many, all in one.
    n_rounds = [*map(len, decodes)]
    assert sum(n_rounds) == 3 * (1 + n_timed) and len(n_rounds) == (sum(n_rounds) if max_new_tokens == 2 else 1)


@pytest.mark.parametrize("seconds,has_more", [(1.0, False), (3.0, True)])
def test_a_draft_models_runs_of_the_prompts_count_as_measuring(runner, decodes, seconds, has_more):
    """They are in no round, 0.8 s in every decode: there is time for more rounds or there is not."""
    own = StandaloneDraft(ModelRunner(tiny_model(seed=1), full_cache(runner.model, 2)), gamma=3)
    follow = own.follow

    def slow(rows: Sequence[RowUpdate]) -> None:
        time.sleep(0.4 * sum(one.n_seen == 0 for one in rows))
        follow(rows)

    own.follow = slow  # type: ignore[method-assign]
    measure_costs(Rehearsal(runner, [own], random_prompts([30, 30]), gamma=3, max_new_tokens=90), [1, 3], seconds)
    assert (sum(map(len, decodes)) > 3 * (1 + FEWEST_TIMED)) == has_more


GAMMAS = [*range(1, 7)]


def measured_for(n_steps: int) -> dict[int, Sequence[Costs]]:
    """A measurement for a decode of so many steps, by two drafters of four rows."""
    runner = tiny_runner(4)
    drafters = [SelfSpeculation(runner, full_cache(runner.model, 4), gamma=6) for _ in range(2)]
    rounds = Rehearsal(runner, drafters, random_prompts([30, 11, 20, 25]), gamma=6, max_new_tokens=30)
    return measure_for_decode(rounds, GAMMAS, n_steps)


def kinds(decodes: list[Decode]) -> dict[tuple[int, Choice], int]:
    """How many rounds there were of each kind, by the rows that were busy."""
    rounds = [(round_.busy, round_.choice) for decode in decodes for round_ in decode]
    return {kind: rounds.count(kind) for kind in rounds}


FIRST = [PLAIN, Choice(0, 3), Choice(1, 3)]


def test_a_short_decode_is_measured_for_by_the_fewest_rounds(decodes):
    found = measured_for(n_steps=1)
    assert kinds(decodes) == {(4, one): 1 + FEWEST_TIMED for one in FIRST}
    assert [*found] == [4] and [costs.at for costs in found[4]] == [(3,), (3,)]


def test_a_long_decode_is_measured_for_at_every_gamma_and_with_few_rows_too(decodes):
    found = measured_for(n_steps=10**9)
    assert {n_rows: [costs.at for costs in each] for n_rows, each in found.items()} == {
        4: [tuple(GAMMAS)] * 2,
        2: [(3,)] * 2,
    }
    counted = kinds(decodes)
    assert all(counted[2, one] == 1 + FEWEST_TIMED for one in FIRST)
    assert {one for n_rows, one in counted if n_rows == 4} == {*FIRST, *(Choice(0, gamma) for gamma in GAMMAS)}
    assert all(n <= 1 + MOST_TIMED for n in counted.values())


def test_what_there_is_time_for():
    """The few rows, then the largest gamma and the others, then more rounds, each at what it would cost."""
    costs = [Costs(10.0, (3,), (10.0,), 10.0, 0.0), Costs(10.0, (3,), (10.0,), 0.0, 0.0)]
    # A round of gamma 3 takes 40 ms, or 10 of the second drafter, one of 6 takes 70, of 1 20: the first ones 180.
    first, of_six, of_one = 3 * (10 + 40 + 10), 3 * 70, 3 * 20

    def asked(ms: float, has_few_rows: bool = True, spent_ms: float | None = None) -> Scope:
        n_steps = math.ceil(ms / (MOST_SHARE * 10))
        return scope(costs, range(1, 7), n_steps, has_few_rows, spent_ms)

    assert asked(0) == asked(first + 2) == Scope(False, (), 0)
    assert asked(2 * first - 2) == Scope(False, (1, 2), 0)
    assert asked(2 * first + 2) == Scope(True, (), 0)
    assert asked(2 * first + of_one + 2) == Scope(True, (1,), 0)
    assert asked(2 * first + of_six + 2) == Scope(True, (6,), 0)
    assert asked(first + of_six + of_one + 2, has_few_rows=False) == Scope(False, (6, 1), 0)
    assert asked(2 * first + of_six + of_one + 2, spent_ms=first) == Scope(True, (6, 1), 0)
    every = (6, 1, 2, 4, 5)
    one_more = sum((10, 40, 10, 70, 20, 30, 50, 60))
    all_once = 2 * first + 3 * (70 + 20 + 30 + 50 + 60)
    assert asked(all_once + one_more + 2) == Scope(True, every, 1)
    assert asked(1e9) == Scope(True, every, min(MOST_TIMED - FEWEST_TIMED, int((12000 - all_once) / one_more)))


def test_measuring_counts_what_it_took(decodes, monkeypatch):
    for seconds, n_kinds in ((1e9, 3), (0.0, 3 + 5 + 3)):
        decodes.clear()
        monkeypatch.setattr(Rehearsal, "seconds", property(lambda self, s=seconds: s, lambda *_: None), raising=False)
        measured_for(n_steps=10**9)
        assert len(kinds(decodes)) == n_kinds
