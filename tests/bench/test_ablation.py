"""What a draft reads of a plain step, `--ablate`, which takes a draft's gain apart, and notes on records."""

from typing import Any

import pytest

from bench.record import speedup_standard_error
from bench.table import FEW_ROUNDS, notes, speedup_text
from engine.generation import GenerateOutput
from engine.stats import PLAIN, Counts, RoundStats, Stats

SELFSPEC = "tests/selfspec_benchmark.py"
SIZES = "--B 4 --prefix_len 60 --gen_len 20 --dtype float64 --device cpu"
SHARES = ("draft_weights_share", "draft_entries_share", "draft_kv_share")
READS = [("--draft_budget 20 --draft_dtype same", (1, 0.25, 0.25)), ("--draft ngram", (None,) * 3)]
READS += [("--draft_budget 100 --draft_dtype float32", (0.5, 1, 0.5))]  # more entries than tokens


@pytest.mark.parametrize(("flags", "shares"), [*READS, ("--draft_budget 20 --draft_dtype float32", (0.5, 0.25, 0.125))])
def test_a_record_says_what_the_draft_reads(call, flags: str, shares: tuple[float | None, ...]) -> None:
    record = call(SELFSPEC, f"{SIZES} --no_baseline {flags}").record
    assert tuple(record.get(name) for name in SHARES) == shares


def test_a_draft_is_taken_apart_in_one_session(call) -> None:
    """Float32 stands for cheap weights. With all entries and the target's weights, everything is accepted."""
    flags = "--draft_budget 20 --draft_dtype float32 --temperature 0.9 --seed 3"
    ended = call(SELFSPEC, f"{SIZES} {flags} --ablate")
    record, rows = ended.record, ended.record["rows"]
    assert "float64 weights, full" in ended.err and sum("±:" in line for line in ended.lines) == 1
    assert record["verification"] == "coupled"
    reads = [(row["draft_dtype"], row["draft_budget"], row["draft_policy"]) for row in rows]
    whole = 60 + 20 + 3 + 1
    cut, all_entries = (20, "streaming"), (whole, "full")
    assert reads == [(dtype, *entries) for dtype in ("float32", "float64") for entries in (cut, all_entries)]
    assert all(row["identical_sequences"] == 4 for row in rows)
    names = "acceptance_rate", "acceptance_standard_error", "speedup", "speedup_standard_error", "by_row"
    assert {name: record[name] for name in names} == {name: rows[0][name] for name in names}
    assert rows[3]["acceptance_rate"] == 1 > rows[2]["acceptance_rate"]
    assert all(row["speedup_standard_error"] > 0 for row in rows)


def test_what_repeats_another_is_left_out_and_what_cannot_be_taken_apart_is_refused(call) -> None:
    rows = call(SELFSPEC, f"{SIZES} --draft_budget 20 --draft_dtype same --ablate").record["rows"]
    assert [row["draft_policy"] for row in rows] == ["streaming", "full"]
    rows = call(SELFSPEC, f"{SIZES} --draft_budget 80 --draft_dtype float32 --ablate").record["rows"]
    reads = [(row["draft_dtype"], row["draft_policy"]) for row in rows]
    assert reads == [("float32", "streaming"), ("float64", "streaming")], "the budget covers 60 + 20 tokens"
    nothing = "--draft_policy full --draft_dtype same", "--draft_budget 80 --draft_dtype same"
    for flags in ("--draft ngram", "--gamma auto", "--gamma 0", *nothing):
        refusal = call(SELFSPEC, f"{SIZES} {flags} --ablate").refusal
        assert "--ablate" in refusal and ("all entries" in refusal) == (flags in nothing)


def passed(emitted: list[int], seconds: list[float]) -> GenerateOutput:
    """Return an output of rows that emitted so much in their rounds, which took so long."""
    rows = tuple(Counts(rounds=len(seconds), emitted=n) for n in emitted)
    rounds = tuple(RoundStats(time, len(rows), sum(emitted) // len(seconds), PLAIN) for time in seconds)
    return GenerateOutput([], [], [], Stats(rows, (rounds,), 0.0))


def error_of(drafted: GenerateOutput) -> Any:
    return speedup_standard_error(passed([4] * 4, [1.0] * 4), drafted)


def test_a_speedups_error_is_that_of_rows_and_of_times() -> None:
    assert error_of(passed([8] * 4, [1.0] * 4)) == 0
    rows = error_of(passed([4, 12, 8, 8], [1.0] * 4))
    assert rows == pytest.approx(2 * (2 * 4**2 * 4 / 3) ** 0.5 / 4 / 8)
    times = error_of(passed([8] * 4, [0.5, 1.5, 1.0, 1.0]))
    assert times == pytest.approx(2 * (2 * 0.5**2 * 4 / 3) ** 0.5 / 4)
    assert error_of(passed([4, 12, 8, 8], [0.5, 1.5, 1.0, 1.0])) == pytest.approx((rows**2 + times**2) ** 0.5)
    assert error_of(passed([4, 12, 8], [1.0] * 4)) is None


USUAL = {"gen_len": 64, "gamma": "auto", "choices": [{"gamma": 3}], "speedup": 1.2, "contention": {}}
NOTHING = {"wall_speedup": 1.1, "distinct_4gram_fraction": 0.9, "contention": {"baseline": {"contended": None}}}
NOTED = [{"choices": [{"gamma": 0}]}, {"steady_rounds": FEW_ROUNDS - 1}, {"gen_len": 1, "choices": []}]
NOTED += [{"measured_costs_seconds": 11.26}, {"contention": {"baseline": {"contended": True}}}]
NOTED += [{"wall_speedup": 0.9}, {"distinct_4gram_fraction": 0.2}]


@pytest.mark.parametrize("changed", [NOTHING, *NOTED])
def test_notes_are_made_where_a_record_would_be_misread(changed: dict[str, Any]) -> None:
    record = USUAL | {"speedup_standard_error": 0.1} | changed
    assert len(notes(record, ["gamma"])) == (changed in NOTED)
    assert ("±" in str(speedup_text(record))) == ("steady_rounds" not in changed)
