"""How the parts of a round run: called, or captured once as CUDA graphs and replayed from then on."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from common.errors import ConfigError

Outputs = TypeVar("Outputs")


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
        """What replays `part`, and the tensors that every replay fills."""
        graph = torch.cuda.CUDAGraph()
        # The thread that watches over NCCL asks the GPU for its progress meanwhile, which "global" would refuse.
        with _uncollected(), torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            outputs = part()
        self._graphs.append(graph)
        return graph.replay, outputs

    def close(self) -> None:
        """Destroy all of them; after that, others may be captured."""
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


class Captured:
    """Calls each named part once, to warm it up; captures it the second time; replays it from then on.

    What is captured is the function given the second time, with the very tensors that it then found: they, and
    all that they are computed from, have to be the same tensors in every later round.
    Errors: ConfigError if an operation of the part cannot be captured.
    """

    def __init__(self, graphs: CudaGraphs) -> None:
        self._graphs = graphs
        self._warm: set[str] = set()
        self._captured: dict[str, tuple[Callable[[], object], Any]] = {}

    def __call__(self, name: str, part: Callable[[], Outputs]) -> Outputs:
        if name not in self._warm:
            self._warm.add(name)
            return part()
        if name not in self._captured:
            self._captured[name] = self._capture(name, part)
        replay, outputs = self._captured[name]
        replay()
        return outputs

    def _capture(self, name: str, part: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        try:
            return self._graphs.capture(part)
        except RuntimeError as error:
            if "captur" not in str(error):  # memory, or another rank
                raise
            raise ConfigError(
                "a part of a round cannot be captured as a CUDA graph",
                where=name,
                seen=str(error).splitlines()[0],
                required="operations that a CUDA graph can hold",
                fix="add --no_cuda_graphs, or choose another --attention",
            ) from error
