"""Run the blocks of a Transformer on a CPU in one call: the kernels of one block, repeated over the weights of others.

Python takes longer to call the kernels of a small model than these take to compute a few tokens.
"""

from collections.abc import Callable, Sequence
from ctypes import c_void_p, cast
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from torch import Tensor, nn

from models.kernels.calls import Call, call, recorded

# The calls of a block of which PyTorch computes nothing. Entries may be stored in several caches.
ATTENTION = ("add_norm", "linear", "rotate_heads", "pack", "store", "attend", "linear")
BLOCK = [*ATTENTION, "add_norm", "linear", "swiglu", "linear"]


class RepeatedBlocks:
    """Blocks whose weights stay where they are. repeat: the kernel that repeats calls."""

    def __init__(self, layers: nn.ModuleList, repeat: Any) -> None:
        self.layers, self._repeat = layers, repeat
        self._are_alike = all(_form(layer) == _form(layers[0]) for layer in layers)
        # `[n_layer, n_tensor]`, of alike layers.
        self._weights = np.array([[x.data_ptr() for x in _weights(layer)] for layer in layers if self._are_alike])

    def run(self, x: Tensor, update: Tensor, step: Any, first: int, end: int) -> tuple[Tensor, Tensor, int]:
        """Run blocks `first` to `end - 1` if they differ by nothing but their weights and their parts of the cache, and
        kernels compute all of them; else block `first`.

        Args and results: those of a block (see `models.llama.Block`), and the number of the block to run next.
        """
        caches = step.cache.by_layer
        if not self._are_alike or caches is None or any(see is not step.visible[first] for see in step.visible):
            return *self.layers[first](x, update, step, first), first + 1
        with recorded() as calls:
            results = self.layers[first](x, update, step, first)
        if end == first + 1 or not _are_all(calls):
            return *results, first + 1
        moves, column_of = self._moves((x, update), results, caches, first, end)
        words, columns = list[int](), list[int]()
        for called in calls:
            words += called.words
            columns += [*[0] * called.n_size, *map(column_of, called.words[called.n_size :])]
        of_blocks = np.ascontiguousarray(np.array(words) + moves[:, columns])
        functions = np.array([cast(called.function, c_void_p).value for called in calls])
        n_words = np.array([len(called.words) for called in calls])
        arrays = (array.ctypes.data for array in (functions, n_words, of_blocks))
        call(self._repeat, (len(of_blocks), len(calls), *arrays), ())
        return *results, end

    def _moves(
        self, inputs: Sequence[Tensor], results: Sequence[Tensor], caches: Sequence[Tensor], first: int, end: int
    ) -> tuple[np.ndarray, Callable[[int], int]]:
        """Return how many bytes after an address of block `first` each later block has its own, `[n_block, n_column]`,
        and the column of an address; column 0 is 0, for what blocks share. A later block's inputs are the results of
        the block before it, which are in one place for all blocks."""
        later = np.arange(1, end - first)
        moves = [0 * later, *(self._weights[first + 1 : end] - self._weights[first]).T]
        columns = {address: column for column, address in enumerate(self._weights[first].tolist(), 1)}
        for given, result in zip(inputs, results, strict=True):
            columns[given.data_ptr()] = len(moves)
            moves.append(0 * later + result.data_ptr() - given.data_ptr())
        parts = []
        for cache in caches:
            start, n_bytes = cache[first].data_ptr(), cache.stride(0) * cache.itemsize
            parts.append((start, start + n_bytes, len(moves)))
            moves.append(n_bytes * later)

        def column_of(address: int) -> int:
            of_cache = (column for start, stop, column in parts if start <= address < stop)
            return columns[address] if address in columns else next(of_cache, 0)

        return np.stack(moves, axis=1), column_of


def _are_all(calls: Sequence[Call]) -> bool:
    """True if these calls are all that a block computes: linear layers and `swiglu` read what the call before wrote."""
    names = [name for name, _ in groupby(called.name for called in calls)]
    return names == BLOCK and all(
        after.words[after.n_size] == before.words[-1]
        for before, after in pairwise(calls)
        if after.name in ("linear", "swiglu")
    )


def _weights(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def _form(layer: nn.Module) -> list[Any]:
    """Return all that the calls of a block depend on, besides the values of tensors."""
    parts = [(name, type(part), _numbers(part)) for name, part in layer.named_modules()]
    return [parts, [(x.shape, x.stride(), x.dtype) for x in _weights(layer)]]


def _numbers(part: nn.Module) -> dict[str, float]:
    return {name: value for name, value in vars(part).items() if isinstance(value, int | float)}
