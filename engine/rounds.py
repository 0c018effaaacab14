"""What a round of decoding reads, in buffers that never move, and how its parts run: called, or replayed.

A round has four parts (draft, verify, accept, and rolling the caches back), named with what the round chose to draft
with and how far. Each is a function without arguments over tensors that stay where they are, so on a GPU it can be
captured once as a CUDA graph and replayed from then on: whatever the rows' lengths become, whoever is refilled,
nothing is captured or launched one by one again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from engine.modes import Rows
from engine.noise import Source, in_passes
from engine.runner import ModelRunner
from engine.sampling import LawShape, SamplingParams

Outputs = TypeVar("Outputs")


class Graph(Protocol):
    """A recorded function: `capture` records `part` and returns the tensors that every `replay` fills."""

    def capture(self, part: Callable[[], Any]) -> Any: ...
    def replay(self) -> None: ...


class CudaGraph:
    """A CUDA graph; the graphs of one round share the memory `pool`, since they never run at the same time."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, part: Callable[[], Any]) -> Any:
        with torch.cuda.graph(self._graph, pool=self._pool):
            return part()

    def replay(self) -> None:
        self._graph.replay()


def cuda_graphs() -> Callable[[], CudaGraph]:
    """A maker of graphs that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


class RoundBuffers:
    """The state that rounds read: `lengths` and `current [B]` int64, and the sampling of each row.

    shape: which of a law's filters any request of the run uses, so that refilled rows change values only.
    """

    def __init__(self, n_rows: int, shape: LawShape, device: torch.device, source: Source = in_passes) -> None:
        idle = [SamplingParams()] * n_rows
        self.rows = Rows.of(idle, [0] * n_rows, device, shape, source)
        self._shape = shape
        self._state = torch.zeros(2, n_rows, dtype=torch.int64, device=device)

    @property
    def lengths(self) -> Tensor:
        """The position of each row's last token."""
        return self._state[0]

    @property
    def current(self) -> Tensor:
        """Each row's last token, which no cache holds yet."""
        return self._state[1]

    def set_rows(self, sampling: Sequence[SamplingParams], requests: Sequence[int]) -> None:
        self.rows.copy_(Rows.of(sampling, requests, self._state.device, self._shape))

    def set_state(self, lengths: Sequence[int], current: Sequence[int]) -> None:
        self._state.copy_(torch.tensor([lengths, current]))


class Called:
    """Runs a part by calling it."""

    captures = False

    def __call__(self, name: Hashable, part: Callable[[], Outputs]) -> Outputs:
        return part()


class Captured:
    """Calls each named part once, to warm it up; captures it the second time; replays it from then on.

    What is captured is the function given the second time, with the very tensors that it then found: they, and
    all that they are computed from, have to be the same tensors in every later round.
    """

    captures = True

    def __init__(self, new_graph: Callable[[], Graph]) -> None:
        self._new_graph = new_graph
        self._warm: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[Graph, Any]] = {}

    @property
    def n_captured(self) -> int:
        return len(self._captured)

    def __call__(self, name: Hashable, part: Callable[[], Outputs]) -> Outputs:
        if name not in self._warm:
            self._warm.add(name)
            return part()
        if name not in self._captured:
            graph = self._new_graph()
            self._captured[name] = graph, graph.capture(part)
        graph, outputs = self._captured[name]
        graph.replay()
        return outputs


def rounds_of(
    runner: ModelRunner, drafters: tuple[object, ...], mode: str, shape: LawShape
) -> tuple[RoundBuffers, Called | Captured]:
    """What the rounds of those drafters in that mode read, and what runs their parts.

    Captured parts are kept by the runner, with all that they hold, for the next run of the same kind.
    """
    buffers = partial(RoundBuffers, runner.max_batch, shape, runner.device, runner.noise_source)
    if runner.new_graph is None:
        return buffers(), Called()
    # What is captured calls these very objects; others in their place have to be captured anew.
    key = (drafters, mode, shape, runner.model.backend, runner.model.pointwise, runner.noise_source)
    if key not in runner.captured:
        runner.captured[key] = buffers(), Captured(runner.new_graph)
    return runner.captured[key]
