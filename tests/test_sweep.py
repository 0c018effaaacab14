"""reproduce/sweep.py: every cell is recorded once, whatever kills the runner; failures, time limits, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from programs import python
from sweep_processes import fork, processes_of, wait_until

from common import cli
from common.checkout import ROOT
from reproduce import sweep
from reproduce.sweeping import child
from reproduce.sweeping.cells import Cell, Sweep
from reproduce.sweeping.child import die_with
from reproduce.sweeping.runner import read_rows, run_cells

# What a cell of these tests does, by its first flag: record its arguments, fail, hang, or leave processes behind.
SCRIPT = """
import json, os, subprocess, sys, time
how, *arguments = sys.argv[1].removeprefix("--how=") if "=" in sys.argv[1] else sys.argv[2], *sys.argv[1:]
with open(__file__ + ".runs", "a") as runs:
    runs.write(json.dumps(arguments) + "\\n")
if how == "hang" or how == "leave":
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)", __file__]
    started = [subprocess.Popen(sleep), subprocess.Popen(sleep)]
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
    return Sweep(str(script), {}, {"how": hows}).cells()


def lines_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def fork_hanging(script: Path, act: Callable[[], object], said: Path | str = os.devnull) -> psutil.Process:
    """The same of a runner, once its cell hangs."""
    process = fork(act, said)
    wait_until(Path(f"{script}.started").exists)
    return process


def run_sweep(*words: str) -> None:
    sweep.main(cli.read(sweep.Flags, words, "sweep.py"))


def test_every_cell_runs_once_and_is_recorded(script, output):
    cells = Sweep(str(script), {"how": "record"}, {"n": [1, 2]}).cells()
    rows = run_cells(cells, output)
    assert runs_of(script) == [["--how", "record", "--n", "1"], ["--how", "record", "--n", "2"]]
    assert [row["record"]["arguments"] for row in rows] == runs_of(script)
    assert rows == lines_of(output) == list(read_rows(output).values())
    first = rows[0]
    assert (first["key"], first["script"], first["flags"]) == (cells[0].key, str(script), {"how": "record", "n": 1})
    assert (first["status"], first["error"]) == ("ok", None) and first["seconds"] > 0
    assert first["git_commit"] is None or re.match("[0-9a-f]{40}", first["git_commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", first["started"])
    more = [Cell(str(script), {"how": "record", "n": 3}), *reversed(cells)]
    assert [row["flags"]["n"] for row in run_cells(more, output)] == [3, 2, 1]
    assert len(runs_of(script)) == 3 and len(lines_of(output)) == 3


def test_failures_are_recorded_and_run_again_only_on_request(script, output):
    cells = cells_that(script, "refuse", "raise", "die", "silent", "record", "repair")
    rows = run_cells(cells, output)
    assert [row["status"] for row in rows] == ["failed"] * 4 + ["ok", "failed"]
    refused, raised, died, silent, *_ = rows
    log = f"rows.jsonl.logs/{cells[0].key}.log"
    message = "error: it is too large\n  where:    here\n  fix:      less\nexit code 1; see " + log
    assert refused["error"] == message and refused["record"] is None
    assert " 20%\nloading" in (output.parent / log).read_text()
    assert raised["error"].splitlines()[-2] == "ValueError: a bug"
    assert died["error"].startswith("ended by signal 9; see ")
    assert "no line of its stdout is a JSON object" in silent["error"]
    assert "a table" in (output.parent / f"rows.jsonl.logs/{cells[3].key}.out").read_text()
    assert run_cells(cells, output) == rows and len(runs_of(script)) == 6
    Path(f"{script}.repaired").touch()
    again = cells[4:] + cells[:1]
    assert [row["status"] for row in run_cells(again, output, retry_failed=True)] == ["ok", "ok", "failed"]
    assert [run[1] for run in runs_of(script)[6:]] == ["repair", "refuse"] and len(lines_of(output)) == 8
    assert read_rows(output)[cells[5].key]["status"] == "ok"


def test_a_cell_that_takes_too_long_ends_with_all_that_it_started(script, output):
    """And what a cell that ended has left running in its session is ended, too."""
    hung, left = run_cells(cells_that(script, "hang", "leave"), output, timeout_s=1.5)
    assert Path(f"{script}.started").exists()
    assert hung["status"] == "failed" and hung["error"].startswith("timed out after 1.5 s; see ")
    assert left["status"] == "ok"
    wait_until(lambda: not processes_of(script))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be bound to another's life")
def test_a_cell_dies_with_its_runner(script, output):
    """kill -9: the cell is gone; what it started knows nothing of that."""
    process = fork_hanging(script, lambda: run_cells(cells_that(script, "hang"), output))
    (cell,) = process.children()
    started = cell.children()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not cell.is_running() or cell.status() == psutil.STATUS_ZOMBIE)
    assert not output.exists()
    for left in started:
        left.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be bound to another's life")
def test_a_process_whose_parent_is_gone_does_not_begin():
    for parent, code in ((os.getpid(), 0), (1, 1)):
        ended = subprocess.run([sys.executable, "-S", "-c", ""], preexec_fn=partial(die_with, parent))
        assert ended.returncode == code


def test_two_runners_of_one_file_take_turns(script, output, tmp_path):
    """By whatever name. A killed runner's child keeps the lock until it is gone, here one that does not die with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "die_with", lambda parent: None)
        first = fork_hanging(script, lambda: run_cells(cells_that(script, "hang"), output))
    (cell,) = first.children()
    (alias := tmp_path / "alias.jsonl").symlink_to(output)
    said = tmp_path / "said"
    second = fork(lambda: run_cells(cells_that(script, "record"), alias), said)
    wait_until(
        lambda: said.exists() and f"waiting for another runner of {output}, process {first.pid}" in said.read_text()
    )
    assert run_cells(cells_that(script, "record"), tmp_path / "other.jsonl")
    first.kill()
    first.wait()
    time.sleep(0.3)
    assert "to run" not in said.read_text()
    for left in (*cell.children(), cell):
        left.kill()
    assert second.wait(30) == 0 and [row["status"] for row in lines_of(output)] == ["ok"]


def test_ctrl_c_says_what_is_done_and_how_to_go_on(script, output, tmp_path):
    command = ["--script", str(script), "--axis", "how=record,hang", "--output", str(output)]
    said = tmp_path / "said"
    process = fork_hanging(script, lambda: run_sweep(*command), said)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    text = said.read_text()
    assert f"interrupted: 1 of 2 cells have a row in {output}; how=hang was cut off" in text
    assert text.endswith("run the same command again to go on\n") and "Traceback" not in text
    assert len(lines_of(output)) == 1
    wait_until(lambda: not processes_of(script))


def test_a_sweep_by_flags(script, output, capsys):
    command = ["--script", str(script), "--fixed", "how=record", "--axis", "n=1,2", "--output", str(output)]
    run_sweep(*command, "--list")
    assert [line.split()[1:3] for line in capsys.readouterr().out.splitlines()[:2]] == [["to", "run"]] * 2
    assert not output.exists() and not runs_of(script)
    ended = python(sweep.__file__, *command, cwd=ROOT.parent)
    assert ended.code == 0 and ended.out == f"2 ok of 2 cells in {output}\n", ended.err
    first, *lines = ended.err.splitlines()
    assert "0 of 2" in first and lines[::2] == ["[1 of 2]  n=1", "[2 of 2]  n=2"]
    assert all(re.fullmatch(r"    ok in \d\.\d s, about 0 min left", line) for line in lines[1::2])
    run_sweep(*command[:-3], "n=1,2,3", *command[-2:], "--only", "n=3")
    assert [row["flags"]["n"] for row in lines_of(output)] == [1, 2, 3]


def test_a_sweep_by_file_with_a_failure(script, tmp_path, capsys):
    path = tmp_path / "grid.toml"
    path.write_text(f'[[sweep]]\nscript = "{script}"\n[sweep.axes]\nhow = ["record", "refuse"]\n')
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            run_sweep("--grid", str(path))
        assert end.value.code == 1
        assert f"1 ok, 1 failed of 2 cells in {tmp_path / 'grid.jsonl'}; --retry_failed" in capsys.readouterr().out
    assert len(lines_of(tmp_path / "grid.jsonl")) == 2
    run_sweep("--grid", str(path), "--list")
    ok, failed, summary = capsys.readouterr().out.splitlines()
    assert ok.endswith("ok      how=record") and failed.endswith("failed  how=refuse  error: it is too large")
    assert summary.startswith("1 ok, 1 failed of 2")
    run_sweep("--grid", str(path), "--only", "how=record")
