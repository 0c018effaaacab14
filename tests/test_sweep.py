"""reproduce/sweep.py: every cell is recorded once, whatever kills the runner; grids, choices, failures, errors."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.checkout import ROOT
from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import append_record, read_lines
from reproduce import kill_sweep, sweep
from reproduce.sweeping import child, runner
from reproduce.sweeping.cells import Cell, grid, labels, read_grid, select
from reproduce.sweeping.child import Outcome
from reproduce.sweeping.guardian import die_with
from reproduce.sweeping.runner import read_rows, run_cells, time_left

# What a cell of these tests does, by its first flag: record its arguments, fail, hang, or leave processes behind.
SCRIPT = """
import json, os, subprocess, sys, time
how, *arguments = sys.argv[1].removeprefix("--how=") if "=" in sys.argv[1] else sys.argv[2], *sys.argv[1:]
with open(__file__ + ".runs", "a") as runs:
    runs.write(json.dumps(arguments) + "\\n")
if how == "hang" or how == "leave":
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)", __file__]
    started = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    open(__file__ + ".started", "w").close()
if how == "hang":
    time.sleep(60)
if how == "refuse":
    sys.exit("\\r 10%\\r 20%\\nloading\\nerror: it is too large\\n  where:    here\\n  fix:      less")
if how == "raise":
    raise ValueError("a bug")
if how == "die":
    os.kill(os.getpid(), 9)
if how == "repair" and not os.path.exists(__file__ + ".repaired"):
    sys.exit("broken")
print("a table")
if how != "silent":
    print(json.dumps({"not": "the last"}))
    print(json.dumps({"arguments": arguments}))
    print("[1, 2]")
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "cell.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "rows.jsonl"


def runs_of(script: Path) -> list[list[str]]:
    """The arguments of every process that ran the script."""
    runs = Path(f"{script}.runs")
    return [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else []


def cells_that(script: Path, *hows: str) -> list[Cell]:
    return grid(str(script), {}, {"how": hows})


def lines_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def fork(act: Callable[[], Any], said: Path | None = None) -> int:
    """A process that does it, without the seconds that a new Python takes to import torch."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(said or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout = sys.stderr = open(file, "w", buffering=1)  # noqa: SIM115 - open as long as the process lives
    code = 70
    try:
        exit_on_user_error(act)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(is_so: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def processes_of(script: Path) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if str(script) in (process.info["cmdline"] or [])]


def guardian_of(script: Path) -> psutil.Process:
    (found,) = [process for process in processes_of(script) if str(child.GUARDIAN) in process.cmdline()]
    return found


# Cells and grids


def test_a_key_is_of_what_is_run_whatever_the_order():
    flags = {"B": 8, "benchmark": True, "budgets": [64, 128]}
    cell = Cell("tests/selfspec_benchmark.py", flags)
    assert cell.key == "ac5dc47c9c9f9c2a", "rows that were written by earlier versions would be run again"
    assert cell.key == replace(cell, flags=dict(reversed(flags.items()))).key
    assert cell.key == replace(cell, flags=flags | {"compile": False, "seed": None}).key
    assert cell.key == replace(cell, flags=flags | {"budgets": (64, 128)}).key
    others = [flags | {"B": 4}, flags | {"B": True}, flags | {"budgets": [128, 64]}, flags | {"seed": 0}, {}]
    keys = {replace(cell, flags=other).key for other in others}
    assert len(keys | {cell.key, replace(cell, script="tests/longspec_benchmark.py").key}) == len(others) + 2


def test_flags_become_arguments():
    flags = {"B": 8, "benchmark": True, "compile": False, "seed": None, "budgets": [64, 128], "x": -1, "p": 0.5}
    cell = Cell("tests/selfspec_benchmark.py", flags)
    expected = ["--B", "8", "--benchmark", "--budgets", "64", "128", "--x=-1", "--p", "0.5"]
    assert cell.argv() == [str(ROOT / "tests/selfspec_benchmark.py"), *expected]
    assert cell.label == "selfspec_benchmark B=8 benchmark budgets=64,128 x=-1 p=0.5"


def test_a_grid_is_the_product_of_its_axes_in_order(script):
    cells = grid(str(script), {"B": 2}, {"gamma": [1, 3], "budgets": [[64, 128], 256]})
    assert [cell.flags for cell in cells] == [
        {"B": 2, "gamma": gamma, "budgets": budgets} for gamma in (1, 3) for budgets in ([64, 128], 256)
    ]
    assert labels(cells)[0] == "gamma=1 budgets=64,128"
    assert [cell.flags for cell in grid(str(script), {"B": 2}, {})] == [{"B": 2}]


def test_a_grid_file(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text("""
        [[sweep]]
        script = "tests/selfspec_benchmark.py"
        skip = [{ gamma = 3, B = 8 }]
        [sweep.flags]
        benchmark = true
        [sweep.axes]
        B = [1, 8]
        gamma = [1, 3]
        [[sweep]]
        script = "tests/baseline_benchmark.py"
    """)
    cells = read_grid(path)
    selfspec = [(cell.flags["B"], cell.flags["gamma"]) for cell in cells[:-1]]
    assert selfspec == [(1, 1), (1, 3), (8, 1)] and all(cell.flags["benchmark"] for cell in cells[:-1])
    assert (cells[-1].script, cells[-1].flags) == ("tests/baseline_benchmark.py", {})
    assert labels(cells)[0] == "selfspec_benchmark benchmark B=1 gamma=1"


def test_the_example_is_a_grid():
    cells = read_grid(ROOT / "reproduce" / "grids" / "example.toml")
    assert len(cells) > 4 and all(cell.script.startswith("tests/") for cell in cells)


GOOD = 'script = "tests/selfspec_benchmark.py"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[sweep", "cannot be read"),
        ("", "not made of sweeps"),
        ("sweep = 1", "not made of sweeps"),
        ("sweep = [1]", "not made of sweeps"),
        ("[[sweep]]\n[[swep]]\n", "not made of sweeps"),
        ("[[sweep]]\n[sweep.axes]\ngamma = [1]", "no script"),
        ("[[sweep]]\nscript = 3", "script = 3"),
        (f"[[sweep]]\n{GOOD}flag = 1", "flag = 1"),
        (f"[[sweep]]\n{GOOD}axes = [1]", "axes"),
        ('[[sweep]]\nscript = "tests/none.py"', "script is not there"),
        ('[[sweep]]\nscript = "tests"', "script is not there"),
        ('[[sweep]]\nscript = ""', "script is not there"),
        (f"[[sweep]]\n{GOOD}[sweep.axes]\ngamma = []", "axis has no values"),
        (f"[[sweep]]\n{GOOD}[sweep.axes]\ngamma = 3", "axis has no values"),
        (f"[[sweep]]\n{GOOD}[sweep.axes]\ngamma = [3, 3]", "a cell twice"),
        (f"[[sweep]]\n{GOOD}[[sweep]]\n{GOOD}", "a cell twice"),
        (f"[[sweep]]\n{GOOD}[sweep.flags]\ngamma = 1\n[sweep.axes]\ngamma = [3]", "fixed and an axis"),
        (f"[[sweep]]\n{GOOD}skip = [{{gamma = 2}}]\n[sweep.axes]\ngamma = [1, 3]", "in no cell"),
        (f"[[sweep]]\n{GOOD}skip = [2]\n", "in no cell"),
        (f"[[sweep]]\n{GOOD}[sweep.flags]\nx = nan", "cannot be put on a command line"),
        (f"[[sweep]]\n{GOOD}[sweep.flags]\nx = []", "cannot be put on a command line"),
        (f"[[sweep]]\n{GOOD}[sweep.flags]\nx = {{ y = 1 }}", "cannot be put on a command line"),
        (f'[[sweep]]\n{GOOD}[sweep.flags]\n"--x" = 1', "name of a flag"),
    ],
)
def test_a_bad_grid_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        read_grid(path)
    for part in ("where:", "seen:", "required:", "fix:"):
        assert part in str(error.value)


def test_a_script_outside_the_project_is_named_by_its_whole_path(script):
    assert grid(str(script), {}, {})
    with pytest.raises(ConfigError, match="script is not there"):
        grid(os.path.relpath(script, ROOT), {}, {})


def test_choosing_cells():
    flags = [{"gamma": 1}, {"gamma": 3, "benchmark": True}, {"gamma": 3, "benchmark": False, "budgets": [64, 128]}]
    cells = [Cell("tests/selfspec_benchmark.py", each | {"B": 8}) for each in flags]
    assert select(cells, []) == cells
    assert select(cells, ["gamma=3"]) == cells[1:]
    assert select(cells, ["gamma=3", "benchmark=true"]) == cells[1:2]
    assert select(cells, ["gamma=3", "gamma=1"]) == cells
    assert select(cells, ["benchmark=false", "B=8"]) == cells[2:]
    assert select(cells, ["budgets=64,128"]) == cells[2:]
    assert select(cells, [cells[1].key[:6]]) == cells[1:2]
    assert select(cells, [cells[1].key, cells[0].key]) == cells[:2]
    for nothing in (["gamma=2"], ["gama=3"], ["gamma=1", "benchmark=true"], ["gamma"], [""], ["0" * 16]):
        with pytest.raises(ConfigError, match="no cell matches") as error:
            select(cells, nothing)
        assert "gamma=1|3" in str(error.value) and "B=8" not in str(error.value)


# Running


def test_every_cell_runs_once_and_is_recorded(script, output):
    cells = grid(str(script), {"how": "record"}, {"n": [1, 2]})
    rows = run_cells(cells, output)
    assert [row["record"]["arguments"] for row in rows] == runs_of(script)
    assert runs_of(script) == [["--how", "record", "--n", "1"], ["--how", "record", "--n", "2"]]
    assert rows == lines_of(output) == list(read_rows(output).values())
    first = rows[0]
    assert (first["key"], first["script"], first["flags"]) == (cells[0].key, str(script), {"how": "record", "n": 1})
    assert (first["status"], first["error"]) == ("ok", None) and first["seconds"] > 0
    assert first["git_commit"] is None or re.match("[0-9a-f]{40}", first["git_commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", first["started"])
    more = [Cell(str(script), {"how": "record", "n": 3}), *reversed(cells)]
    assert [row["flags"]["n"] for row in run_cells(more, output)] == [3, 2, 1]
    assert len(runs_of(script)) == 3 and len(lines_of(output)) == 3


def test_failures_are_recorded_and_not_run_again(script, output):
    cells = cells_that(script, "refuse", "raise", "die", "silent", "record")
    refused, raised, died, silent, fine = run_cells(cells, output)
    assert [row["status"] for row in (refused, raised, died, silent, fine)] == ["failed"] * 4 + ["ok"]
    log = f"rows.jsonl.logs/{cells[0].key}.log"
    message = "error: it is too large\n  where:    here\n  fix:      less\nexit code 1; see " + log
    assert refused["error"] == message and refused["record"] is None
    assert " 20%\nloading" in (output.parent / log).read_text()
    assert raised["error"].splitlines()[-2] == "ValueError: a bug"
    assert died["error"].startswith("ended by signal 9; see ")
    assert "no line of its stdout is a JSON object" in silent["error"]
    assert "a table" in (output.parent / f"rows.jsonl.logs/{cells[3].key}.log").read_text()
    assert len(run_cells(cells, output)) == 5 and len(runs_of(script)) == 5


def test_failures_are_tried_again_on_request(script, output):
    cells = cells_that(script, "repair", "record", "refuse")
    assert [row["status"] for row in run_cells(cells, output)] == ["failed", "ok", "failed"]
    Path(f"{script}.repaired").touch()
    assert [row["status"] for row in run_cells(cells, output, retry_failed=True)] == ["ok", "ok", "failed"]
    assert [run[1] for run in runs_of(script)] == ["repair", "record", "refuse", "repair", "refuse"]
    assert [row["status"] for row in lines_of(output)] == ["failed", "ok", "failed", "ok", "failed"]
    assert read_rows(output)[cells[0].key]["status"] == "ok"


def test_only_some_cells_run(script, output):
    cells = grid(str(script), {"how": "record"}, {"n": [1, 2, 3]})
    assert [row["flags"]["n"] for row in run_cells(cells, output, only=["n=2"])] == [2]
    assert [row["flags"]["n"] for row in run_cells(cells, output, only=[cells[0].key[:8]])] == [1, 2]
    assert len(runs_of(script)) == 2


def test_a_cell_that_takes_too_long_ends_with_all_that_it_started(script, output):
    began = time.monotonic()
    hung, fine = run_cells(cells_that(script, "hang", "record"), output, timeout_s=1.5)
    assert time.monotonic() - began < 20
    assert Path(f"{script}.started").exists()
    assert hung["status"] == "failed" and hung["error"].startswith("timed out after 1.5 s; see ")
    assert fine["status"] == "ok"
    assert not processes_of(script)


def test_what_a_cell_leaves_running_is_ended(script, output):
    (row,) = run_cells(cells_that(script, "leave"), output)
    assert row["status"] == "ok" and Path(f"{script}.started").exists()
    assert not processes_of(script)


@pytest.mark.parametrize("victim", ["runner", "guardian"])
def test_a_cell_dies_with_its_runner(script, output, victim):
    """kill -9 of either: everything that the cell started is gone, unless it left its session and lost its guardian."""
    cells = cells_that(script, "hang")
    pid = fork(lambda: run_cells(cells, output))
    wait_until(Path(f"{script}.started").exists)
    guardian = guardian_of(script)
    (cell,) = guardian.children()
    assert len(processes_of(script)) == 4
    os.kill(pid if victim == "runner" else guardian.pid, signal.SIGKILL)
    if victim == "runner":
        assert exit_code(pid) == -signal.SIGKILL
        wait_until(lambda: not processes_of(script))
        assert not output.exists()
    else:
        wait_until(lambda: not cell.is_running() or cell.status() == psutil.STATUS_ZOMBIE)
        assert exit_code(pid) == 0
        assert "ended before it did" in lines_of(output)[0]["error"]
        for process in processes_of(script):
            process.kill()


def test_a_guardian_that_comes_too_late_ends_its_command(script):
    """Its runner was killed before it could listen."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-I", "-S", str(child.GUARDIAN), str(fd), sys.executable, str(script), "--how=hang"]
        subprocess.run(command, pass_fds=[fd], timeout=15)
    assert not processes_of(script)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be bound to another's life")
def test_a_process_whose_parent_is_gone_does_not_begin():
    assert subprocess.run([sys.executable, "-S", "-c", ""], preexec_fn=die_with(os.getpid())).returncode == 0
    assert subprocess.run([sys.executable, "-S", "-c", ""], preexec_fn=die_with(1)).returncode == 1


# The file


def row_of(cell: Cell, status: str = "ok") -> dict:
    return {"key": cell.key, "script": cell.script, "flags": cell.given, "status": status, "error": None}


def test_a_row_that_was_torn_anywhere_is_written_anew(script, output, monkeypatch):
    """Cut off at every byte: the cell runs again unless its row was whole, and no row is lost or there twice."""
    ran: list[str] = []

    def record(argv, *others, **how):
        ran.append(argv[-1])
        return Outcome(None, 0.1, {"text": 'quotes " and \u20ac {}'})

    monkeypatch.setattr(runner, "run_child", record)
    monkeypatch.setattr(runner, "git_commit", lambda: None)
    cells = grid(str(script), {}, {"n": [1, 2, 3]})
    run_cells(cells[:2], output)
    whole = output.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole) + 1):
        output.write_bytes(whole[:cut])
        is_whole = cut >= len(whole) - 1
        assert list(read_rows(output)) == [cell.key for cell in cells[: 2 if is_whole else 1]]
        ran.clear()
        assert len(run_cells(cells, output)) == 3
        assert ran == (["3"] if is_whole else ["2", "3"])
        assert [row["key"] for _, row in read_lines(output)] == [cell.key for cell in cells]


def test_rows_torn_in_the_middle_are_no_rows(script, output, monkeypatch):
    """What two killed runners left between rows: their cells run once, the others not again."""
    cells = grid(str(script), {}, {"n": [1, 2, 3]})
    first, *others = (json.dumps(row_of(cell)) for cell in cells)
    output.write_text("\n".join([first, *(row[:-9] for row in others), ""]))
    ran: list[str] = []
    monkeypatch.setattr(runner, "run_child", lambda argv, *rest, **how: ran.append(argv[-1]) or Outcome(None, 0.1, {}))
    assert len(run_cells(cells, output)) == len(run_cells(cells, output)) == 3
    assert ran == ["2", "3"]


def test_a_row_that_cannot_be_written_is_printed(script, output, monkeypatch, capsys):
    (cell,) = cells_that(script, "record")
    monkeypatch.setattr(runner, "run_child", lambda *rest, **how: Outcome(None, 0.1, {"a": 1}))
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ConfigError, match="could not be appended"):
        run_cells([cell], output)
    assert json.loads(capsys.readouterr().out)["record"] == {"a": 1}


def full_disk(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("damage", ['{"key": a}', "[]", '{"key": "a"}', '{"key": "a", "status": "done"}'])
def test_a_damaged_line_in_the_middle_is_named(script, output, damage):
    (cell,) = cells_that(script, "record")
    output.write_text(f"{json.dumps(row_of(cell))}\n{damage}\n{json.dumps(row_of(cell))}\n")
    for read in (lambda: read_rows(output), lambda: run_cells([cell], output)):
        with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2"):
            read()
    assert not runs_of(script)


def test_the_last_row_of_a_cell_counts(script, output):
    first, second = cells_that(script, "record", "refuse")
    assert read_rows(output) == {}
    for row in (row_of(first, "failed"), row_of(second), row_of(first)):
        append_record(str(output), row)
    assert read_rows(output) == {first.key: row_of(first), second.key: row_of(second)}


def test_two_runners_of_one_file_are_refused(script, output, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LOCK_PATIENCE_SECONDS", 0.2)
    pid = fork(lambda: run_cells(cells_that(script, "hang"), output))
    wait_until(Path(f"{script}.started").exists)
    alias = tmp_path / "alias.jsonl"
    alias.symlink_to(output)
    for name in (output, alias):
        with pytest.raises(ConfigError, match=f"another runner writes to the same file(.|\n)*process {pid}"):
            run_cells(cells_that(script, "record"), name)
    assert run_cells(cells_that(script, "record"), tmp_path / "other.jsonl")
    guardian = guardian_of(script)
    guardian.suspend()
    os.kill(pid, signal.SIGKILL)
    exit_code(pid)
    try:
        with pytest.raises(ConfigError, match="another runner"):  # the killed runner's child is still there
            run_cells(cells_that(script, "record"), output)
    finally:
        guardian.resume()
    monkeypatch.setattr(runner, "LOCK_PATIENCE_SECONDS", 15)
    assert run_cells(cells_that(script, "record"), output)
    assert not processes_of(script)


def test_after_kill_9_the_rows_are_those_of_an_undisturbed_run(tmp_path):
    rng = random.Random(0)
    cells = kill_sweep.sleepers(10, 2000, rng)
    seen = kill_sweep.disturb(cells, 5, rng, tmp_path, lambda output: fork(lambda: run_cells(cells, output)))
    assert seen["kills"] == 5 and kill_sweep.is_sound(seen), seen


def test_the_comparison_of_rows_notices_what_is_wrong(tmp_path):
    cells = kill_sweep.sleepers(3, 10, random.Random(0))
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    rows = [row_of(cell) | {"seconds": 1, "started": "now"} for cell in cells]

    def found(rows: list[dict], rest: str = "") -> dict:
        bad.write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)
        return {name: int(count) for name, count in kill_sweep.differences(cells, bad, good).items() if count}

    good.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert found([row | {"seconds": 2, "started": "later"} for row in rows]) == {}
    assert found(rows[:2]) == {"lost": 1, "out_of_order": 1}
    assert found([*rows, rows[2]]) == {"twice": 1, "out_of_order": 1}
    assert found([rows[1], rows[0], rows[2]]) == {"out_of_order": 1}
    assert found([rows[0] | {"status": "failed"}, *rows[1:]]) == {"changed": 1}
    assert found(rows, '{"key') == {"changed": 1}
    assert found(rows[:1], f'{{"key\n{json.dumps(rows[1])}\n{json.dumps(rows[2])}\n') == {}


# The command line


def test_a_sweep_by_flags(script, output, capsys):
    command = ["--script", str(script), "--fixed", "how=record", "--axis", "n=1,2", "--output", str(output)]
    sweep.main([*command, "--list"])
    assert [line.split()[1:3] for line in capsys.readouterr().out.splitlines()[:2]] == [["to", "run"]] * 2
    assert not output.exists() and not runs_of(script)
    sweep.main(command)
    said = capsys.readouterr()
    assert said.out == f"2 ok of 2 cells in {output}\n"
    lines = said.err.splitlines()
    assert len(lines) == 3 and "0 of 2" in lines[0]
    assert re.fullmatch(r"\[1 of 2\]  n=1  \d\.\d s  ok  about \d s left", lines[1])
    assert re.fullmatch(r"\[2 of 2\]  n=2  \d\.\d s  ok  done", lines[2])
    sweep.main([*command[:-3], "n=1,2,3", *command[-2:], "--only", "n=3"])
    assert [row["flags"]["n"] for row in lines_of(output)] == [1, 2, 3]


def test_a_sweep_by_file_with_a_failure(script, tmp_path, capsys):
    path = tmp_path / "grid.toml"
    path.write_text(f'[[sweep]]\nscript = "{script}"\n[sweep.axes]\nhow = ["record", "refuse"]\n')
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            sweep.main(["--grid", str(path)])
        assert end.value.code == 1
        assert f"1 ok, 1 failed of 2 cells in {tmp_path / 'grid.jsonl'}; --retry_failed" in capsys.readouterr().out
    assert len(lines_of(tmp_path / "grid.jsonl")) == 2
    sweep.main(["--grid", str(path), "--list"])
    ok, failed, summary = capsys.readouterr().out.splitlines()
    assert ok.endswith("ok      how=record") and failed.endswith("failed  how=refuse  error: it is too large")
    assert summary.startswith("1 ok, 1 failed of 2")
    sweep.main(["--grid", str(path), "--only", "how=record"])


def test_values_on_the_command_line():
    values = {"3": 3, "0.5": 0.5, "true": True, "[64, 128]": [64, 128], '"3"': "3", "int8": "int8", "inf": "inf"}
    assert {text: sweep.parse_value(text) for text in values} == values
    assert sweep.parse_value("0-9,20-29") == "0-9,20-29"
    axes = {"1,2": [1, 2], "greedy, coupled": ["greedy", "coupled"], "int8,4": ["int8", 4], "[1, 2],3": [[1, 2], 3]}
    assert {text: sweep.parse_axis(text) for text in axes} == axes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "what to run"),
        ("--grid {folder}/none.toml", "grid cannot be read"),
        ("--grid g.toml --axis n=1", "what to run"),
        ("--grid g.toml --script {script}", "what to run"),
        ("--script {script}", "no file for the rows"),
        ("--script {script} --axis n --output {folder}/o", "no name or no value"),
        ("--script {script} --axis =1 --output {folder}/o", "no name or no value"),
        ("--script {script} --axis n=, --output {folder}/o", "axis has no values"),
        ("--script {script} --axis n=1 --axis n=2 --output {folder}/o", "given twice"),
        ("--script {script} --fixed n=1 --axis n=2 --output {folder}/o", "fixed and an axis"),
        ("--script {script} --axis n=1,1 --output {folder}/o", "a cell twice"),
        ("--script {script} --axis n=1,2 --output {folder}/o --only n=3", "n=1|2"),
        ("--script {script} --output {folder}", "a folder cannot be appended to"),
        ("--script {script} --output {folder}/none/o", "cannot be written"),
        ("--script {script} --output {script}", "has something else in it"),
        ("--script {script} --output {folder}/o --timeout 0", "no cell can end in this time"),
        ("--script {script} --output {folder}/o --timeout x", "command line cannot be read"),
        ("--script none.py --output {folder}/o", "script is not there"),
    ],
)
def test_bad_flags_are_one_clear_error(script, tmp_path, capsys, flags, message):
    command = flags.format(script=script, folder=tmp_path).split()
    with pytest.raises(SystemExit) as end:
        exit_on_user_error(lambda: sweep.main(command))
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and message in said and said.count("fix:") == 1
    assert script.read_text() == SCRIPT and not runs_of(script)


def test_logs_without_a_place_are_refused(script, output):
    runner.logs_of(output).touch()
    with pytest.raises(ConfigError, match="no place for the logs"):
        run_cells(cells_that(script, "record"), output)


def test_ctrl_c_says_what_is_done_and_how_to_go_on(script, output, tmp_path):
    command = ["--script", str(script), "--axis", "how=record,hang", "--output", str(output)]
    said = tmp_path / "said"
    pid = fork(lambda: sweep.main(command), said)
    wait_until(Path(f"{script}.started").exists)
    os.kill(pid, signal.SIGINT)
    assert exit_code(pid) == 130
    text = said.read_text()
    assert f"interrupted: 1 of 2 cells have a row in {output}; how=hang was cut off" in text
    assert text.endswith("run the same command again to go on\n") and "Traceback" not in text
    assert len(lines_of(output)) == 1 and not processes_of(script)


def test_the_script_runs_as_a_command(script, output, tmp_path):
    command = [sys.executable, str(ROOT / "reproduce" / "sweep.py"), "--script", str(script), "--fixed", "how=record"]
    done = subprocess.run([*command, "--output", str(output)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("1 ok of 1 cells"), done.stderr


def test_the_time_left_is_unknown_until_a_cell_went_well():
    assert time_left([], 3) == "time left unknown"
    assert time_left([1.0, 2.0], 0) == "done"
    assert time_left([10.0, 20.0], 2) == "about 30 s left"
    assert time_left([600.0], 3) == "about 30 min left"
    assert time_left([3600.0], 30) == "about 30 h left"


def test_the_last_words_are_the_error_or_the_last_lines():
    assert child.last_words("") == ""
    assert child.last_words("\n".join(map(str, range(20)))).splitlines() == [str(n) for n in range(12, 20)]
    assert child.last_words("a\n 1%\r 2%\r\nb\n") == "a\n 2%\nb"
    assert child.last_words("noise\nerror: x\n  fix: y\nafterwards\n") == "error: x\n  fix: y"


def test_the_record_is_the_last_line_that_is_an_object():
    assert child.last_record('{"a": 1}\n{"b": 2}\n{torn\n[3]\ntext\n') == {"b": 2}
    assert child.last_record("{}\n") == {} and child.last_record("1\nnull\n") is None
