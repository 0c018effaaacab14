"""Stand-in for CUDA graphs on a CPU: operations are recorded once, with their tensors, and run again in place.

A replay runs no Python, as on a GPU: a value that the host computed while recording, a tensor that is replaced
in the next round, or a buffer that moved shows up as a wrong result. Collectives are recorded too.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kv_cache.quantized import QuantizedKVCache

# Operations whose result, or whose shape, has to be known on the host.
HOST_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "tolist")
# Products of matrices and vectors, which CUDA does not have for integers.
PRODUCTS = ("matmul", "mm", "mv", "bmm", "addmm", "addmv", "baddbmm", "dot")


def waits(function: Any, args: Any) -> bool:
    """Return whether an operation reads a tensor's values back to the host, or has a shape that depends on them."""
    name = function.overloadpacket.__name__
    return name in HOST_READS or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]))


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not waits(function, args), "the host read a value while recording"
        assert function is not torch.ops.aten.lift_fresh.default, "the host made a tensor while recording"
        is_product = function.overloadpacket.__name__ in PRODUCTS
        assert not is_product or args[0].is_floating_point(), "CUDA does not multiply matrices of integers"
        is_collective = function.namespace == "c10d"
        for formal, actual in zip(function._schema.arguments, args, strict=False):
            if (formal.alias_info and formal.alias_info.is_write) or is_collective:
                self.written += [(x, x.clone()) for x in tree_leaves(actual) if isinstance(x, Tensor)]
        results = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, results))
        return results

    def undo(self) -> None:
        """Restore what was written: recording computes nothing."""
        for tensor, before in reversed(self.written):
            tensor.copy_(before)

    def replay(self) -> None:
        for function, args, kwargs, results in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
                elif isinstance(new, torch.ScriptObject):
                    torch.distributed.Work.unbox(new).wait()


class RecordedGraph:
    """A recorded function, and how often it was replayed."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self.replays = 0
        self.is_destroyed = False

    def capture(self, part: Callable[[], Any]) -> Any:
        with patch.object(QuantizedKVCache, "asks_host", False), self._recorder:  # as on a GPU
            outputs = part()
        self._recorder.undo()
        # Outputs are rubbish before a replay.
        inputs = {id(x) for _, args, kwargs, _ in self._recorder.operations for x in tree_leaves((args, kwargs))}
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and id(output) not in inputs and output.is_contiguous():
                output.fill_(1)
        return outputs

    def replay(self) -> None:
        assert not self.is_destroyed, "a destroyed graph is replayed"
        self.replays += 1
        self._recorder.replay()


class RecordedGraphs:
    """Has the interface of `engine.graphs.CudaGraphs`; `recorded` lists all that were captured."""

    Graph = RecordedGraph

    def __init__(self, device: torch.device, recorded: list[RecordedGraph] | None = None) -> None:
        self.recorded = [] if recorded is None else recorded
        self._alive: list[RecordedGraph] = []

    def capture(self, part: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        graph = self.Graph()
        outputs = graph.capture(part)
        self.recorded.append(graph)
        self._alive.append(graph)
        return graph.replay, outputs

    def close(self) -> None:
        for graph in self._alive:
            graph.is_destroyed = True
        self._alive.clear()


class NoHostReads(TorchDispatchMode):
    """Refuse operations that wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not waits(func, args), f"{func} would wait for the device"
        return func(*args, **(kwargs or {}))
