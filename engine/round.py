"""What a round of decoding reads, in buffers that never move, and how its parts run: called, or replayed.

A round has four parts (draft, verify, accept, and rolling the caches back), named with what the round chose to draft
with and how far. Each is a function without arguments over tensors that stay where they are, so on a GPU it can be
captured once as a CUDA graph and replayed from then on: whatever the rows' lengths become, whoever is refilled,
nothing is captured or launched one by one again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.modes import Rows
from engine.noise import Source, in_passes
from engine.runner import ModelRunner
from engine.sampling import LawShape, SamplingParams

Outputs = TypeVar("Outputs")


class Graphs(Protocol):
    """The recorded functions of one runner. `capture` returns what replays `part`, and the tensors that every replay
    fills; `close` destroys all of them, after which others may be captured."""

    def capture(self, part: Callable[[], Any]) -> tuple[Callable[[], object], Any]: ...
    def close(self) -> None: ...


class CudaGraphs:
    """CUDA graphs on a stream and in a memory pool of their own; a pool, since they never run at the same time.

    Destroying one frees the cuBLAS workspace of its stream, whatever else was captured there (pytorch #193402): that
    is why no other owner captures on this stream, and why none of these is destroyed alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, part: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        graph = torch.cuda.CUDAGraph()
        # The thread that watches over NCCL asks the GPU for its progress meanwhile, which "global" would refuse.
        with _uncollected(), torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            outputs = part()
        self._graphs.append(graph)
        return graph.replay, outputs

    def close(self) -> None:
        torch.cuda.synchronize(self._device)  # they are replayed on other streams than their own
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # one that nothing refers to any more cannot be captured into


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: it could hold graphs, and destroying one breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._warm: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[Callable[[], object], Any]] = {}

    def __call__(self, name: Hashable, part: Callable[[], Outputs]) -> Outputs:
        if name not in self._warm:
            self._warm.add(name)
            return part()
        if name not in self._captured:
            self._captured[name] = self._capture(name, part)
        replay, outputs = self._captured[name]
        replay()
        return outputs

    def _capture(self, name: Hashable, part: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        try:
            return self._graphs.capture(part)
        except RuntimeError as error:
            if "captur" not in str(error):  # memory, or another rank
                raise
            raise ConfigError(
                "a part of a round cannot be captured as a CUDA graph",
                where=f"{name}",
                seen=str(error).splitlines()[0],
                required="operations that a CUDA graph can hold",
                fix="add --no_cuda_graphs, or choose another --attention",
            ) from error


def rounds_of(
    runner: ModelRunner, drafters: tuple[object, ...], mode: str, shape: LawShape
) -> tuple[RoundBuffers, Called | Captured]:
    """What the rounds of those drafters in that mode read, and what runs their parts.

    Captured parts are kept by the runner, with all that they hold, for the next run of the same kind: until one of
    their drafters is gone, when all are dropped (see `CudaGraphs`).
    """
    buffers = partial(RoundBuffers, runner.max_batch, shape, runner.device, runner.noise_source)
    if runner.graphs is None:
        return buffers(), Called()
    if any(drafter() is None for held, *_ in runner.captured for drafter in held):
        runner.drop_graphs()
    # What is captured calls these very objects; others in their place have to be captured anew. Drafters refer to
    # the runner: were they held here, neither would go before garbage is collected.
    held = tuple(map(weakref.ref, drafters))
    key = (held, mode, shape, runner.model.backend, runner.model.pointwise, runner.noise_source)
    if key not in runner.captured:
        runner.captured[key] = buffers(), Captured(runner.graphs)
    return runner.captured[key]
