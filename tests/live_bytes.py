"""The most bytes that tensors made within held at once."""

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for made in out if isinstance(out, list | tuple) else [out]:
            storage = made.untyped_storage()
            if storage.data_ptr() in self._holders or storage.data_ptr() not in given:
                self._hold(storage.data_ptr(), storage.nbytes())
                weakref.finalize(made, self._release, storage.data_ptr(), storage.nbytes())
        return out

    def _hold(self, place: int, n_bytes: int) -> None:
        self._live += 0 if self._holders[place] else n_bytes
        self._holders[place] += 1
        self.peak = max(self.peak, self._live)

    def _release(self, place: int, n_bytes: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            self._live -= n_bytes
            del self._holders[place]
