"""The rows of a sweep: torn and damaged lines, a full disk; and what is read of a cell's output."""

import errno
import json
import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.jsonl import append_record, read_lines
from reproduce.sweeping import runner
from reproduce.sweeping.cells import Cell, Sweep
from reproduce.sweeping.child import Outcome, last_object, last_words
from reproduce.sweeping.runner import read_rows, run_cells

CELLS = Sweep("tests/selfspec_benchmark.py", {}, {"B": [1, 2, 3]}).cells()


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.fixture(autouse=True)
def ran(monkeypatch) -> list[str]:
    """The last argument of every cell that was to run; none does, and each has a record."""
    found: list[str] = []

    def run_child(argv: list[str], log: Path, timeout_s: float | None, printed: Path, keep_open: list[int]) -> Outcome:
        found.append(argv[-1])
        printed.write_text(json.dumps({"text": 'quotes " and \u20ac {}'}))
        return Outcome(None, 0.1)

    monkeypatch.setattr(runner, "run_child", run_child)
    monkeypatch.setattr(runner, "git_commit", lambda: None)
    return found


def row_of(cell: Cell, status: str = "ok") -> dict:
    return {"key": cell.key, "script": cell.script, "flags": cell.given, "status": status, "error": None}


def write(file: Path, *lines: dict | str) -> None:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def test_a_row_that_was_torn_anywhere_is_written_anew(output, ran):
    """Cut off at every byte: the cell runs again unless its row was whole, and no row is lost or there twice."""
    run_cells(CELLS[:2], output)
    whole = output.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole) + 1):
        output.write_bytes(whole[:cut])
        is_whole = cut >= len(whole) - 1
        assert list(read_rows(output)) == [cell.key for cell in CELLS[: 2 if is_whole else 1]]
        ran.clear()
        assert len(run_cells(CELLS, output)) == 3
        assert ran == (["3"] if is_whole else ["2", "3"])
        assert [row["key"] for _, row in read_lines(output)] == [cell.key for cell in CELLS]


def test_rows_torn_in_the_middle_are_no_rows(output, ran):
    """What two killed runners left between rows: their cells run once, the others not again."""
    first, *others = (json.dumps(row_of(cell)) for cell in CELLS)
    write(output, first, *(row[:-9] for row in others))
    assert len(run_cells(CELLS, output)) == len(run_cells(CELLS, output)) == 3
    assert ran == ["2", "3"]


def test_a_row_that_cannot_be_written_is_printed(output, monkeypatch, capsys):
    def full_disk(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ConfigError, match="could not be appended"):
        run_cells(CELLS[:1], output)
    assert json.loads(capsys.readouterr().out)["record"]["text"].startswith("quotes")


@pytest.mark.parametrize("damage", ['{"key": a}', "[]", '{"key": "a"}', '{"key": "a", "status": "done"}'])
def test_a_damaged_line_in_the_middle_is_named(output, damage, ran):
    write(output, row_of(CELLS[0]), damage, row_of(CELLS[0]))
    for read in (lambda: read_rows(output), lambda: run_cells(CELLS, output)):
        with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2"):
            read()
    assert not ran


def test_the_last_row_of_a_cell_counts(output):
    first, second, _ = CELLS
    assert read_rows(output) == {}
    for row in (row_of(first, "failed"), row_of(second), row_of(first)):
        append_record(str(output), row)
    assert read_rows(output) == {first.key: row_of(first), second.key: row_of(second)}


def test_the_last_words_are_the_error_or_the_last_lines():
    assert last_words("") == ""
    assert last_words("\n".join(map(str, range(20)))).splitlines() == [str(n) for n in range(12, 20)]
    assert last_words("a\n 1%\r 2%\r\nb\n") == "a\n 2%\nb"
    assert last_words("noise\nerror: x\n  fix: y\nafterwards\n") == "error: x\n  fix: y"


def test_the_record_is_the_last_line_that_is_an_object():
    assert last_object(b'{"a": 1}\n{"b": 2}\n[3]\n') == {"b": 2} and last_object(b"{}") == {}
    none = (b"", b"{torn\n", b"[3]\n", b"text\n", b"1\n", b"null\n", b"\xff\n", b"[" * 10**5)
    assert [last_object(printed) for printed in none] == [None] * len(none)
