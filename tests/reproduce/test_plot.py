"""Records, drawn: what is on which axis, which points make a line, their bars, and what is left out."""

import json
from pathlib import Path

import pytest

from reproduce.helpers.records import Record, varying
from reproduce.plot import Lines, choose_x, lines_of
from tests.support.programs import Ended, run


def record(B: int, speedup: float | None, **changes: object) -> Record:
    run = {"benchmark": "selfspec", "model": "M", "B": B, "prefix_len": 1000, "gamma": 3, "speedup": speedup}
    return run | {"decode_tokens_per_second": 10.0 * B} | changes


def lines(records: list[Record], x: str, y: str) -> Lines:
    return lines_of(records, x, y, varying(records, x))


@pytest.fixture
def draw(tmp_path: Path):
    """Runs the command on lines of JSON."""

    def draw(lines: list[object], *flags: str) -> Ended:
        file = tmp_path / "own.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run("reproduce/plot.py", [str(file), "--figures", str(tmp_path / "figures"), *flags])

    return draw


def test_records_without_x_are_a_line_of_their_own():
    found = lines_of([record(1, 1.5), record(1, 2.5) | {"B": None}, record(2, 1.75)], "B", "speedup", ())
    assert found == {"all": [(1, 1.5, 1.5, 1.5), (2, 1.75, 1.75, 1.75)], "all, no B": [(None, 2.5, 2.5, 2.5)]}


def test_a_line_for_each_combination_of_what_else_varies():
    """Repeats are drawn as their median, with their range; a label names settings only if there are several."""
    records = [record(B, 1.0 + B, prefix_len=length) for length in (1000, 4000) for B in (4, 1, 2)]
    records += [record(1, 9.0), record(1, 2.5)]
    assert choose_x(records) == "B"
    assert lines(records, "B", "speedup") == {
        "1000": [(1, 2.5, 2, 9), (2, 3, 3, 3), (4, 5, 5, 5)],
        "4000": [(1, 2, 2, 2), (2, 3, 3, 3), (4, 5, 5, 5)],
    }
    assert [*lines([record(1, 2.0, task=task) for task in ("a", "b")], "B", "speedup")] == ["a", "b"]
    assert "prefix_len 1000, gamma 3" in lines([*records, record(1, 1.0, gamma=5)], "B", "speedup")


def test_what_follows_from_the_facet_splits_no_line():
    records = [record(B, 2.0, text=text, verification=text[0]) for B in (1, 2) for text in ("book", "chat")]
    assert varying(records, "B", "text") == [] and varying(records, "B") == ["text"]


def test_bars_are_the_range_of_repeats_or_an_interval_over_rows():
    repeated = record(1, 1.2, speedups=[1.1, 1.2, 1.5])
    assert lines([repeated], "B", "speedup") == {"all": [(1, 1.2, 1.1, 1.5)]}
    assert lines([record(1, None, score=0.5, scores=[0, 1])], "B", "score") == {"all": [(1, 0.5, 0.5, 0.5)]}
    by_row = [{"accepted": n, "verified": 10, "emitted": 10 + n, "rounds": 10} for n in (4, 6, 7, 9)]
    measured = record(1, None, acceptance_rate=0.65, mean_accepted_length=1.65, by_row=by_row)
    for y, value in (("acceptance_rate", 0.65), ("mean_accepted_length", 1.65)):
        ((point,),) = lines([measured], "B", y).values()
        assert point.y == value and value - 0.4 < point.low < value - 0.1 and value + 0.1 < point.high < value + 0.4


def test_what_has_no_number_is_left_out_and_counted(draw, tmp_path: Path):
    """A row of a sweep is its record; a failed cell has none."""
    lines = [record(8, None), {"status": "ok", "record": record(1, 1.5)}, {"status": "failed", "record": None}]
    ended = draw([*lines, record(2, 2.0, speedups=[1.9, 2.1])])
    assert ended.code == 0, ended.err
    assert "speedup over B: 2 of 3 rows" in ended.out and "per_second over B: 3 of 3" in ended.out
    assert all((tmp_path / "figures" / f"own.{kind}").stat().st_size for kind in ("png", "svg", "pdf"))
    draw([record(1, 1.5), record(2, 2.0), record(1, 1.0, speedups=[0.9, 1.1]) | {"B": None}], "--x", "B")
    assert "bands of levels" in (tmp_path / "figures/own-B.svg").read_text(), "other flags make other files"


@pytest.mark.parametrize(
    ("given", "flags"),
    [([record(1, 1.1), record(1, 1.2)], ""), ([record(1, None), record(2, None)], "--y speedup"), ([[1]], "")],
)
def test_what_cannot_be_drawn_is_refused(draw, given: list[object], flags: str):
    assert "own.jsonl" in draw(given, *flags.split()).refusal
    assert "use speedup" not in draw([record(1, None)], "--where", "speedup=2").refusal, "it has no value"


@pytest.mark.parametrize("flags", ["--lines prefix_lne", "--facet prefix_lne", "--x prefix_lne", "--y prefix_lne"])
def test_an_unknown_column_is_refused_with_the_nearest(draw, flags: str):
    refusal = draw([record(1, 1.1), record(2, 1.2)], *flags.split()).refusal
    assert flags.split()[0] in refusal and refusal.endswith("use prefix_len\n")
