"""reproduce/sweep.py: which cells a grid has, and that each is recorded once, whatever ends the sweep."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common import cli
from common.checkout import ROOT
from common.errors import UserError
from common.jsonl import read_lines
from reproduce import sweep
from reproduce.sweep import make_cells, parse_ranges, read_grid
from tests.support.programs import FORK, run_here
from tests.support.programs import run as run_program

# A cell's script: it notes that it ran, then records its arguments, fails, or hangs with a child.
SCRIPT = """
import json, os, subprocess, sys, time
with open(__file__ + ".runs", "a") as runs:
    runs.write(sys.argv[1] + "\\n")
how = sys.argv[1].removeprefix("--how=")
if how == "hang":
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", __file__])
    time.sleep(60)
if how == "fail" and not os.path.exists(__file__ + ".repaired"):
    sys.exit("error: it is too large")
print("a table")
if how != "silent":
    print(json.dumps({"arguments": sys.argv[1:]}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "cell.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def run(script: Path, tmp_path: Path):
    """Runs a sweep over values of the script's flag; returns its exit code and the rows of the file."""

    def run(*hows: str, more: str = "") -> tuple[int, list[dict]]:
        output = tmp_path / "rows.jsonl"
        words = f"--script {script} --axis how={','.join(hows)} --output {output} {more}".split()
        try:
            sweep.main(cli.read(sweep.Flags, words, "sweep.py"))
            code = 0
        except SystemExit as ending:
            code = ending.code
        return code, [row for _, row in read_lines(output)]

    return run


def times_run(script: Path) -> list[str]:
    return Path(f"{script}.runs").read_text().replace("--how=", "").split()


def test_every_cell_is_recorded_once_and_failures_run_again(run, script: Path):
    code, rows = run("record", "fail", "silent")
    assert code == 1 and [row["status"] for row in rows] == ["ok", "failed", "failed"]
    assert rows[0]["record"] == {"arguments": ["--how=record"]} and rows[0]["flags"] == {"how": "record"}
    assert "it is too large" in rows[1]["error"] and rows[1]["record"] is None
    Path(f"{script}.repaired").touch()
    code, rows = run("record", "fail")
    assert code == 0 and [row["status"] for row in rows[3:]] == ["ok"]
    assert times_run(script) == ["record", "fail", "silent", "fail"]


def left_over(script: Path) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if str(script) in (one.info["cmdline"] or [])]


def test_a_cell_that_takes_too_long_ends_with_what_it_started(run, script: Path):
    code, rows = run("hang", more="--timeout 1")
    assert code == 1 and "timed out" in rows[0]["error"]
    assert not left_over(script)


def test_a_sweep_over_policies_without_a_ceiling_says_so(run, capsys: pytest.CaptureFixture[str]):
    for policy, n in (("full", 0), ("snapkv", 1)):
        run("record", more=f"--axis draft_policy=streaming,{policy}")
        assert capsys.readouterr().err.count("ceiling") == n


def test_after_a_signal_rows_are_kept_and_nothing_is_left_running(script: Path, tmp_path: Path):
    """What SIGTERM does is what SIGINT does."""
    words = f"--script {script} --axis how=record,hang --output {tmp_path / 'rows.jsonl'}".split()
    process = FORK.Process(target=lambda: sys.exit(run_program("reproduce/sweep.py", words).code))
    process.start()
    while not (Path(f"{script}.runs").exists() and len(times_run(script)) == 2 and len(left_over(script)) > 1):
        time.sleep(0.02)
        assert process.exitcode is None
    process.terminate()
    process.join()
    assert process.exitcode == 130
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1 and not left_over(script)


def test_a_grid_is_the_product_of_its_axes_and_can_be_changed(tmp_path: Path):
    path = tmp_path / "grid.toml"
    path.write_text("""
        [[sweep]]
        script = "tests/selfspec_benchmark.py"
        flags = { benchmark = true, compile = false }
        axes = { B = [1, 8], budgets = [[64, 128], 256] }
        [[sweep]]
        script = "tests/baseline_benchmark.py"
    """)
    *selfspec, last = make_cells(read_grid(str(path)), {})
    points = [(B, budgets) for B in (1, 8) for budgets in ([64, 128], 256)]
    assert [cell.flags for cell in selfspec] == [{"benchmark": True, "B": B, "budgets": n} for B, n in points]
    assert last == ("tests/baseline_benchmark.py", {})
    given = parse_ranges(["budgets=[32,64]", "seed=1"], ["B=2,4", "dtype=float32"])
    first, *_, last = make_cells(read_grid(str(path)), given)
    assert first.flags == {"benchmark": True, "B": 2, "budgets": [32, 64], "seed": 1, "dtype": "float32"}
    assert last.flags == {"seed": 1, "dtype": "float32"}
    path.write_text('[[sweep]]\nscript = "a.py"\n[[sweeps]]')
    with pytest.raises(UserError, match="sweeps"):
        read_grid(str(path))


@pytest.mark.parametrize("grid", sorted((ROOT / "reproduce/grids").glob("*.toml")), ids=lambda path: path.stem)
def test_the_grids_name_scripts_that_are_there(grid: Path):
    cells = make_cells(read_grid(str(grid)), {})
    assert len({*map(str, cells)}) == len(cells) > 0
    assert all((ROOT / cell.script).is_file() for cell in cells)


def test_a_misspelt_flag_is_found_before_the_first_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", run_here)
    output = tmp_path / "rows.jsonl"
    words = f"--script reproduce/plot.py --axis x=B,gamma --fixed titel=a --output {output}"
    with pytest.raises(UserError, match="--titel"):
        sweep.main(cli.read(sweep.Flags, words.split(), "sweep.py"))
    assert not output.exists()
