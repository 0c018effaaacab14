"""What reproduce/gpu.py measures: checks that notice what is wrong, cells that are listed, rows that fit."""

from contextlib import nullcontext
from functools import partial

import gpu_correctness as correctness
import pytest
import torch
from recorded_graph import RecordedGraph, RecordedGraphs
from tiny import random_prompts, tiny_model

from common.errors import OutOfMemoryError
from engine import noise
from engine.bench.config import Sizes
from engine.bench.memory import GIB, require_room
from engine.bench.session import Session
from models.attention.torch_backend import TorchAttention
from models.llama import Transformer
from models.pointwise import EAGER
from reproduce.gpu_parts import launch_gaps, speculation
from reproduce.gpu_parts.cells import Options
from reproduce.gpu_parts.supervisor import PARTS, cells_of

CPU, GPU = Options("cpu", quick=True), Options("cuda", quick=False)


class OnCuda(Options):
    """A CPU that is taken for a GPU."""

    on_cuda = True


class Wrong(TorchAttention):
    """Of 4 tokens by a tenth, of 8 tokens not at all."""

    def attend(self, q, kv, prepared):
        if q.shape[1] == 8:
            raise RuntimeError("no such kernel")
        return super().attend(q, kv, prepared) * (1.1 if q.shape[1] == 4 else 1)


class StaleGraphs(RecordedGraphs):
    """Replays are dropped after some of each."""

    class Graph(RecordedGraph):
        def replay(self):
            if self.replays < 3:
                super().replay()


class SharedGraphs(RecordedGraphs):
    """Replays are dropped once graphs of another owner are gone."""

    gone = False

    class Graph(RecordedGraph):
        def replay(self):
            if not SharedGraphs.gone:
                super().replay()

    def __del__(self):
        SharedGraphs.gone = True


@pytest.mark.parametrize(("backend", "status"), [(TorchAttention(), "done"), (Wrong(), "failed")])
def test_an_error_beyond_the_tolerance_fails_and_a_shape_that_raises(monkeypatch, backend, status):
    monkeypatch.setattr(correctness, "open_backend", lambda name, device, spec: backend)
    result = correctness.attention(CPU, "tested", "cpu", torch.float32, None, "in order")
    assert result["status"] == status and (result["worst_error"] > result["tolerance"]) == (status == "failed")
    assert [line[:3] for line in result["broken"]] == ["T 8"] * 2 * (status == "failed")
    assert correctness.error_of(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


IDENTITY, SURVIVAL = partial(correctness.identity, mode="coupled"), correctness.survival


@pytest.mark.parametrize(
    ("check", "graphs", "status"),
    [
        (IDENTITY, RecordedGraphs, "done"),
        (IDENTITY, StaleGraphs, "failed"),
        (SURVIVAL, RecordedGraphs, "done"),
        (SURVIVAL, SharedGraphs, "failed"),
    ],
)
def test_what_needs_graphs_runs_with_a_stand_in_for_them(monkeypatch, check, graphs, status):
    with_stand_ins(monkeypatch, graphs)
    assert check(OnCuda("cpu", True))["status"] == status


def with_stand_ins(monkeypatch: pytest.MonkeyPatch, graphs: type[RecordedGraphs]) -> None:
    """Of a tiny model; nothing can be compiled below the stand-in, which watches every operation of PyTorch."""
    monkeypatch.setattr(noise, "_kernel", lambda: None)
    model, prompts = tiny_model(dtype=torch.float32), random_prompts([70, 66, 90, 80, 65, 77])
    instead = {"CudaGraphs": graphs, "compiled": lambda: EAGER}
    instead |= {"LIMITS": [9, 4, 12, 7, 6, 10], "RUBBISH_BYTES": 64}
    for name, value in instead.items():
        monkeypatch.setattr(correctness, name, value)
    monkeypatch.setattr(correctness, "_model_and_prompts", lambda options: (model, prompts, "tiny"))


def test_called_and_captured_rounds_that_are_compared_have_the_same_shapes(monkeypatch):
    """Kernels sum in another order over fewer rows or slots: a right build would fail."""
    shapes, new_runner, run = list[set](), correctness._runner, Transformer.hidden_states

    def begin(*given, **how):
        shapes.append(set())
        return new_runner(*given, **how)

    def noting(model, tokens, positions, cache, *given):
        shapes[-1].add((*tokens.shape, *cache.positions.shape, cache.rows is None))
        return run(model, tokens, positions, cache, *given)

    with_stand_ins(monkeypatch, RecordedGraphs)
    monkeypatch.setattr(correctness, "_runner", begin)
    monkeypatch.setattr(Transformer, "hidden_states", noting)
    assert correctness.identity(OnCuda("cpu", True), "greedy")["status"] == "done"
    called, captured = shapes
    assert {n_rows for n_rows, *_ in captured} == {1, 2, 4} and called == captured


def test_cells_on_a_gpu_can_be_listed_without_one():
    cells = [cell for part in PARTS for cell in cells_of(part, GPU)]
    names = [cell.name for cell in cells]
    assert len({(cell.part, cell.name) for cell in cells}) == len(cells)
    in_a = [cell.name for cell in cells if cell.part == "a"]
    for first in range(3):  # without gaps
        assert [cell.name for cell in cells_of("a", GPU, (first, 3))] == in_a[first::3]
    # bfloat16 over three kinds of entries, float16 over its own; in order, rings, and these beside 4 bits
    assert sum(name.startswith("triton, ") for name in names) == 12
    assert "Llama-2-7B, B 32, S 4000, T 8, int8 KV, triton" in names
    assert "B 64, prefix 7500, coupled, gamma 3, draft weights int4" in names
    assert sum(cell.part == "c" for cell in cells) == 18
    assert any(cell.part == "d" and "Llama-3.1-8B, B 8, S 64000" in cell.name for cell in cells)
    sizes = {tuple(cell.run.args[1][0][1:4]) for cell in cells if cell.benchmark == "gpu_attention_bandwidth"}
    assert sizes == {(32, 8, 128), (32, 32, 128), (9, 3, 64)}


class Planned(Exception):
    """A set-up was planned, and is not made."""


def test_on_one_card_of_78_gib_every_cell_of_published_shapes_takes_the_rows_that_fit(monkeypatch):
    """All were skipped, because their full batches take 79.8 GiB and more."""
    planned = {}

    def never_opened(plan):
        require_room(plan)
        target, asked = plan.config.target, plan.config.sizes
        planned[target.model_name, asked.B, asked.prefix_len, target.kv_dtype] = plan.n_rows
        raise Planned

    monkeypatch.setattr(Session, "of_plan", never_opened)
    monkeypatch.setattr("engine.bench.memory.available_bytes", lambda device: 78 * GIB)
    monkeypatch.setattr("engine.bench.plan.resolve_device", lambda name: "cuda")
    monkeypatch.setattr("engine.bench.memory._dequantizes", lambda *arguments: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(speculation, "copy_bandwidth", lambda options: 1.0)
    monkeypatch.setattr(launch_gaps, "profile", lambda **what: nullcontext())
    options = OnCuda("cpu", False)
    for cell in cells_of("d", options) + cells_of("e", options):
        with pytest.raises(Planned):
            cell.run()
    assert len(planned) == len(options.sizes["costs"]) + 1  # the launch gaps of 8B are over the same context
    for (_, asked, _, _), batch in planned.items():
        assert 1 <= batch <= asked and batch >= 0.3 * asked
    assert planned["HuggingFaceTB/SmolLM2-135M-Instruct", 64, 7500, "same"] == 64
    assert planned["meta-llama/Meta-Llama-3.1-8B", 32, 16000, "same"] in range(20, 32)


def test_rows_that_do_not_fit_are_left_out_and_said(monkeypatch):
    """One row of two; none at all is a reason to skip."""

    def opened() -> Session:
        return speculation.dummy_session(
            CPU, "JackFram/llama-68m", Sizes(2, 64, 8), draft=speculation.self_draft(3, 32)
        )

    planned_bytes = speculation.size_record(opened())["planned_bytes"]
    monkeypatch.setattr("engine.bench.memory.available_bytes", lambda device: planned_bytes - 1)
    fitting = opened()
    assert fitting.runner.max_batch == len(fitting.prompts) == 1
    record = speculation.size_record(fitting)
    assert (record["B"], record["asked_B"]) == (1, 2) and record["planned_bytes"] < planned_bytes
    monkeypatch.setattr("engine.bench.memory.available_bytes", lambda device: 1000)
    with pytest.raises(OutOfMemoryError, match="a batch of 2"):
        opened()
