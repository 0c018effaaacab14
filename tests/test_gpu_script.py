"""reproduce/gpu.py: a quick run on the CPU, cells that fail, time limits, processes that die, no GPU."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
from programs import python

from common.errors import OutOfMemoryError
from reproduce import gpu
from reproduce.gpu_parts import supervisor
from reproduce.gpu_parts.cells import Cell, Options, Skip, run_cells, shared
from reproduce.gpu_parts.supervisor import PARTS, RESTART, Task, cells_of, records_of, run_parts, run_task

CPU = Options("cpu", quick=True)


def never() -> float:
    return time.time() + 1000


def collect(cells: list[Cell], deadline: float | None = None) -> tuple[bool, list[dict]]:
    """Whether all of these cells were run, and what came of them."""
    found: list[dict] = []

    def keep(cell: Cell, result: dict) -> None:
        found.append({"part": cell.part, "benchmark": cell.benchmark, "cell": cell.name} | result)

    return run_cells(cells, never() if deadline is None else deadline, keep), found


def cells_that(*runs) -> list[Cell]:
    return [Cell("a", "gpu_test", str(index), run) for index, run in enumerate(runs)]


def quick_run(output: Path, *parts: str) -> list[dict]:
    ended = python(gpu.__file__, "--device", "cpu", "--quick", "--parts", *parts, "--output", output)
    assert ended.code == 0, ended.out + ended.err
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert f"{sum(record['status'] == 'done' for record in records)} done" in ended.out.splitlines()[-1]
    assert all(record["quick"] and record["gpu_run"] and record["torch_version"] for record in records)
    return records


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> dict[str, list[dict]]:
    """Of a quick run on the CPU, by benchmark; one part by the script, others in this process, and part a by
    `test_gpu_correctness.py`."""
    found = quick_run(tmp_path_factory.mktemp("gpu") / "gpu.jsonl", "b")
    for part in "de":
        went_on, results = collect(cells_of(part, CPU))
        found += results
        assert went_on
    assert {record["status"] for record in found} <= {"done", "skipped"}
    assert len({(record["part"], record["cell"]) for record in found}) == len(found)
    by_benchmark = {record["benchmark"]: [] for record in found}
    for record in found:
        by_benchmark[record["benchmark"]] += [record] if record["status"] == "done" else []
    return by_benchmark


def test_a_quick_run_measures(records):
    assert all(record["share_of_copy"] > 0 for record in records["gpu_attention_bandwidth"])
    assert {record["draft_weights"] for record in records["gpu_costs"]} == {None, "int4"}
    for record in records["gpu_costs"]:
        assert record["B"] == record["asked_B"] == 2 and record["planned_bytes"] > 2**20
        assert record["acceptance_rate"] is None and record["speedup"] is None and record["prefill_seconds"] is None
        assert record["draft_step_ms"] > 0 and record["verify_step_ms"] > 0 and record["baseline_step_ms"] > 0
    gaps = records["gpu_launch_gaps"]
    assert [record["gamma"] for record in gaps] == [3, 0]
    assert all(len(record["largest"]) == 10 and record["gap_percent"] is None for record in gaps)


@pytest.mark.slow
def test_a_quick_run_on_the_default_model(tmp_path):
    records = quick_run(tmp_path / "gpu.jsonl", "c")
    if any("is missing" in record.get("reason", "") for record in records):
        pytest.skip("the default model is not there")
    assert [record["verification"] for record in records] == ["coupled", "greedy"]
    for record in records:
        assert record["identical_sequences"] == record["sequences"] == 2
        assert 0 <= record["acceptance_rate"] <= 1 and record["speedup"] > 0 and record["verify_step_ms"] > 0
        assert record["dataset"] == "default" and record["prompt_overlap"] == 0


def test_a_failing_cell_is_recorded_and_the_rest_runs():
    def fail(error: Exception):
        raise error

    too_large = OutOfMemoryError("too large", where="here", seen=2, required=1, fix="less")
    errors = [partial(fail, error) for error in (ValueError("a shape was wrong"), too_large, Skip("no sense here"))]
    went_on, records = collect(cells_that(lambda: {"x": 1}, *errors, lambda: {"status": "failed"}, lambda: {"x": 2}))
    assert went_on
    assert [record["status"] for record in records] == ["done", "error", "skipped", "skipped", "failed", "done"]
    assert records[1]["error"] == "ValueError: a shape was wrong" and records[1]["where"][-1].endswith("fail")
    assert "too large" in records[2]["reason"] and records[3]["reason"] == "no sense here"
    assert records[5]["x"] == 2 and records[5]["cell"] == "5" and records[5]["seconds"] >= 0
    broken = partial(fail, RuntimeError("CUDA error: an illegal memory access was encountered"))
    went_on, records = collect(cells_that(lambda: {}, broken, lambda: {}))
    assert not went_on and [record["status"] for record in records] == ["done", "error"]


def test_cells_behind_the_deadline_are_recorded_as_skipped(tmp_path):
    ran = []
    _, records = collect(cells_that(lambda: ran.append(1) or {}), time.time() - 1)
    assert not ran and [record["status"] for record in records] == ["skipped"]
    assert "time limit" in records[0]["reason"]
    output = str(tmp_path / "gpu.jsonl")
    run_parts(["d"], CPU, 0, "now", output, tmp_path)
    statuses = [record["status"] for record in records_of(output, "now")]
    assert statuses == ["skipped"] * len(cells_of("d", CPU))


WORKER = """
import json, os, sys, time
task = json.loads(sys.argv[1])
def emit(index, status):
    with open(task["output"], "a") as file:
        file.write(json.dumps({"gpu_run": "now", "part": "a", "cell": str(index), "status": status}) + "\\n")
start = len(open(task["output"]).readlines())
"""


@pytest.fixture
def fake_worker(monkeypatch, tmp_path):
    """Runs a task of five cells with a worker that runs some code; gives the records that were kept."""
    monkeypatch.setattr(supervisor, "cells_of", lambda part, options, share: cells_that(*[dict] * 5))
    (output := tmp_path / "gpu.jsonl").touch()

    def run(code: str, kill_at: float | None = None) -> list[dict]:
        task = Task("a", CPU, "now", str(output), never(), never() if kill_at is None else kill_at)
        run_task(task, tmp_path, ["-c", WORKER + code])
        return records_of(str(output), "now")

    return run


def test_a_worker_goes_on_behind_cells_that_end_it(fake_worker):
    """It asks for that where a device broke; where it died, a record says which cell was lost."""
    code = f"""
print("a library prints this")
for index in range(start, 5):
    if index == 3:
        print("the last words", file=sys.stderr, flush=True)
        os.abort()
    emit(index, "error" if index == 1 else "done")
    if index == 1:
        sys.exit({RESTART})
"""
    records = fake_worker(code)
    assert [record["status"] for record in records] == ["done", "error", "done", "error", "done"]
    assert [record["cell"] for record in records] == ["0", "1", "2", "3", "4"]
    assert "signal 6" in records[3]["error"] and "the last words" in records[3]["error"]


def test_a_worker_that_cannot_start_is_not_started_for_ever(fake_worker):
    records = fake_worker("raise ImportError('no such thing')")
    assert [record["status"] for record in records] == ["error"] * 2
    assert "no such thing" in records[0]["error"]


def test_a_worker_that_hangs_is_ended(monkeypatch, fake_worker):
    monkeypatch.setattr(supervisor, "START_SECONDS", 2)
    code = """
if start == 0:
    emit(0, "done")
    time.sleep(60)
for index in range(start, 5):
    emit(index, "skipped")
"""
    records = fake_worker(code, kill_at=0)
    assert [record["status"] for record in records] == ["done", "error", *["skipped"] * 3]
    assert "timed out" in records[1]["error"]


def test_shared_values_are_built_once_and_fail_once():
    built = []

    @shared
    def build(key):
        built.append(key)
        if key == "bad":
            raise ValueError("cannot be built")
        return [key]

    first = build("x")
    assert build("x") is first
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be built"):
            build("bad")
    assert build("x") is not first
    assert built == ["x", "bad", "x"]


def test_parts_on_a_gpu_run_one_after_the_other_in_processes_of_their_own(monkeypatch, tmp_path):
    tasks = []
    monkeypatch.setattr(supervisor, "run_task", lambda task, logs: tasks.append(task))
    began = time.time()
    run_parts(list(PARTS), Options("cuda", quick=False), 500.0, "now", "gpu.jsonl", tmp_path)
    assert [task.part for task in tasks] == ["a"] * supervisor.N_PROCESS + ["b", "c", "e", "d"]
    shares = [task.share for task in tasks[: supervisor.N_PROCESS]]
    assert sorted(shares) == [(index, supervisor.N_PROCESS) for index in range(supervisor.N_PROCESS)]
    for task in tasks:
        assert began < task.deadline <= began + 501
        assert task.deadline < task.kill_at <= began + 501 + supervisor.END_GRACE
    tasks.clear()
    run_parts(["e"], Options("cuda", quick=False), 500.0, "now", "gpu.jsonl", tmp_path)
    assert tasks[0].deadline >= began + 500
