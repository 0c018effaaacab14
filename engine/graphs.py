"""CUDA graphs of the parts of a round: each is captured once, and replayed from then on."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.errors import flag, refuse
from common.say import say
from engine.parallel.ranks import Ranks
from engine.sampling.distribution import Filters

Outputs = TypeVar("Outputs")
ROUNDING = 1e-2  # relative to the largest number


class CudaGraphs:
    """CUDA graphs on a separate stream, which share a memory pool, since they never run at the same time.

    Destroying a graph frees the cuBLAS workspace of its stream, whatever else was captured there (pytorch #193402). So
    nothing else is captured on this stream, and graphs are only destroyed together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, part: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Capture `part`; return a function that replays it, and the tensors that every replay fills."""
        graph = torch.cuda.CUDAGraph()
        was_enabled = gc.isenabled()
        gc.disable()  # garbage could hold graphs, and destroying one breaks a capture
        try:
            # The thread that watches over NCCL asks the GPU for its progress meanwhile, which "global" would refuse.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                outputs = part()
        finally:
            if was_enabled:
                gc.enable()
        self._graphs.append(graph)
        return graph.replay, outputs

    def close(self) -> None:
        """Destroy all graphs; others may be captured afterwards."""
        torch.cuda.synchronize(self._device)  # graphs are replayed on other streams
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be captured into


class BatchKey(NamedTuple):
    """The kind of the rounds that read a batch: weak references to a decoder's drafters, the mode, the filters, and the
    model's kernels."""

    drafters: tuple[ReferenceType[Any], ...]
    mode: str
    filters: Filters
    kernels: tuple[Any, ...]


class GraphKey(NamedTuple):
    """Identifies a captured part by all that it depends on, besides the values of its tensors; one capture per key."""

    part: str
    batch: BatchKey
    drafter: int  # its `id`
    gamma: int
    n_rows: int
    observes: bool
    is_masked: bool


class CapturedParts:
    """Calls each part the first time, to warm it up; captures it the second time; replays it from then on.

    The function that is given the second time is captured, with the very tensors that it then finds: these, and all
    that they are computed from, must stay in place. A `checked` part is replayed and called that time; if the results
    differ, it is always called. Errors: ConfigError if an operation of the part cannot be captured.

    batches: the tensors that captured parts read, by the kind of round; kept for the next decode of that kind.
    captured: for each part, its replay and outputs; None before the second time.
    """

    def __init__(self, graphs: CudaGraphs, ranks: Ranks) -> None:
        self._graphs, self._ranks, self.batches = graphs, ranks, dict[BatchKey, Any]()
        self.captured: dict[GraphKey, tuple[Callable[[], object], Any] | None] = {}
        self._wrong: set[GraphKey] = set()

    def drop(self) -> None:
        """Destroy all graphs with their memory; parts are captured anew."""
        self.batches.clear()
        self.captured.clear()
        self._wrong.clear()
        self._graphs.close()

    def drop_freed(self) -> None:
        """Destroy all graphs if a drafter of any of them was freed."""
        if any(drafter() is None for key in self.batches for drafter in key.drafters):
            self.drop()

    def __call__(self, key: GraphKey, part: Callable[[], Outputs], checked: bool = False) -> Outputs:
        """Run a part. checked: compare its first replay with a call; running twice is safe."""
        if key not in self.captured:
            self.captured[key] = None
            return part()
        known = self.captured[key]
        replay, outputs = self.captured[key] = known or self._capture(key.part, part)
        if key not in self._wrong:
            replay()
            if known or not checked:
                return outputs
        called = part()  # after the replay, to overwrite entries that a wrong replay has written
        if key not in self._wrong:
            if all(self._ranks.all_gather_object(_agree(outputs, called))):
                return outputs
            self._wrong.add(key)
            what = f"replayed as a CUDA graph, {key.part} gives other numbers"
            say(f"note: {what}; it is called instead, which is slower")
        # Other graphs read the captured outputs, which stay where they are.
        for kept, new in zip(tree_leaves(outputs), tree_leaves(called), strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(new)
        return outputs

    def _capture(self, name: str, part: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        try:
            return self._graphs.capture(part)
        except RuntimeError as error:
            if "captur" not in str(error):  # memory, or another rank
                raise
            what, seen = "a part of a round cannot be captured as a CUDA graph", str(error).splitlines()[0]
            fix = f"add {flag('no_cuda_graphs')}, or choose another {flag('attention')}"
            refuse(f"part {name} of a round", seen, "operations that a CUDA graph can hold", what, fix)


def _agree(found: Any, expected: Any) -> bool:
    """Return whether tensors are equal, up to rounding where they are of floating point."""
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(x, Tensor):
            finite = y[y.isfinite()]
            room = ROUNDING * float(finite.abs().max()) if y.is_floating_point() and len(finite) else 0
            if not torch.allclose(x, y, rtol=0, atol=room, equal_nan=True):
                return False
    return True
