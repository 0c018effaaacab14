"""The flash backend: the kernels of FlashAttention-2 or -3, whichever of their packages the machine has."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kv_cache.entries import KV
from models.attention.base import MAX_BLOCK, AttentionBackend, AttentionSpec, Slots
from models.attention.torch_backend import TorchAttention, note

LARGEST_HEAD_DIM = 256
# Head dims that are no multiple of it are padded by the kernels: they would copy the whole cache in every call.
HEAD_DIM_STEP = 8
TILE_ROWS = 128  # (token times query head of a group) that one multiprocessor takes at once
# Fewer keys are not worth a split of their own, and more splits are not worth combining.
SMALLEST_SPLIT, MOST_SPLITS = 256, 128


class Package(NamedTuple):
    """One packaging of the kernels: `module` has their `flash_attn_with_kvcache`."""

    title: str
    module: str
    packs_groups: bool  # whether its causal kernel reads a KV head once for all query heads that share it
    has_windows: bool
    dtypes: tuple[torch.dtype, ...]


FA3 = Package("FlashAttention-3", "flash_attn_interface", True, True, (torch.float16, torch.bfloat16))
# The wheel on PyPI: built without windows and without float16.
FA3_FWD = Package("fa3-fwd", "fa3_fwd_interface", True, False, (torch.bfloat16,))
# It has windows, but applies them to rows, and packed rows are not tokens.
FA2 = Package("FlashAttention-2", "flash_attn", False, False, (torch.float16, torch.bfloat16))


@dataclass(frozen=True)
class Flavour:
    """A package that could be imported, on a device with `n_processor` multiprocessors."""

    package: Package
    kernel: Callable[..., Any]
    n_processor: int

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """Why these kernels cannot run a model of that spec; None if they can."""
        title = self.package.title
        if spec.dtype not in self.package.dtypes:
            return f"{title} takes {' or '.join(map(str, self.package.dtypes))}, the model is in {spec.dtype}"
        if spec.head_dim > LARGEST_HEAD_DIM or spec.head_dim % HEAD_DIM_STEP:
            takes = f"takes head dims up to {LARGEST_HEAD_DIM} that are multiples of {HEAD_DIM_STEP}"
            return f"{title} {takes}, the model's is {spec.head_dim}"
        if spec.sliding_window is not None and not self.package.has_windows:
            return f"{title} cannot apply the model's sliding window of {spec.sliding_window} tokens"
        return None


def find_flavour(device: torch.device | str) -> tuple[Flavour | None, str]:
    """The best package for `device` and its name, or None and why: FlashAttention-3 on Hopper, in either packaging,
    FlashAttention-2 else."""
    device = torch.device(device)
    if device.type != "cuda":
        return None, f"the flash kernels need a CUDA device, not {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return None, f"the flash kernels need compute capability 8.0 or newer, this device has {major}.{minor}"
    failures = []
    for package in (FA3, FA3_FWD, FA2) if major == 9 else (FA2,):
        try:
            kernel = importlib.import_module(package.module).flash_attn_with_kvcache
        except Exception as error:  # a package built for another torch or CUDA fails in ways of its own
            failures.append(f"{package.title} ({package.module}): {error}")
        else:
            n_processor = torch.cuda.get_device_properties(device).multi_processor_count
            return Flavour(package, kernel, n_processor), f"{package.title} ({package.module})"
    return None, "no flash package could be imported: " + "; ".join(failures)


def split_count(n_tile: int, n_slot: int, n_processor: int) -> int:
    """Chunks that each row's keys are cut into, so that `n_tile` tiles of queries occupy every multiprocessor.

    Of shapes alone: a captured CUDA graph keeps it while the rows grow.
    """
    return max(1, min(n_processor // n_tile, n_slot // SMALLEST_SPLIT, MOST_SPLITS))


def pack(x: Tensor, n_kv_head: int) -> Tensor:
    """`[B, T, H, D] -> [B, T*G, Hkv, D]`: the G query heads of a KV head become rows, token-major."""
    batch, n_token, n_head, head_dim = x.shape
    grouped = x.view(batch, n_token, n_kv_head, n_head // n_kv_head, head_dim)
    return grouped.transpose(2, 3).reshape(batch, -1, n_kv_head, head_dim)


def unpack(rows: Tensor, n_token: int) -> Tensor:
    """`[B, T*G, Hkv, D] -> [B, T, H, D]`, the inverse of `pack`."""
    batch, n_row, n_kv_head, head_dim = rows.shape
    grouped = rows.view(batch, n_token, n_row // n_token, n_kv_head, head_dim)
    return grouped.transpose(2, 3).reshape(batch, n_token, -1, head_dim)


class Tail(NamedTuple):
    """The block's own slots, which packed rows cannot see through a length."""

    slots: Tensor  # [B, T] int64
    bias: Tensor  # [B, 1, T*G, T] float32: 0 where the row sees the slot, -inf elsewhere
    no_prefix: Tensor  # [B, 1, 1, 1] bool: rows with nothing before the block


class Plan(NamedTuple):
    """How a block goes through the kernels: their arguments, and what they leave out."""

    options: dict[str, Any]
    tail: Tail | None = None


class Prepared(NamedTuple):
    """One forward's block: its plan, if it has one, and what the fallback, or noting, derives once a layer needs it."""

    plan: Plan | None
    for_fallback: Callable[[], Any]
    bias: Callable[[], Any]


class FlashAttention:
    """Flash kernels for blocks whose visibility is a length, and `fallback` for all else.

    FlashAttention-2 is Dao 2023 (arXiv:2307.08691), -3 is Shah et al. 2024 (arXiv:2407.08608). Both mask by
    row number, so positions have to be consecutive in each row; one that idles, several queries at position 0,
    gets finite values.
    """

    name = "flash"

    def __init__(self, flavour: Flavour, fallback: AttentionBackend) -> None:
        self.flavour, self.fallback = flavour, fallback

    def dequantizes(self, n_token: int) -> bool:
        return self.fallback.dequantizes(n_token)

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: Slots) -> Prepared:
        """The kernel's arguments for queries at `[B, T]`.

        Falls back on slots in any other order than that of positions, on chunks of more than MAX_BLOCK
        tokens that do not end their view, and on specs that the flavour does not support.
        """
        n_token = queries.shape[1]
        expressible = slots.in_order and (n_token <= MAX_BLOCK or slots.block_ends_view)
        plan = None
        if expressible and self.flavour.unsupported(spec) is None:
            if self.flavour.package.packs_groups or spec.group_size == 1 or n_token == 1 or n_token > MAX_BLOCK:
                plan = self._plan_causal(spec, queries, slots)
            else:
                plan = _plan_packed(spec, queries, slots)
        of_others = (partial(one.prepare, spec, queries, slots) for one in (self.fallback, TorchAttention()))
        return Prepared(plan, *map(cache, of_others))

    def attend(self, q: Tensor, kv: KV, prepared: Prepared) -> Tensor:
        plan = prepared.plan
        if plan is None or kv.keys.dtype != q.dtype:
            return self.fallback.attend(q, kv, prepared.for_fallback())
        if kv.noted is not None:  # by a product of its own, so that the output's bits stay what they are
            note(q, kv.dequantized(q.dtype)[0].transpose(1, 2), prepared.bias(), kv)
        if plan.tail is None:
            return self.flavour.kernel(q, kv.keys, kv.values, **plan.options)
        rows = pack(q, kv.keys.shape[2])
        prefix, lse = self.flavour.kernel(rows, kv.keys, kv.values, return_softmax_lse=True, **plan.options)
        return unpack(_add_tail(rows, prefix, lse, kv, plan.tail), q.shape[1])

    def _plan_causal(self, spec: AttentionSpec, queries: Tensor, slots: Slots) -> Plan:
        """The kernel's own causal mask: the last query sees the last of its row's keys."""
        (batch, n_token), n_slot = queries.shape, slots.positions.shape[1]
        options: dict[str, Any] = {"causal": True, **_stored_rows(slots)}
        if n_token <= MAX_BLOCK:  # a chunk sees the whole of its view
            options["cache_seqlens"] = (queries[:, -1] + 1).to(torch.int32)
        if spec.sliding_window is not None:
            options["window_size"] = (spec.sliding_window - 1, 0)
        if self.flavour.package.packs_groups:
            n_tile = batch * spec.n_kv_head * -(-n_token * spec.group_size // TILE_ROWS)
            options["num_splits"] = split_count(n_tile, n_slot, self.flavour.n_processor)
            options["pack_gqa"] = spec.group_size > 1
        return Plan(options)


def _plan_packed(spec: AttentionSpec, queries: Tensor, slots: Slots) -> Plan:
    """All query heads of a KV head as rows of one call over what precedes the block, which all of them see.

    FlashAttention-2 packs the group by itself only where T is 1; else it would read each KV head once per
    query head. It chooses its splits by shapes alone.
    """
    n_token, n_slot = queries.shape[1], slots.positions.shape[1]
    first = queries[:, :1]
    own = first + torch.arange(n_token, device=queries.device)
    seen = own[:, None, :] <= queries[:, :, None]
    bias = torch.zeros(seen.shape, dtype=torch.float32, device=queries.device).masked_fill_(~seen, float("-inf"))
    tail = Tail(
        # Where positions repeat, those past the last one may lie beyond the view; no query sees them.
        slots=own.clamp(max=n_slot - 1),
        bias=bias.repeat_interleave(spec.group_size, dim=1)[:, None],
        no_prefix=(first == 0)[:, :, None, None],
    )
    return Plan({"causal": False, "cache_seqlens": first[:, 0].to(torch.int32), **_stored_rows(slots)}, tail)


def _stored_rows(slots: Slots) -> dict[str, Tensor]:
    """The kernels' own map from rows of queries to rows of the cache."""
    return {} if slots.rows is None else {"cache_batch_idx": slots.rows.to(torch.int32)}


def _add_tail(rows: Tensor, prefix: Tensor, lse: Tensor, kv: KV, tail: Tail) -> Tensor:
    """Attention of `rows [B, R, Hkv, D]` over prefix and tail, from that over the prefix and its `lse [B, Hkv, R]`.

    One softmax in which the whole prefix is one more key, with `lse` for a score and `prefix` for a value.
    """
    stored = torch.arange(rows.shape[0], device=rows.device) if kv.rows is None else kv.rows
    keys, values = (x[stored[:, None], tail.slots].transpose(1, 2).float() for x in (kv.keys, kv.values))
    scores = rows.transpose(1, 2).float() @ keys.transpose(2, 3) * rows.shape[-1] ** -0.5 + tail.bias
    # No keys at all: the output is 0, but lse is inf in some versions and -inf in others.
    prefix_score = lse[..., None].masked_fill(tail.no_prefix, float("-inf"))
    weights = torch.cat([prefix_score, scores], dim=-1).softmax(dim=-1)
    out = weights[..., :1] * prefix.transpose(1, 2) + weights[..., 1:] @ values
    return out.transpose(1, 2).to(rows.dtype)
