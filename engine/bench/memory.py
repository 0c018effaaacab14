"""Will it fit: weights, caches and activations itemised before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from common.errors import OutOfMemoryError, flag
from engine.noise import blocks_per_pass
from engine.sampling import SamplingParams
from kv_cache.entries import largest
from models import ModelConfig
from models.packed_linear import can_pack
from models.quantize import DEQUANTIZING_BYTES, INT8_OUTPUT_BYTES, linear_bytes

GIB = 2**30
# Per logit: the distributions of target and draft, two temporaries in float32, a Gumbel, a float64 uniform ...
SAMPLING_BYTES = 4 * 4 + 4 + 8
# ... and for filters sorted values and their indices, four float64 temporaries of masses, ranks and masks.
FILTER_BYTES = 4 + 8 + 4 * 8 + 8
# What a pass of the random number generator holds per block: its words and their products, in int64.
PASS_BYTES = 16 * 8
# What CUDA takes beside the context, which free memory is counted without: workspaces of cuBLAS and cuBLASLt, on Hopper
# 32 MiB each for every stream; kernels, which libraries load when they first run; nodes of graphs; what the allocator's
# blocks leave unused. A round number that nobody has measured: gpu.py records planned beside peak bytes.
CUDA_BYTES = GIB
# Buffers of one NCCL communicator (NVIDIA/nccl issue 864 reports 1.6 GB); symmetric memory's 8 MiB drown in them.
NCCL_BYTES = 1600 * 10**6
# Tokens a row that a draft runs at once, at most: a standalone draft starts its rounds with two.
DRAFT_BLOCK = 2


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run needs. Cache and logits bytes grow with the batch, weights and activations do not.

    dequantized_per_row: what attention holds, for one layer at a time, where it cannot read 8-bit entries.
    captured_per_row: logits and distributions that graphs of other rounds than the one that runs keep.
    libraries: what no tensor holds.
    """

    weights: int
    target_kv_per_row: int
    draft_kv_per_row: int
    activations: int
    logits_per_row: int
    dequantized_per_row: int = 0
    captured_per_row: int = 0
    libraries: int = 0

    def items(self, batch: int) -> dict[str, int]:
        return {
            "weights": self.weights,
            "target KV": batch * self.target_kv_per_row,
            "draft KV": batch * self.draft_kv_per_row,
            "dequantised KV": batch * self.dequantized_per_row,
            "logits": batch * self.logits_per_row,
            "outputs of captured rounds": batch * self.captured_per_row,
            "activations": self.activations,
            "CUDA and NCCL": self.libraries,
        }

    def total(self, batch: int) -> int:
        return sum(self.items(batch).values())

    def largest_batch(self, available: int) -> int:
        """The largest batch whose total is within `available` bytes; 0 if none is."""
        return max(0, (available - self.total(0)) // (self.total(1) - self.total(0)))


@dataclass(frozen=True)
class DraftFootprint:
    """A draft model of that (shard's) configuration in `dtype`, and its caches in `kv_dtype`.

    capacities: KV entries a row of each cache; one of them is read at a time. observed: how many queries select
    entries (SnapKV). prefills: whether it runs the prompts itself. dequantizes: as of `plan_memory`, of the draft's
    entries.
    """

    config: ModelConfig
    dtype: torch.dtype
    capacities: tuple[int, ...]
    shares_weights: bool
    quantize: str | None = None
    kv_dtype: torch.dtype | None = None
    observed: int = 0
    prefills: bool = False
    dequantizes: Callable[[int], bool] | None = None


def plan_memory(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    draft: DraftFootprint | None = None,
    device: str,
    capacity: int,
    block: int,
    prefill_chunk: int,
    sampling: SamplingParams | None = None,
    vocab_size: int | None = None,
    quantize: str | None = None,
    kv_dtype: torch.dtype | None = None,
    dequantizes: Callable[[int], bool] | None = None,
    captured_rows: int = 0,
    n_communicator: int = 0,
) -> MemoryPlan:
    """Estimate a run of `capacity` cache entries a row whose verification takes `block` tokens a row.

    `dequantizes`: whether attention over blocks of so many tokens turns the target's 8-bit entries into `dtype` first;
    None where entries have more bits. `sampling` holds distributions and noise beside the logits; None is greedy. Of a
    sharded model, `config` is that of the shard, and `vocab_size` that of the whole model, whose logits meet on one
    rank. `captured_rows`: how many `[V]` of logits and distributions the graphs of other rounds keep for a row;
    `n_communicator`: how many NCCL has.
    """
    itemsize, logit_size = dtype.itemsize, max(4, dtype.itemsize)
    head_size = INT8_OUTPUT_BYTES if quantize else itemsize  # a quantised head is in 8 bits
    vocab_size = vocab_size or config.vocab_size
    on_cuda = torch.device(device).type == "cuda"
    chunk_rows = prefill_chunk * (3 * config.ffn_dim + 4 * config.n_head * config.head_dim + 4 * config.dim)
    chunk_mask = prefill_chunk * capacity
    noise_pass = sampling_bytes = 0
    if sampling and not sampling.greedy:
        noise_pass = blocks_per_pass(torch.device(device)) * PASS_BYTES
        sampling_bytes = SAMPLING_BYTES + (FILTER_BYTES if sampling.filters else 0)
    weights = _weight_bytes(config, dtype, device, quantize)
    draft_kv_per_row = selection = 0
    dequantized_per_row = _dequantized_bytes(config, dtype, capacity, dequantizes, block)
    dequantized_prefill = _dequantized_bytes(config, dtype, capacity, dequantizes, prefill_chunk)
    if draft:
        if not draft.shares_weights:
            weights += _weight_bytes(draft.config, draft.dtype, device, draft.quantize)
        kv_bytes_per_token = _kv_bytes_per_token(draft.config, draft.kv_dtype or draft.dtype)
        draft_kv_per_row = sum(draft.capacities) * kv_bytes_per_token
        if draft.observed:
            observed = draft.config if draft.prefills else config
            # One row and layer at a time: float32 scores, masked and after the softmax, and keys in order.
            scores = 3 * draft.observed * observed.n_head
            selection = 4 * capacity * (scores + 2 * observed.n_kv_head * observed.head_dim)
            if draft.prefills:  # a whole row, which the policy then selects from
                selection += capacity * kv_bytes_per_token
        # Target and draft never attend at once.
        largest = max(draft.capacities)
        drafting = _dequantized_bytes(draft.config, draft.dtype, largest, draft.dequantizes, DRAFT_BLOCK)
        dequantized_per_row = max(dequantized_per_row, drafting)
        if draft.prefills:
            context = capacity if draft.observed else largest
            filling = _dequantized_bytes(draft.config, draft.dtype, context, draft.dequantizes, prefill_chunk)
            dequantized_prefill = max(dequantized_prefill, filling)
    return MemoryPlan(
        weights=weights,
        target_kv_per_row=capacity * _kv_bytes_per_token(config, kv_dtype or dtype),
        draft_kv_per_row=draft_kv_per_row,
        activations=(chunk_rows + 2 * chunk_mask) * itemsize
        + noise_pass
        + selection
        + max(0, dequantized_prefill - dequantized_per_row)
        + (_dequantized_weights(config, quantize, draft) if on_cuda else 0)
        + (prefill_chunk * 2 * config.ffn_dim * INT8_OUTPUT_BYTES if quantize == "int8" else 0),
        logits_per_row=block * vocab_size * (head_size + logit_size + sampling_bytes),
        dequantized_per_row=dequantized_per_row,
        captured_per_row=captured_rows * vocab_size * logit_size,
        libraries=CUDA_BYTES + n_communicator * NCCL_BYTES if on_cuda else 0,
    )


def _dequantized_weights(config: ModelConfig, quantize: str | None, draft: DraftFootprint | None) -> int:
    """What the largest layer in 4 bits takes while many rows are multiplied by it on a GPU."""
    models = [(config, quantize), *([(draft.config, draft.quantize)] if draft else [])]
    largest = (
        max(2 * one.ffn_dim, (one.n_head + 2 * one.n_kv_head) * one.head_dim) * one.dim
        for one, scheme in models
        if scheme == "int4"
    )
    return DEQUANTIZING_BYTES * max(largest, default=0)


def _weight_bytes(config: ModelConfig, dtype: torch.dtype, device: str, quantize: str | None) -> int:
    """Bytes of one copy of the weights; repacking or quantising holds a tied embedding twice."""
    head = config.vocab_size * config.dim
    if quantize is None:
        repacked_head = head if config.tie_embeddings and can_pack(device, dtype) else 0
        return (config.n_parameters + repacked_head) * dtype.itemsize
    linear = config.n_layer * config.n_linear_weights_per_layer
    other = config.n_parameters - linear - (0 if config.tie_embeddings else head)
    return linear_bytes(linear, quantize) + linear_bytes(head, "int8") + other * dtype.itemsize


def _kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """With the scale that every 8-bit key and value has."""
    scales = 2 * config.n_layer * config.n_kv_head * 4 if dtype in largest() else 0
    return config.kv_bytes_per_token(dtype.itemsize) + scales


def _dequantized_bytes(
    config: ModelConfig, dtype: torch.dtype, capacity: int, dequantizes: Callable[[int], bool] | None, n_token: int
) -> int:
    """At most, of one layer's entries of a row: the keys in `dtype`, and of the values float32, its product with the
    scales, and that in `dtype`, two at a time. 0 where attention reads the entries as they are.
    """
    if dequantizes is None or not dequantizes(n_token):
        return 0
    return capacity * config.n_kv_head * config.head_dim * (dtype.itemsize + 4 + max(4, dtype.itemsize))


def available_bytes(device: str) -> int:
    """Bytes free for this process on `device` ("cpu" or a CUDA device)."""
    if device == "cpu":
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info(torch.device(device))[0]


def used_bytes(device: str) -> int:
    """Bytes that this process holds: its resident set on a CPU, what it has allocated on a GPU."""
    if device == "cpu":
        return psutil.Process().memory_info().rss
    return torch.cuda.memory_allocated(torch.device(device))


def require_memory(plan: MemoryPlan, batch: int, available: int, device: str) -> None:
    """Raise OutOfMemoryError, itemised and with the largest batch that fits, if the plan does not."""
    needed = plan.total(batch)
    if needed <= available:
        return
    listed = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in plan.items(batch).items() if size)
    largest = plan.largest_batch(available)
    raise OutOfMemoryError(
        "the run does not fit into memory",
        where=f"{device}: {listed}",
        seen=f"{needed / GIB:.2f} GiB for a batch of {batch}",
        required=f"<= {available / GIB:.2f} GiB available",
        fix=f"use {flag('B')} {largest}, the largest batch that fits"
        if largest
        else "use a narrower --dtype, --quantize, more ranks or a smaller model"
        if plan.total(0) > available
        else f"use a shorter {flag('prefix_len')}"
        + (f", or a smaller draft budget ({flag('draft_budget')})" if plan.draft_kv_per_row else ""),
    )
