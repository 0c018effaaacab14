"""`foretoken.py latency`: what is measured in which order, and what is made of it."""

from pathlib import Path
from typing import Any

import pytest

from bench import session as sessions
from engine.controller import PLAIN
from engine.generation import GenerateOutput, Generation
from engine.stats import Counts, RoundStats, Stats
from terminal.latency import figures
from tests.support.controllers import Clock
from tests.support.machine import needs_int8
from tests.support.programs import Ended, run

TICK = 0.001
# Of a decoder's clock, between a round's beginning and its end; a round with drafts reads it after drafting, too.
TICKS_A_ROUND = 1
TICKS_WITH_DRAFTS = 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(TICK)
    monkeypatch.setattr("engine.decoding.time", clock)
    return clock


@pytest.fixture
def latency(checkpoint: Path, books: Path, clock: Clock):
    """Runs it on so many targets, by that clock."""

    def latency(flags: str, n_targets: int = 1) -> Ended:
        words = f"--dataset {books} --gen_len 9 --dtype float64 --device cpu {flags}".split()
        return run("foretoken.py latency", [*[str(checkpoint)] * n_targets, *words])

    return latency


@needs_int8
def test_a_table_of_models_and_their_quantised_forms(latency) -> None:
    """Every draft is accepted: two rounds of four tokens after the first one, or eight of one."""
    ended = latency("--draft_policy full --nb_prompts 1 --quantize int8 int4 int8", n_targets=2)
    rows = ended.record["rows"]
    ways = [(scheme, draft) for scheme in (None, "int8", "int4") for draft in (None, "self")]
    assert [(row["quantize"], row["draft"]) for row in rows] == ways * 2
    ms, ms_drafted = 1e3 * TICK * TICKS_A_ROUND, 1e3 * TICK * TICKS_WITH_DRAFTS / 4
    for plain, speculative in zip(rows[::2], rows[1::2], strict=True):
        assert (plain["median_ms"], plain["p90_ms"], plain["spread_ms"]) == pytest.approx((ms, ms, 0))
        assert (plain["speedup"], plain["acceptance_rate"], plain["gamma"]) == (1, None, 0)
        measured = (speculative["median_ms"], speculative["tokens_per_second"])
        assert measured == pytest.approx((ms_drafted, 1e3 / ms_drafted))
        assert (speculative["speedup"], speculative["acceptance_rate"]) == (2, 1)
        assert len(speculative["ms_per_token"]) == 1
    table = [line.split() for line in ended.lines if " self " in line]
    assert [cells[1] for cells in table] == ["float64", "int8", "int4"] * 2
    assert table[2][-6:] == ["0.5", "0.5", "0.0", "2000.0", "2.00", "1.000"]


def test_both_ways_take_turns_and_the_first_prompts_only_warm_up(latency, clock: Clock, monkeypatch) -> None:
    """Later prompts are slower."""
    calls: list[tuple[int, str]] = []
    generation = sessions.Session.generation

    def logged(session: sessions.Session, **how: Any) -> Generation:
        clock.tick = TICK * session.numbered_from
        calls.append((session.numbered_from, "speculative" if how["controller"].drafters else "plain"))
        return generation(session, **how)

    monkeypatch.setattr(sessions.Session, "generation", logged)
    record = latency("--nb_prompts 3 --B 2 --draft ngram").record
    ways = ("plain", "speculative")
    assert calls == [(2 * turn, way) for turn in range(4) for way in ways]
    plain, speculative = record["rows"]
    assert plain["ms_per_token"] == pytest.approx([1e3 * TICK * TICKS_A_ROUND * first for first in (2, 4, 6)])
    assert len(speculative["ms_per_token"]) == 3
    assert (record["B"], plain["draft"], speculative["draft"]) == (2, None, "ngram")


def decoded(*rounds: tuple[float, int, int]) -> GenerateOutput:
    """An output of rounds, given as seconds, rows and emitted tokens."""
    stats = tuple(RoundStats(seconds, busy, emitted, PLAIN) for seconds, busy, emitted in rounds)
    counts = Counts(rounds=sum(one.busy for one in stats), emitted=sum(one.emitted for one in stats))
    return GenerateOutput([], [], [], Stats((counts,), (stats,), 0.0))


def test_percentiles_are_of_prompts_and_tokens_per_second_of_all() -> None:
    """A prompt in 11 is slow; between values, percentiles are interpolated."""
    row = figures([decoded((0.002 * place, 1, 2)) for place in (10, *range(1, 10), 100)])
    assert row["ms_per_token"] == pytest.approx([10, *range(1, 10), 100])
    assert (row["median_ms"], row["p90_ms"], row["spread_ms"]) == pytest.approx((6, 10, 8))
    assert row["tokens_per_second"] == pytest.approx(22 / (0.002 * 155))
