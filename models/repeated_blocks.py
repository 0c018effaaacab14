"""Run the blocks of a model on a CPU in one call: a block's calls of kernels, repeated with the addresses of others.

Python takes a large part of a small model's step to call its kernels.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_void_p, cast
from itertools import chain, groupby
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from models.kernels.calls import Call, call, recorded
from models.kernels.packed_linear import PackedLinear
from models.kernels.quantize import Int4Linear, Int8Linear
from models.kernels.row_bits import CHUNK
from models.llama import Attention, Block, FeedForward, QueryKeyNorm, Step, Transformer, run_in_turn

KINDS = (Block, Attention, FeedForward, QueryKeyNorm, nn.RMSNorm, PackedLinear, Int4Linear, Int8Linear)
# The calls of a block that kernels compute. `store` is called for each cache that entries are written to.
CALLS = ["add_norm", "linear", "rotate_heads", "pack", "store", "attend", "linear"]
CALLS += ["add_norm", "linear", "swiglu", "linear"]


def repeat_blocks(model: Transformer) -> None:
    """Let a model run its blocks in one call where kernels compute them, as long as its weights stay in place."""
    layers, repeat = model.layers, model.pointwise.repeat
    parts = [part for layer in layers for part in layer.modules()]
    is_known = repeat is not None and all(type(part) in KINDS and not part._forward_hooks for part in parts)
    is_uniform = is_known and all(_structure(layer) == _structure(layers[0]) for layer in layers)
    model.run_blocks = RepeatedBlocks(layers, repeat).run if is_uniform else run_in_turn


class Region(NamedTuple):
    """Memory that the calls of a block use. moves: the distance in bytes to that of each later block, `[n_block]`."""

    start: int
    n_bytes: int
    moves: np.ndarray


class RepeatedBlocks:
    """Runs blocks of one structure: the first in Python, the others by repeating its calls.

    repeat: the kernel that repeats calls of kernels.
    """

    def __init__(self, layers: nn.ModuleList, repeat: Any) -> None:
        self._layers, self._repeat = layers, repeat
        self._weights = [_weights(layer) for layer in layers]
        self._loaded = self._addresses_now()
        self._addresses = np.array(self._loaded)  # `[n_layer, n_tensor]`
        parts = [*layers.modules()]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._content = [each for part in parts for each in (part._modules, part._parameters, part._buffers) if each]
        self._known = [*_values(self._content)]

    def run(
        self, layers: nn.ModuleList, x: Tensor, update: Tensor, step: Step, first: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Run blocks as `run_in_turn` does, in one call after the first if only addresses of their calls differ."""
        if end - first < 2 or not self._can_repeat(layers, x, update, step, first, end):
            return run_in_turn(layers, x, update, step, first, end)
        with recorded() as calls:
            results = layers[first](x, update, step, first)
        if [name for name, _ in groupby(each.name for each in calls)] != CALLS:
            return run_in_turn(layers, results[0], results[1], step, first + 1, end)
        later = np.arange(1, end - first)
        steps = (self._addresses[first + 1 : end] - self._addresses[first]).T
        regions = [Region(x.data_ptr(), x.nbytes, moves) for x, moves in zip(self._weights[first], steps, strict=True)]
        for cache in step.cache.by_layer or ():
            n_bytes = cache.stride(0) * cache.itemsize
            regions.append(Region(cache[first].data_ptr(), n_bytes, n_bytes * later))
        for given, result in zip((x, update), results, strict=True):  # later blocks read and write what the first wrote
            move = result.data_ptr() - given.data_ptr()
            regions.append(Region(given.data_ptr(), given.nbytes, np.full(len(later), move)))
        self._repeat_calls(calls, regions, len(later))
        return results

    def _can_repeat(self, layers: nn.ModuleList, x: Tensor, update: Tensor, step: Step, first: int, end: int) -> bool:
        """True if these are the blocks as they were loaded, each uses its part of the caches, and `x` has so few tokens
        that Python's share of the time counts."""
        caches, visible = step.cache.by_layer, step.visible[first]
        if layers is not self._layers or caches is None or any(len(cache) < end for cache in caches):
            return False
        if len(x) >= CHUNK or not (x.is_contiguous() and update.is_contiguous()) or any(self._hooks):
            return False
        if any(see is not visible for see in step.visible[first:end]):
            return False
        return all(map(is_, _values(self._content), self._known)) and self._addresses_now() == self._loaded

    def _addresses_now(self) -> list[list[int]]:
        return [[x.data_ptr() for x in weights] for weights in self._weights]

    def _repeat_calls(self, calls: Sequence[Call], regions: Sequence[Region], n_block: int) -> None:
        """Repeat the calls of a block for each later block. Blocks share what lies outside all regions."""
        regions = sorted(regions, key=lambda region: region.start)
        starts, fixed = [region.start for region in regions], np.zeros(n_block, dtype=np.int64)

        def moves_of(address: int) -> np.ndarray:
            region = regions[bisect_right(starts, address) - 1]
            return region.moves if region.start <= address < region.start + region.n_bytes else fixed

        words, moves = list[int](), list[np.ndarray]()
        for each in calls:
            words += [*each.sizes, *each.addresses]
            moves += [*[fixed] * len(each.sizes), *map(moves_of, each.addresses)]
        of_blocks = np.ascontiguousarray(np.array(words) + np.stack(moves, axis=1))
        functions = np.array([cast(each.kernel, c_void_p).value for each in calls])
        n_words = np.array([len(each.sizes) + len(each.addresses) for each in calls])
        arrays = (array.ctypes.data for array in (functions, n_words, of_blocks))
        call(self._repeat, (n_block, len(calls), *arrays), ())


def _values(content: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(each.values() for each in content)


def _weights(layer: nn.Module) -> list[Tensor]:
    """Return a block's weights, without those in a layout of oneDNN, which have no address."""
    return [x for x in (*layer.parameters(), *layer.buffers()) if x.layout == torch.strided]


def _structure(layer: nn.Module) -> list[Any]:
    """Return what the calls of a block depend on, besides its weights."""
    numbers = [
        (type(part), [x for x in vars(part).items() if isinstance(x[1], int | float)]) for part in layer.modules()
    ]
    return [numbers, [(x.shape, x.stride(), x.dtype) for x in _weights(layer)]]
