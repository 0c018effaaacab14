"""reproduce/gpu.py: a quick run on the CPU, cells that fail, time limits, processes that die, no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import fake_flash_attn
import pytest
import torch
from fake_cuda_linear import cuda_linears
from recorded_graph import RecordedGraph, RecordedGraphs
from tiny import random_prompts, tiny_model

from common.errors import ConfigError, OutOfMemoryError
from engine.bench.memory import GIB
from engine.bench.plan import require_room, resolve
from engine.noise import in_passes
from models.attention.flash_backend import FA3, FlashAttention, Flavour
from models.attention.torch_backend import TorchAttention
from models.pointwise import EAGER
from reproduce import gpu
from reproduce.gpu_parts import bandwidth, correctness, costs, launch_gaps, linears, setups, speculation
from reproduce.gpu_parts.backends import Named
from reproduce.gpu_parts.cells import Cell, Options, Shared, Skip, run_cells
from reproduce.gpu_parts.devices import Timing
from reproduce.gpu_parts.worker import PARTS, RESTART, cells_of

SCRIPT = Path(gpu.__file__)
CPU = Options("cpu", quick=True)


def run_script(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def records_in(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def never() -> float:
    return time.time() + 1000


def cell(run, name: str = "a cell") -> Cell:
    return Cell("a", "gpu_test", name, run)


def collect(cells: list[Cell], **how) -> tuple[bool, list[dict]]:
    found: list[dict] = []
    went_on = run_cells(cells, how.pop("deadline", never()), lambda index, record: found.append(record), **how)
    return went_on, found


def test_a_quick_run_on_the_cpu(tmp_path):
    """Every part but the one that needs the default model's weights."""
    output = tmp_path / "gpu.jsonl"
    done = run_script("--device", "cpu", "--quick", "--parts", "a", "b", "d", "e", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    records = records_in(output)
    assert {record["part"] for record in records} == {"a", "b", "d", "e"}
    assert {record["status"] for record in records} <= {"done", "skipped"}
    assert len({(record["part"], record["cell"]) for record in records}) == len(records)
    for record in records:
        assert record["quick"] and record["git_commit"] is not None and record["torch_version"]
    errors = [record for record in records if record["benchmark"] == "gpu_attention_error"]
    assert {record["backend"] for record in errors} >= {"torch"}
    assert all(record["worst_error"] <= record["tolerance"] for record in errors if record["status"] == "done")
    measured = [record for record in records if record["benchmark"] == "gpu_attention_bandwidth"]
    assert all(record["share_of_copy"] > 0 for record in measured if record["status"] == "done")
    layers = [record for record in records if record["benchmark"] == "gpu_linear" and record["status"] == "done"]
    assert {record["kind"] for record in layers} >= {"plain", "int4, kernel"}
    assert all(us > 0 for record in layers for us in record["microseconds_by_rows"].values())
    prefill = [record for record in records if record["benchmark"] == "gpu_prefill_kernel"]
    assert len(prefill) == 1 and any("flash" in name for name in prefill[0]["kernels"])
    dummies = [record for record in records if record["benchmark"] == "gpu_costs"]
    assert {record["draft_weights"] for record in dummies} == {None, "int4"}
    for record in dummies:
        assert record["B"] == record["asked_B"] == 2 and record["planned_bytes"] > 2**20
        assert record["acceptance_rate"] is None and record["speedup"] is None and record["prefill_seconds"] is None
        assert record["draft_step_ms"] > 0 and record["verify_step_ms"] > 0 and record["baseline_step_ms"] > 0
    gaps = [record for record in records if record["benchmark"] == "gpu_launch_gaps"]
    assert [record["gamma"] for record in gaps] == [3, 0]
    assert all(len(record["largest"]) == 10 and record["gap_percent"] is None for record in gaps)
    summary = done.stdout.splitlines()[-1]
    assert f"{sum(record['status'] == 'done' for record in records)} done" in summary


@pytest.mark.slow
def test_a_quick_run_on_the_default_model(tmp_path):
    output = tmp_path / "gpu.jsonl"
    done = run_script("--device", "cpu", "--quick", "--parts", "c", "--output", str(output))
    assert done.returncode == 0, done.stderr
    records = records_in(output)
    if any("is missing" in record.get("reason", "") for record in records):
        pytest.skip("the default model is not there")
    assert [record["verification"] for record in records] == ["coupled", "greedy"]
    for record in records:
        assert record["identical_sequences"] == record["sequences"] == 2
        assert 0 <= record["acceptance_rate"] <= 1 and record["speedup"] > 0 and record["verify_step_ms"] > 0
        assert record["dataset"] == "default" and record["prompt_overlap"] == 0


def test_without_a_gpu_it_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, quick in (("cuda", False), ("cuda", True), ("cpu", False), ("tpu", True)):
        with pytest.raises(ConfigError, match="the measurements need a GPU") as error:
            gpu.resolve_options(device, quick)
        for part in ("where:", "seen:", "required:", "fix:"):
            assert part in str(error.value)
    assert gpu.resolve_options("cpu", True) == CPU
    if not torch.cuda.device_count():
        done = run_script("--output", str(tmp_path / "none.jsonl"))
        assert done.returncode == 2 and done.stderr.startswith("error: the measurements need a GPU")
        assert not (tmp_path / "none.jsonl").exists()


def test_a_failing_cell_is_recorded_and_the_rest_runs():
    def fail():
        raise ValueError("a shape was wrong")

    def too_large():
        raise OutOfMemoryError("too large", where="here", seen=2 * GIB, required=GIB, fix="less")

    def skip():
        raise Skip("it makes no sense here")

    runs = [lambda: {"x": 1}, fail, too_large, skip, lambda: {"status": "failed"}, lambda: {"x": 2}]
    went_on, records = collect([cell(run, str(i)) for i, run in enumerate(runs)])
    assert went_on
    assert [record["status"] for record in records] == ["done", "error", "skipped", "skipped", "failed", "done"]
    assert records[1]["error"] == "ValueError: a shape was wrong" and records[1]["where"][-1].endswith("fail")
    assert "too large" in records[2]["reason"] and records[3]["reason"] == "it makes no sense here"
    assert records[5]["x"] == 2 and records[5]["cell"] == "5" and records[5]["seconds"] >= 0


def test_a_broken_device_stops_the_process_and_only_it():
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cells = [cell(lambda: {}), cell(broken), cell(lambda: {})]
    went_on, records = collect(cells)
    assert not went_on and [record["status"] for record in records] == ["done", "error"]
    went_on, records = collect(cells, start=2)
    assert went_on and [record["status"] for record in records] == ["done"]


def test_cells_behind_the_deadline_are_recorded_as_skipped(monkeypatch, tmp_path):
    ran = []
    _, records = collect([cell(lambda: ran.append(1) or {})] * 2, deadline=time.time() - 1)
    assert not ran and [record["status"] for record in records] == ["skipped"] * 2
    assert "time limit" in records[0]["reason"]
    output = tmp_path / "gpu.jsonl"
    flags = ["--device", "cpu", "--quick", "--parts", "d", "--time_limit", "0", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    gpu.main()
    assert [record["status"] for record in records_in(output)] == ["skipped"] * len(costs.QUICK_DRAFTS)


WORKER = """
import json, os, sys
task = json.loads(sys.argv[1])
def emit(index, status):
    record = {"part": "a", "cell": str(index), "status": status}
    print(json.dumps({"index": index, "record": record}), flush=True)
"""


def run_fake_worker(code: str, **how) -> list[dict]:
    """The records that gpu.py keeps of a worker that runs `code`."""
    kept: list[dict] = []
    task = {"parts": ["a"], "share": [0, 1], "start": 0, "attempts": 0, "deadline": never(), "kill_at": never()}
    gpu.run_worker(task | how, kept.append, (sys.executable, "-c", WORKER + code))
    return kept


def test_a_worker_goes_on_behind_the_cell_that_broke_its_device():
    code = f"""
print("a library prints this")
for index in range(task["start"], 4):
    emit(index, "error" if index == 1 else "done")
    if index == 1:
        sys.exit({RESTART})
"""
    assert [record["cell"] for record in run_fake_worker(code)] == ["0", "1", "2", "3"]


def test_a_worker_that_dies_loses_one_cell():
    code = """
for index in range(task["start"], 3):
    if index == 1:
        print("the last words", file=sys.stderr, flush=True)
        os.abort()
    emit(index, "done")
"""
    records = run_fake_worker(code)
    assert [record["status"] for record in records] == ["done", "error", "done"]
    assert "code -6" in records[1]["error"] and "the last words" in records[1]["where"]


def test_a_worker_that_cannot_start_is_not_started_for_ever():
    records = run_fake_worker("raise ImportError('no such thing')")
    assert [record["status"] for record in records] == ["error"] * 2
    assert "no such thing" in records[0]["where"][-1]


def test_a_worker_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(gpu, "START_SECONDS", 2)
    code = """
if task["start"] == 0:
    import time
    emit(0, "done")
    time.sleep(60)
emit(task["start"], "skipped")
"""
    started = time.monotonic()
    records = run_fake_worker(code, kill_at=0)
    assert [record["status"] for record in records] == ["done", "error", "skipped"]
    assert time.monotonic() - started < 30


def test_shared_values_are_built_once_and_fail_once():
    shared, built = Shared(), []

    def build(key):
        built.append(key)
        if key == "bad":
            raise ValueError("cannot be built")
        return [key]

    first = shared.get("x", partial(build, "x"))
    assert shared.get("x", partial(build, "x")) is first
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be built"):
            shared.get("bad", partial(build, "bad"))
    assert shared.get("x", partial(build, "x")) is not first
    assert built == ["x", "bad", "x"]


def test_an_error_beyond_the_tolerance_fails():
    class Wrong(TorchAttention):
        def attend(self, q, kv, prepared):
            out = super().attend(q, kv, prepared)
            return out * 1.1 if q.shape[1] == 4 else out

    for backend, status in ((TorchAttention(), "done"), (Wrong(), "failed")):
        named = Named("tested", "cpu", lambda spec, backend=backend: backend)
        result = correctness.attention(CPU, named, torch.float32, None, False)
        assert result["status"] == status
    assert result["worst_case"].startswith("T 4") and result["worst_error"] > result["tolerance"]
    assert correctness.error_of(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


def test_a_shape_that_raises_is_named():
    class Picky(TorchAttention):
        def attend(self, q, kv, prepared):
            if q.shape[1] == 8:
                raise RuntimeError("no such kernel")
            return super().attend(q, kv, prepared)

    named = Named("tested", "cpu", lambda spec: Picky())
    result = correctness.attention(CPU, named, torch.float32, torch.int8, True)
    assert result["status"] == "failed" and len(result["broken"]) == 2
    assert all(line.startswith("T 8") and "no such kernel" in line for line in result["broken"])


def test_flash_flavours_are_checked_like_the_others():
    kernel = fake_flash_attn.fake_package(FA3).flash_attn_with_kvcache
    named = Named("flash", "cpu", lambda spec: FlashAttention(Flavour(FA3, kernel, 132), TorchAttention()))
    result = correctness.attention(CPU, named, torch.bfloat16, None, False)
    assert result["status"] == "done" and result["shapes"] == 10


class OnCuda(Options):
    """A CPU that is taken for a GPU."""

    on_cuda = True


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_replayed_rounds_are_compared_with_called_ones(monkeypatch, mode):
    """With the stand-in for graphs; and a graph that drops its replays is noticed."""
    model = tiny_model(dtype=torch.float32)
    prompts = random_prompts([70, 66, 90, 80, 65, 77])

    class Stale(RecordedGraph):
        def replay(self):
            if self.replays < 3:
                super().replay()

    # Nothing can be compiled below the stand-in, which watches every operation.
    monkeypatch.setattr(correctness, "compiled", lambda: EAGER)
    monkeypatch.setattr(correctness, "compiled_source", lambda: in_passes)
    monkeypatch.setattr(correctness, "LIMITS", [9, 4, 12, 7, 6, 10])
    monkeypatch.setattr(correctness, "_model_and_prompts", lambda options: (model, prompts, "tiny"))

    class StaleGraphs(RecordedGraphs):
        Graph = Stale

    for graphs, status in ((RecordedGraphs, "done"), (StaleGraphs, "failed")):
        monkeypatch.setattr(correctness, "CudaGraphs", graphs)
        result = correctness.identity(OnCuda("cpu", True), mode)
        assert result["status"] == status, result


def test_graphs_that_outlive_another_runner_are_looked_at(monkeypatch):
    """And a graph that goes stale with another runner's is noticed."""
    model, prompts = tiny_model(dtype=torch.float32), random_prompts([70, 66, 90, 80, 65, 77])
    monkeypatch.setattr(correctness, "LIMITS", [9, 4, 12, 7, 6, 10])
    monkeypatch.setattr(correctness, "RUBBISH_BYTES", 64)
    monkeypatch.setattr(correctness, "_model_and_prompts", lambda options: (model, prompts, "tiny"))
    gone = []

    class Stale(RecordedGraph):
        def replay(self):
            if not gone:
                super().replay()

    class Sharing(RecordedGraphs):
        Graph = Stale

        def __del__(self):
            gone.append(self)

    for graphs, status in ((RecordedGraphs, "done"), (Sharing, "failed")):
        monkeypatch.setattr(correctness, "CudaGraphs", graphs)
        assert correctness.survival(OnCuda("cpu", True))["status"] == status
    assert gone


def test_parts_are_shared_between_processes_without_gaps():
    everything = [cell.name for cell in cells_of(list(PARTS), CPU)]
    shares = [[cell.name for cell in cells_of(list(PARTS), CPU, (i, 3))] for i in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(everything)
    assert len(set(everything)) == len(everything)


def test_parts_on_a_gpu_run_one_after_the_other_in_processes_of_their_own(monkeypatch):
    tasks = []
    monkeypatch.setattr(gpu, "run_worker", lambda task, keep, **environment: tasks.append(task))
    began = time.time()
    gpu.run_parts(list(PARTS), Options("cuda", quick=False), 500.0, lambda record: None)
    assert [task["parts"] for task in tasks] == [["a"]] * gpu.N_PROCESS + [["b"], ["c"], ["e"], ["d"]]
    assert sorted(task["share"][0] for task in tasks[: gpu.N_PROCESS]) == list(range(gpu.N_PROCESS))
    for task in tasks:
        assert began < task["deadline"] <= began + 501
        assert task["deadline"] < task["kill_at"] <= began + 501 + gpu.END_GRACE
    tasks.clear()
    gpu.run_parts(["e"], Options("cuda", quick=False), 500.0, lambda record: None)
    assert tasks[0]["deadline"] >= began + 500


def test_cells_on_a_gpu_can_be_listed_without_one():
    cells = cells_of(list(PARTS), Options("cuda", quick=False))
    assert len({(cell.part, cell.name) for cell in cells}) == len(cells)
    triton = [cell for cell in cells if cell.name.startswith("triton, ")]
    assert len(triton) == 8  # bfloat16 over three kinds of entries, float16 over its own; in order and rings
    assert any(cell.name == "Llama-2-7B, B 32, S 4000, T 8, int8 KV, triton" for cell in cells)


def test_the_full_run_has_the_cells_that_were_promised():
    options = Options("cpu", quick=False)
    names = [cell.name for cell in speculation.cells(options)]
    assert len(names) == 18 and "B 64, prefix 7500, coupled, gamma 3, draft weights int4" in names
    assert any("Llama-3.1-8B, B 8, S 64000" in cell.name for cell in costs.cells(options))
    sizes = {(shape.n_head, shape.n_kv_head, shape.head_dim) for shape in bandwidth.SHAPES}
    assert sizes == {(32, 8, 128), (32, 32, 128), (9, 3, 64)}


class Planned(Exception):
    """A set-up was planned, and is not made."""


def test_on_one_card_of_78_gib_every_cell_of_published_shapes_takes_the_rows_that_fit(monkeypatch):
    """All were skipped, because their full batches take 79.8 GiB and more."""
    planned = {}

    def never_prepared(args, sampling, draft):
        require_room(resolve(args, sampling, draft))
        planned[args.model_name, args.asked_B, args.prefix_len, args.kv_dtype] = args.B
        raise Planned

    monkeypatch.setattr(setups, "prepare", never_prepared)
    monkeypatch.setattr("engine.bench.plan.available_bytes", lambda device: 78 * GIB)
    for module in ("plan", "settings"):
        monkeypatch.setattr(f"engine.bench.{module}.resolve_device", lambda name: "cuda")
    monkeypatch.setattr("engine.bench.plan._dequantizes", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(costs, "copy_bandwidth", lambda options: 1.0)
    monkeypatch.setattr(launch_gaps, "profile", lambda **what: nullcontext())
    options = OnCuda("cpu", False)
    for cell in costs.cells(options) + launch_gaps.cells(options):
        with pytest.raises(Planned):
            cell.run()
    assert len(planned) == len(costs.SETTINGS) + 1  # the launch gaps of 8B are over the same context
    for (_, asked, _, _), batch in planned.items():
        assert 1 <= batch <= asked and batch >= 0.3 * asked
    assert planned[launch_gaps.SIZES[0][0], 64, 7500, "same"] == 64
    assert planned[costs.LLAMA_31_8B, 32, 16000, "same"] in range(20, 32)


def test_rows_that_do_not_fit_are_left_out_and_said(monkeypatch):
    """One row of two; none at all is a reason to skip."""
    flags = {"B": 2, "prefix_len": 64, "gen_len": 8}
    asked = setups.dummy_setup(CPU, setups.TINY, **flags).args
    monkeypatch.setattr("engine.bench.plan.available_bytes", lambda device: asked.planned_bytes - 1)
    fitting = setups.dummy_setup(CPU, setups.TINY, **flags)
    assert fitting.runner.max_batch == len(fitting.prompts) == 1
    record = setups.size_record(fitting)
    assert (record["B"], record["asked_B"]) == (1, 2) and record["planned_bytes"] < asked.planned_bytes
    monkeypatch.setattr("engine.bench.plan.available_bytes", lambda device: 1000)
    with pytest.raises(OutOfMemoryError, match="a batch of 2"):
        setups.dummy_setup(CPU, setups.TINY, **flags)


def test_linear_layers_of_a_gpu_are_timed_in_all_forms(monkeypatch):
    options = OnCuda("cpu", True)
    monkeypatch.setattr(
        linears, "time_calls", lambda calls, options: ([call() for call in calls], Timing(1e-6, "x"))[1]
    )
    with cuda_linears(monkeypatch) as kernel_rows:
        records = [cell.run() for cell in linears.cells(options)]
        on_gpu = correctness.quantised(options, "int4")
    assert [record["kind"] for record in records] == ["plain", "int8", "int4, kernel", "int4, dequantised"]
    assert on_gpu["status"] == "done" and on_gpu["unpacks"]
    assert set(kernel_rows) == {*linears.QUICK_ROWS, 1, 16, 17}
    assert all(record["microseconds_by_rows"] == {"8": 1.0, "32": 1.0} for record in records)


def test_expected_tokens_per_round():
    assert costs.tokens_per_round(0.5, 1) == pytest.approx(1.5)
    assert costs.tokens_per_round(0.8, 3) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
