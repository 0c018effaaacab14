"""Rounds that are captured once and replayed give the tokens of rounds that are called."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from engine import Decoder, ModelRunner, Request, SamplingParams, generate
from engine.controller import PLAIN
from engine.controller import RoundChoice as Choice
from engine.drafters import Drafter
from engine.graphs import CudaGraphs
from tests.support.controllers import Scripted
from tests.support.drafters import Drafters
from tests.support.policies import SELF_DRAFT_POLICIES, Size
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.tiny import continue_by_recomputing, decode, near_model, random_prompts, tiny_runner

LENGTHS = [40, 7, 23, 1, 31]
LIMITS = [14, 6, 10, 26, 8]
# Rows with and without edits.
SAMPLED = [
    SamplingParams(0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.75, frequency_penalty=0.3, min_p=0.02),
    SamplingParams(1.1, top_k=9, seed=4),
    SamplingParams(logit_bias={3: 16.0, 17: -100.0}, repetition_penalty=0.8, min_tokens=9),
    SamplingParams(0.6, top_p=0.8, seed=5),
    SamplingParams(0.9, top_k=30, top_p=0.95, seed=6, min_tokens=5, bad_words=[[5], [8, 9], [60, 1, 2]]),
]
SIZE = Size(n_rows=2, longest=128, n_kept=2, window=10, dtype=torch.float64)
IN_CACHE = "streaming, positions in the cache"
DRAFTERS = (
    *("none", *SELF_DRAFT_POLICIES, "speculated, streaming", "speculated, ngram", "speculated, model", "medusa"),
    *(f"standalone, {policy}" for policy in (IN_CACHE, "snapkv", "quantized")),
    *(f"{head}, {IN_CACHE}" for head in ("eagle-3", "P-EAGLE", "dflash 2")),
    *("dflash, quantized", "ngram", "suffix", "combined, standalone, streaming", "ngram: heuristic"),
    *("full: confidence", "full: confidence, auto", "changing"),
)
# Drafters that take turns, and fall behind meanwhile.
CHANGING = ("streaming", "full", f"standalone, {IN_CACHE}", "ngram", f"eagle-3, {IN_CACHE}")
SCRIPT = [Choice(0, 3), PLAIN, PLAIN, PLAIN, Choice(2, 2), Choice(1, 3), Choice(3, 1), Choice(4, 3), Choice(1, 0)]


def drafter_of(runner: ModelRunner, kind: str) -> Drafter | None:
    """Return a drafter that is often wrong. With a schedule it is close to the target, over a cache that keeps all: a
    smaller cache would keep more where called rounds draft less than captured ones."""
    model = near_model() if kind.startswith("full: ") else None
    windows = None if kind.endswith("quantized") else (3, 5)
    return Drafters(runner, 3, SIZE, model, outer="retrieval", windows=windows)(kind)


def run(kind: str, mode: str, new_graphs=None, times: int = 1):
    """Return the output of each of `times` equal calls."""
    runner, prompts = tiny_runner(2, prefill_chunk=8, new_graphs=new_graphs), random_prompts(LENGTHS)
    sampling = [replace(each, temperature=0.0) for each in SAMPLED] if mode == "greedy" else SAMPLED
    how = {"sampling": sampling, "stop_tokens": [[], [], [8, 11, 30], [], [0, 4, 8]]}
    how |= {"max_new_tokens": LIMITS, "verification": mode}
    drafters = [drafter_of(runner, each) for each in (CHANGING if kind == "changing" else (kind,))]
    how |= {"controller": Scripted(drafters, SCRIPT)} if kind == "changing" else {"drafter": drafters[0]}
    return [generate(runner, prompts, **how) for _ in range(times)]


EACH = [*zip(DRAFTERS, cycle(["coupled", "rejection", "greedy"]), strict=False)]


@pytest.mark.parametrize("kind,mode", [each for each in EACH if each[0] not in ("smallest keys", "full: confidence")])
def test_replayed_rounds_give_the_same_tokens(kind, mode):
    """Five ragged requests through two rows, which roll back, finish, idle and are refilled, none alike."""
    graphs: list[RecordedGraph] = []
    [called], [captured] = run(kind, mode), run(kind, mode, partial(RecordedGraphs, recorded=graphs))
    # In captured rounds a model with text drafts also draws tokens after a guess.
    assert captured.tokens == called.tokens or (kind.startswith("combined") and mode == "rejection")
    assert captured.stats.counts == called.stats.counts or kind.startswith("combined")
    assert len({row.accepted for row in called.stats.rows}) > 1 or kind in ("none", "full")
    assert {round_.busy for round_ in captured.stats.rounds} == {1, 2}, "rows end apart"
    assert all(graph.replays for graph in graphs), "what is captured is replayed"


class OnGpu(TorchFunctionMode):
    """Make tensors on the GPU, whatever device is named, except random numbers of a CPU generator."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        is_made = function in _device_constructors() and "generator" not in (kwargs or {})
        return function(*args, **(kwargs or {}) | ({"device": "cuda"} if is_made else {}))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_real_graphs_give_the_same_tokens(kind, mode):
    with OnGpu():
        each, replayed = run(kind, mode, times=2), run(kind, mode, CudaGraphs, times=2)
    tokens, expected = ([out.tokens for out in outputs] for outputs in (replayed, each))
    assert tokens == expected or (kind.startswith("combined") and mode == "rejection")


def test_graphs_without_filters_are_freed_once_a_request_has_filters():
    """Such graphs would never be replayed again, while requests bring new filters as long as a server runs."""
    graphs: list[RecordedGraph] = []
    runner = tiny_runner(2, new_graphs=partial(RecordedGraphs, recorded=graphs))
    decoder = Decoder(runner, drafter=drafter_of(runner, "streaming"), verification="coupled")
    for i, sampling in enumerate([SamplingParams(), *(SamplingParams(0.8, top_k=1 << i, seed=i) for i in range(3))]):
        decode(decoder, request := Request([1, 2, 3], 9, sampling=sampling))
        assert request.tokens == continue_by_recomputing(runner.model, [1, 2, 3], 9, sampling)
        assert sum(not graph.is_destroyed for graph in graphs) == 4
        assert len(graphs) == (8 if i else 4)


def test_graphs_go_with_their_runner_and_with_their_drafter():
    """Graphs are freed without the garbage collector, which might run during a capture."""
    graphs: list[RecordedGraph] = []
    runner = tiny_runner(2, new_graphs=partial(RecordedGraphs, recorded=graphs))
    first, second = drafter_of(runner, "streaming"), drafter_of(runner, "full")

    def generate_with(drafter) -> list[list[int]]:
        return generate(runner, random_prompts([9, 20]), max_new_tokens=12, drafter=drafter).tokens

    gc.collect()
    gc.disable()
    try:
        plain = generate_with(None)
        assert generate_with(first) == plain
        assert generate_with(second) == plain
        before, gone = len(graphs), weakref.ref(first)
        first = None
        assert gone() is None
        assert generate_with(None) == plain
        assert all(graph.is_destroyed for graph in graphs[:before])
        assert len(graphs) == before + 3 and not any(graph.is_destroyed for graph in graphs[before:])
        assert generate_with(second) == plain
        gone, runner, second = weakref.ref(runner), None, None
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("flags,is_captured", [("", True), ("--no_cuda_graphs", False)])
def test_a_gpu_captures_rounds_by_default(flags, is_captured, call, monkeypatch):
    """A whole script on a CPU that is named like a GPU; all graphs are freed at its end."""
    graphs: list[RecordedGraph] = []
    monkeypatch.setattr("bench.session.CudaGraphs", partial(RecordedGraphs, recorded=graphs))
    monkeypatch.setattr("bench.plan.resolve_device", lambda name: "cpu:0")
    monkeypatch.setattr("bench.memory.available_bytes", lambda device: 2**40)
    sizes = "--B 2 --prefix_len 60 --gen_len 12 --draft_budget 16 --dtype float64 --attention torch"
    record = call("tests/selfspec_benchmark.py", f"{sizes} {flags}").record
    assert record["cuda_graphs"] is is_captured and bool(graphs) is is_captured
    assert record["identical_sequences"] == 2
    assert all(graph.replays and graph.is_destroyed for graph in graphs)


WRITES = torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default


class Forgetful(RecordedGraph):
    """A graph whose replay writes wrong entries to caches and leaves outputs as they are."""

    def replay(self) -> None:
        self.replays += 1
        for function, args, *_ in self._recorder.operations:
            if function in WRITES and args[0].is_floating_point():
                function(*args[:2], torch.full_like(args[2], 7))


def test_graphs_that_compute_something_else_change_no_token(capsys, monkeypatch):
    """The parts that verify and accept are then called, with a note; wrong drafts are only rejected."""
    monkeypatch.setattr(RecordedGraphs, "Graph", Forgetful)
    graphs: list[RecordedGraph] = []
    wrong, right = (run("streaming", "greedy", new) for new in (partial(RecordedGraphs, recorded=graphs), None))
    assert [out.tokens for out in wrong] == [out.tokens for out in right] and graphs
    said = capsys.readouterr().err
    assert "verify" in said and "accept" in said
