"""A CUDA graph's meaning on a CPU: operations are recorded once, with their tensors, and run again in place.

As on a GPU, a replay runs no Python: a value that the host computed while recording, a tensor that is another
one in the next round, or a buffer that moved shows up as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or whose shape, has to be known on the host.
HOST_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in HOST_READS, "the host read a value while recording"
        assert function is not torch.ops.aten.lift_fresh.default, "the host made a tensor while recording"
        for formal, actual in zip(function._schema.arguments, args, strict=False):
            if isinstance(actual, Tensor) and formal.alias_info and formal.alias_info.is_write:
                self.written.append((actual, actual.clone()))
        results = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, results))
        return results


class RecordedGraph:
    """Has the interface of `engine.rounds.CudaGraph`."""

    def __init__(self) -> None:
        self._operations: list[tuple[Any, tuple, dict, Any]] = []
        self.replays = 0

    def capture(self, part: Callable[[], Any]) -> Any:
        with _Recorder() as recorder:
            outputs = part()
        self._operations = recorder.operations
        # Capturing computes nothing: what was written is undone, and outputs are rubbish before a replay.
        for tensor, before in reversed(recorder.written):
            tensor.copy_(before)
        inputs = {id(x) for _, args, kwargs, _ in self._operations for x in tree_leaves((args, kwargs))}
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and id(output) not in inputs and output.is_contiguous():
                output.fill_(1)
        return outputs

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, results in self._operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
