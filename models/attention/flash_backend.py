"""The flash backend: the kernels of FlashAttention-2 or -3, from the best package that is installed."""

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kv_cache.entries import KV
from models.attention.base import MAX_BLOCK, AnySlots, AttentionBackend, AttentionSpec
from models.attention.torch_backend import TorchAttention, fill_chunk_scores
from models.kernels.build import BuildError

LARGEST_HEAD_DIM = 256
# The kernels pad head dims that are not multiples, by a copy of the whole cache in every call.
HEAD_DIM_STEP = 8
TILE_ROWS = 128  # rows (token times query head of a group) that a multiprocessor takes at once
# The fewest keys that are worth a split, and the most splits that are worth combining.
SMALLEST_SPLIT, MOST_SPLITS = 256, 128


class Package(NamedTuple):
    """A package with the kernels."""

    title: str
    module: str  # has `flash_attn_with_kvcache`
    packs_groups: bool  # the causal kernel reads a KV head once for all query heads of its group
    has_windows: bool
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return f"{self.title} ({self.module})"

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """Return why the kernels cannot run a model of this shape; None if they can."""
        if spec.dtype not in self.dtypes:
            return f"{self.title} takes {' or '.join(map(str, self.dtypes))}, the model is in {spec.dtype}"
        if spec.head_dim > LARGEST_HEAD_DIM or spec.head_dim % HEAD_DIM_STEP:
            takes = f"takes head dims up to {LARGEST_HEAD_DIM} that are multiples of {HEAD_DIM_STEP}"
            return f"{self.title} {takes}, the model's is {spec.head_dim}"
        if spec.sliding_window is not None and not self.has_windows:
            return f"{self.title} cannot apply the model's sliding window of {spec.sliding_window} tokens"
        return None


FA3 = Package("FlashAttention-3", "flash_attn_interface", True, True, (torch.float16, torch.bfloat16))
# The wheel on PyPI: built without windows and without float16.
FA3_FWD = Package("fa3-fwd", "fa3_fwd_interface", True, False, (torch.bfloat16,))
# It packs only the group of a single token, and only without a window.
FA2 = Package("FlashAttention-2", "flash_attn", False, False, (torch.float16, torch.bfloat16))


def find_package(device: torch.device | str) -> tuple[Package, Callable[..., Any], int]:
    """Return the best package for a device, its kernel, and the device's number of multiprocessors: FlashAttention-3 on
    Hopper, from either package, else FlashAttention-2. Raises BuildError."""
    device = torch.device(device)
    if device.type != "cuda":
        raise BuildError(f"the flash kernels need a CUDA device, not {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise BuildError(f"the flash kernels need compute capability 8.0 or newer, this device has {major}.{minor}")
    failures = []
    for package in (FA3, FA3_FWD, FA2) if major == 9 else (FA2,):
        try:
            kernel = importlib.import_module(package.module).flash_attn_with_kvcache
        except Exception as error:  # a package built for another torch or CUDA may raise anything
            failures.append(f"{package}: {error}")
        else:
            return package, kernel, torch.cuda.get_device_properties(device).multi_processor_count
    raise BuildError("no flash package could be imported: " + "; ".join(failures))


def split_count(n_tile: int, n_slot: int, n_processor: int) -> int:
    """Return the number of chunks of each row's keys with which `n_tile` tiles of queries fill the multiprocessors.

    It depends on shapes alone, so that a captured CUDA graph stays valid as rows grow.
    """
    return max(1, min(n_processor // n_tile, n_slot // SMALLEST_SPLIT, MOST_SPLITS))


class FlashPrepared(NamedTuple):
    """The kernel's arguments, and functions that prepare other backends if a layer needs them."""

    options: dict[str, Any] | None  # None: the fallback runs
    for_fallback: Callable[[], Any]
    bias: Callable[[], Any]


class FlashAttention:
    """Attention by flash kernels for blocks whose visibility is a length, and by `fallback` for all other blocks.

    FlashAttention-2: Dao 2023 (arXiv:2307.08691); FlashAttention-3: Shah et al. 2024 (arXiv:2407.08608). The kernels
    mask by index, so the positions of a row have to be consecutive. An idle row, with several queries at position 0,
    gets finite values.
    """

    name = "flash"

    def __init__(
        self, package: Package, kernel: Callable[..., Any], n_processor: int, fallback: AttentionBackend
    ) -> None:
        self.package, self.kernel, self.n_processor, self.fallback = package, kernel, n_processor, fallback

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> FlashPrepared:
        """Return the kernel's arguments for queries at `[B, T]`; its causal mask ends at the last key of each row.

        The fallback runs if slots are not in the order of positions, if a chunk of more than MAX_BLOCK tokens does not
        end its view, if the package does not support the shape, and if it would read a KV head once for each query
        head: for blocks of 2 to MAX_BLOCK tokens in a package that packs no groups.
        """
        n_token = queries.shape[1]
        in_view = slots.in_order and (n_token <= MAX_BLOCK or slots.block_ends_view)
        reads_once = self.package.packs_groups or spec.group_size == 1 or not 1 < n_token <= MAX_BLOCK
        runs = in_view and reads_once and self.package.unsupported(spec) is None
        options = self._options(spec, queries, slots) if runs else None
        prepared = (partial(backend.prepare, spec, queries, slots) for backend in (self.fallback, TorchAttention()))
        return FlashPrepared(options, *map(cache, prepared))

    def attend(self, q: Tensor, kv: KV, prepared: FlashPrepared) -> Tensor:
        if prepared.options is None or kv.packed is not None or kv.keys.dtype != q.dtype:
            return self.fallback.attend(q, kv, prepared.for_fallback())
        if kv.chunk_scores is not None:  # by a separate product, so that the output's bits stay the same
            keys = kv.keys if kv.rows is None else kv.keys[kv.rows]
            fill_chunk_scores(q, keys.transpose(1, 2), prepared.bias(), kv)
        return self.kernel(q, kv.keys, kv.values, **prepared.options)

    def _options(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> dict[str, Any]:
        (batch, n_token), n_slot = queries.shape, slots.positions.shape[1]
        options: dict[str, Any] = {"causal": True}
        if slots.rows is not None:
            options["cache_batch_idx"] = slots.rows.to(torch.int32)
        if n_token <= MAX_BLOCK:  # a chunk sees its whole view
            options["cache_seqlens"] = (queries[:, -1] + 1).to(torch.int32)
        if spec.sliding_window is not None:
            options["window_size"] = (spec.sliding_window - 1, 0)
        if self.package.packs_groups:
            n_tile = batch * spec.n_kv_head * -(-n_token * spec.group_size // TILE_ROWS)
            options["num_splits"] = split_count(n_tile, n_slot, self.n_processor)
            options["pack_gqa"] = spec.group_size > 1
        return options
