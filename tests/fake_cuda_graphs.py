"""What `torch.cuda` does around CUDA graphs, on a CPU: streams, memory pools, and cuBLAS workspaces by stream.

A graph bakes in the workspace that its stream had when it was captured, and destroying any graph of a stream frees
that (pytorch #193402). A pool lives as long as a graph that was captured into it, and cannot be named again after.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from recorded_graph import Recorder


class FakeCuda:
    """Takes the place of what `engine.graphs.CudaGraphs` calls; `default_stream` is where everybody else captures."""

    default_stream = "the capture stream of all"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspaces: dict[object, object] = {}
        self.graphs_of_pool: dict[object, int] = {}
        self.capturing: FakeGraph | None = None
        self.is_invalid = False
        self.n_destroyed = 0
        for name, value in (
            ("Stream", lambda device: object()),
            ("synchronize", lambda device: None),
            ("graph_pool_handle", lambda: f"pool {len(self.graphs_of_pool)}"),
            ("CUDAGraph", lambda: FakeGraph(self)),
            ("graph", self.graph),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def graph(
        self, graph: FakeGraph, pool: object = None, stream: object = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert self.capturing is None, "one capture at a time"
        assert capture_error_mode == "thread_local", "NCCL's watchdog breaks the capture"
        assert self.graphs_of_pool.get(pool) != 0, "the pool is gone with its last graph"
        self.capturing = graph
        graph.pool, graph.stream = pool, stream or self.default_stream
        self.graphs_of_pool[pool] = self.graphs_of_pool.get(pool, 0) + 1
        graph.workspace = self.workspaces.setdefault(graph.stream, object())
        try:
            with graph.recorder:
                yield
        finally:
            self.capturing = None
        assert not self.is_invalid, "the capture is invalid: a graph was destroyed meanwhile"
        graph.recorder.undo()


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.recorder = cuda, Recorder()
        self.pool: object = None
        self.stream: object = None
        self.workspace: object = None

    def replay(self) -> None:
        assert self.workspace is not None, "a destroyed graph is replayed"
        assert self._cuda.workspaces.get(self.stream) is self.workspace, "illegal address: its workspace was freed"
        self.recorder.replay()

    def reset(self) -> None:
        self._cuda.is_invalid |= self._cuda.capturing is not None
        if self.workspace is not None:
            self.workspace = None
            self._cuda.n_destroyed += 1
            self._cuda.graphs_of_pool[self.pool] -= 1
            self._cuda.workspaces.pop(self.stream, None)

    def __del__(self) -> None:
        self.reset()


class Garbage:
    """A cycle that only the garbage collector frees, and a graph in it."""

    def __init__(self, graph: FakeGraph) -> None:
        self.graph, self.itself = graph, self


def collecting(part):
    """`part`, while so much is allocated that garbage is collected, if it may be."""

    def collected():
        if gc.isenabled():
            gc.collect()
        return part()

    return collected
