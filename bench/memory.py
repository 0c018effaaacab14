"""Will it fit: weights, caches and activations of the rank with the largest shard, before anything is allocated."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from bench.plan import Plan
from bench.resolved import ResolvedDraft
from common.errors import OutOfMemoryError, flag
from common.launch import missing_launcher
from common.process import local_world_size
from engine.noise import blocks_per_pass
from engine.runner import captured_sizes, prefill_chunk_of
from kv_cache import FullKVCache, KVCache
from kv_cache.quantized import QuantizedKVCache
from kv_cache.refreshed import RefreshedKVCache
from models import ModelConfig
from models.heads.loading import HeadSource
from models.packed_linear import can_pack
from models.quantize import DEQUANTIZING_BYTES, INT8_OUTPUT_BYTES, linear_bytes
from models.tensor_parallel import Shard, shard_config

GIB = 2**30
# Per logit: the distributions of target and draft, two temporaries in float32, a Gumbel, a float64 uniform ...
SAMPLING_BYTES = 4 * 4 + 4 + 8
# ... and for filters in PyTorch int64 masses, keys and digits, float64 temporaries and masks. Triton's takes none.
FILTER_BYTES = 4 + 8 + 4 * 8 + 8
# What a pass of the random number generator holds per block: its words and their products, in int64.
PASS_BYTES = 16 * 8
# What CUDA takes beside the context: workspaces of cuBLAS and cuBLASLt, on Hopper 32 MiB each a stream; kernels and
# nodes of graphs, what the allocator leaves unused. A round number: gpu.py records planned beside peak bytes.
CUDA_BYTES = GIB
# Buffers of one NCCL communicator (NVIDIA/nccl issue 864 reports 1.6 GB); symmetric memory's 8 MiB drown in them.
NCCL_BYTES = 1600 * 10**6
# Tokens a row that a draft runs at once, at most: a standalone draft starts its rounds with two.
DRAFT_BLOCK = 2


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run needs, by what needs them: whatever the batch, and of each row."""

    fixed: dict[str, int]
    per_row: dict[str, int]

    def items(self, batch: int) -> dict[str, int]:
        return self.fixed | {name: batch * size for name, size in self.per_row.items()}

    def total(self, batch: int) -> int:
        return sum(self.items(batch).values())

    def largest_batch(self, available: int) -> int:
        """The largest batch whose total is within `available` bytes; 0 if none is."""
        return max(0, (available - self.total(0)) // sum(self.per_row.values()))


@dataclass(frozen=True)
class Footprint:
    """A model, or the largest shard of one, and its caches of one row ("meta"), of which one is read at a time.
    dequantizes: as of `AttentionBackend`. shares_weights: with the target. prefills: whether it runs prompts."""

    config: ModelConfig
    dtype: torch.dtype
    caches: tuple[KVCache, ...]
    dequantizes: Callable[[int, int | None], bool]
    quantize: str | None = None
    shares_weights: bool = False
    prefills: bool = True

    def weights(self, device: str) -> int:
        """Bytes of one copy of the weights; repacking or quantising holds a tied embedding twice."""
        config = self.config
        head = config.vocab_size * config.dim
        if self.quantize is None:
            repacked_head = head if config.tie_embeddings and can_pack(device, self.dtype) else 0
            return (config.n_parameters + repacked_head) * self.dtype.itemsize
        linear = config.n_layer * config.n_linear_weights_per_layer
        other = config.n_parameters - linear - (0 if config.tie_embeddings else head)
        return linear_bytes(linear, self.quantize) + linear_bytes(head, "int8") + other * self.dtype.itemsize

    @property
    def selects(self) -> bool:
        """Whether entries of a prompt are selected by their content."""
        return any(cache.selects for cache in self.caches)

    @property
    def largest_dequantized_layer(self) -> int:
        """Bytes that the largest layer in 4 bits takes while many rows are multiplied by it on a GPU."""
        config = self.config
        widest = max(2 * config.ffn_dim, (config.n_head + 2 * config.n_kv_head) * config.head_dim)
        return DEQUANTIZING_BYTES * widest * config.dim if self.quantize == "int4" else 0

    def dequantized(self, n_token: int, entries: int | None = None, is_chunk: bool = False) -> int:
        """Bytes at most, of one layer's `entries` of a row (None: its largest cache) for a block of `n_token`: keys in
        `dtype`, and of the values float32, its product with the scales, and that in `dtype`, two at a time; copies of
        rows by name. Of entries in 4 bits: both in `dtype`, and one's codes as bytes and as numbers with its grids.
        Of entries that are in `dtype` the copies by name alone; a chunk has them where it is of several rows."""
        size, values = self.dtype.itemsize, self.config.n_kv_head * self.config.head_dim
        each = [0]
        for cache in self.caches:
            group = cache.group if isinstance(cache, QuantizedKVCache) else None
            if not self.dequantizes(n_token, group):
                continue
            # Blocks of several rows make up a chunk of what keeps some tokens by their positions.
            in_blocks = is_chunk and entries is None and not cache.in_order
            n_row = max(1, n_token // cache.prefill_block) if in_blocks else 1
            if isinstance(cache, QuantizedKVCache):
                grids = 4 / math.gcd(cache.group, self.config.head_dim)
                n = cache.ring + max(cache.ring, cache.capacity)
                each.append(math.ceil(n * (3 * size + 2 + grids)))
            elif cache.scales is None:
                each.append(0 if is_chunk and not in_blocks else n_row * 2 * size * cache.capacity)
            else:
                named = 2 + 8 / self.config.head_dim
                each.append(math.ceil(n_row * (entries or cache.capacity) * (size + 4 + max(4, size) + named)))
        return max(each) * values


def memory_plan(plan: Plan) -> MemoryPlan:
    """What the rank with the largest shard needs, of the target, and of what drafts where that is a model."""
    config = _largest_shard(plan.target.config, plan.group)
    cache = FullKVCache(config, 1, plan.capacity, "meta", plan.kv_dtype)
    dequantizes = partial(_dequantizes, plan, config, plan.dtype, plan.kv_dtype)
    target = Footprint(config, plan.dtype, (cache,), dequantizes, plan.config.target.quantize)
    levels = plan.draft.levels if plan.draft else ()
    return plan_memory(plan, target, *(own for level in levels if (own := _draft_footprint(plan, level, config))))


def _draft_footprint(plan: Plan, draft: ResolvedDraft, config: ModelConfig) -> Footprint | None:
    """Of what drafts for the target, whose shard has that shape, or for that; None if it is no model."""
    if draft.policy is None or draft.dtype is None:
        return None
    is_head, is_inner = isinstance(draft.source, HeadSource), draft is not plan.draft
    if draft.source:
        config = draft.source.config if is_head else _largest_shard(draft.source.config, plan.draft_group)
    if draft.layers is not None:
        config = replace(config, n_layer=len(draft.layers))
    of_backend = partial(_dequantizes, plan, config, draft.dtype, draft.kv_dtype)
    # Keys that are rotated as they are read are dequantised for whatever attention.
    dequantizes = _always if draft.policy.in_cache_positions else of_backend
    prefills = draft.source is not None and not is_head
    n_kept = 2 if prefills and plan.chooses else 1  # what a prompt left is kept
    n_kept *= len(plan.draft.policies) if is_inner and plan.draft else 1  # each draft has its own
    shares_weights = is_head or (draft.source is None and (plan.shares_weights or is_inner))
    sizes = config, 1, plan.capacity, "meta", draft.kv_dtype or draft.dtype
    caches = tuple(policy.new_cache(*sizes) for policy in draft.policies * n_kept)
    return Footprint(config, draft.dtype, caches, dequantizes, draft.quantize, shares_weights, prefills)


def plan_memory(plan: Plan, target: Footprint, *drafts: Footprint) -> MemoryPlan:
    """Estimate a run of these. The logits are of the whole vocabulary: those of all shards meet on one rank."""
    draft = drafts[0] if drafts else None
    models, sampling, device = [target, *drafts], plan.sampling.params, torch.device(plan.device)
    config, capacity, itemsize = target.config, plan.capacity, target.dtype.itemsize
    block, prefill_chunk = plan.gamma + 1, min(prefill_chunk_of(device), capacity)
    on_cuda, n_logits, logit_size = device.type == "cuda", plan.target.config.vocab_size, max(4, itemsize)
    per_logit = (INT8_OUTPUT_BYTES if target.quantize else itemsize) + logit_size  # a quantised head is in 8 bits
    chunk = 3 * config.ffn_dim + 4 * config.n_head * config.head_dim + 4 * config.dim + 2 * capacity  # and two masks
    activations = prefill_chunk * chunk * itemsize
    if target.quantize == "int8":
        activations += prefill_chunk * 2 * config.ffn_dim * INT8_OUTPUT_BYTES
    if not sampling.greedy:  # distributions and noise beside the logits
        in_pytorch = not on_cuda or missing_launcher() is not None
        activations += blocks_per_pass(device) * PASS_BYTES * in_pytorch
        per_logit += SAMPLING_BYTES + FILTER_BYTES * (sampling.filters and in_pytorch)
    if draft and draft.selects:
        scored = draft.config if draft.prefills else config
        # One row and layer at a time: float32 scores, masked and after the softmax, and keys in order.
        scores = 3 * max(1, *(cache.n_queries for cache in draft.caches)) * scored.n_head
        activations += 4 * capacity * (scores + 2 * scored.n_kv_head * scored.head_dim)
        if draft.prefills:  # a whole row, which the policy then selects from
            activations += FullKVCache(draft.config, 1, capacity, "meta", draft.caches[0].entries.dtype).n_bytes
    # Target and drafts never attend at once.
    inner = plan.draft.inner.gamma + 1 if plan.draft and plan.draft.inner else 0  # which the draft verifies
    dequantized = max([target.dequantized(block), *(one.dequantized(max(DRAFT_BLOCK, inner)) for one in drafts)])
    caches = [cache for one in drafts for cache in one.caches]
    choosing = [cache for cache in caches if isinstance(cache, RefreshedKVCache)]
    if choosing:  # one layer's keys, in order or copied with its values, and scores as above
        keys = max(capacity * config.n_kv_head * config.head_dim * itemsize, target.dequantized(block))
        # Or keys and values that are chosen and new keys, thrice or on their way elsewhere, and what chose them.
        of_slot = config.n_kv_head * (config.head_dim * max(32, 6 * itemsize) + 64)
        copied = of_slot * max(cache.n_sink + cache.refresh_every * block // 2 for cache in choosing)
        dequantized = max(dequantized, capacity * 4 * 3 * block * config.n_head + keys, copied)
    prefilling = ((one, capacity if one.selects else None) for one in models if one.prefills)
    chunks = [one.dequantized(prefill_chunk, entries, is_chunk=True) for one, entries in prefilling]
    activations += max(0, max(chunks) - dequantized)
    libraries = 0
    if on_cuda:
        activations += max(one.largest_dequantized_layer for one in models)
        n_communicator = len({group for group in (plan.group, plan.draft_group) if len(group) > 1})
        libraries = CUDA_BYTES + (n_communicator + (plan.config.n_replicas > 1)) * NCCL_BYTES
    weights = sum(one.weights(plan.device) for one in models if not one.shares_weights)
    if plan.draft and isinstance(plan.draft.source, HeadSource):
        weights += plan.draft.source.n_weights * (plan.draft.dtype or plan.dtype).itemsize
    beyond = inner if plan.sampling.mode == "rejection" else 0  # distributions that inner rounds add to a block's
    of_block = block, config.n_head, target.dtype, capacity
    per_row = {
        "target KV": sum(cache.n_bytes for cache in target.caches),
        "draft KV": sum(cache.n_bytes for cache in caches) + sum(one.observer(*of_block).n_bytes for one in choosing),
        "dequantised KV": dequantized,
        "logits": n_logits * (block * per_logit + beyond * logit_size),
        "outputs of captured rounds": captured_rows(plan) * n_logits * logit_size,
    }
    return MemoryPlan({"weights": weights, "activations": activations, "CUDA and NCCL": libraries}, per_row)


def captured_rows(plan: Plan) -> int:
    """Return how many `[V]` CUDA graphs keep for a row while the longest round runs over all rows: the `kept_rows` of
    all other rounds that may be chosen, and of the baseline's, for every number of rows."""
    draft = plan.draft
    if plan.device == "cpu" or plan.config.target.no_cuda_graphs:
        return 0
    gammas = [0, *([0] * draft.automatic), *(draft.gammas * len(draft.each()))] if draft else [0]
    longest, *each = (kept_rows(plan, gamma) for gamma in (max(gammas), *gammas))
    if draft:  # rounds without and with what is noted are captured apart
        each += [1 + gamma for gamma in draft.gammas for one in draft.policies if getattr(one, "refresh", 1) > 1]
    return math.ceil(sum(each) * sum(captured_sizes(plan.n_rows)) / plan.n_rows) - longest


def kept_rows(plan: Plan, gamma: int) -> int:
    """Return how many `[V]` a round of `gamma` drafts keeps of each row: its logits, and either the distributions of
    the drafts, those of the last inner round whole, or the noise that draft and target share."""
    inner = plan.draft.inner.gamma + 1 if plan.draft and plan.draft.inner else 0
    of_drafts = {"rejection": gamma + inner, "coupled": gamma + 1}.get(plan.sampling.mode, 0)
    return 1 + gamma + (of_drafts if gamma else 0)


def _dequantizes(
    plan: Plan, config: ModelConfig, dtype: torch.dtype, entries: torch.dtype | None, n_token: int, group: int | None
) -> bool:
    """Of the backend that this machine has."""
    return plan.attention(config, dtype, entries).backend.dequantizes(n_token, group)


def _always(n_token: int, group: int | None) -> bool:
    return True


def _largest_shard(config: ModelConfig, group: Sequence[int]) -> ModelConfig:
    return shard_config(config, Shard(len(group) - 1, len(group)))


def available_bytes(device: str) -> int:
    """Bytes that this process may take of `device` ("cpu" or a CUDA device): of a CPU's its share."""
    if device == "cpu":
        return int(min(psutil.virtual_memory().available, left_in_container())) // local_world_size()
    return torch.cuda.mem_get_info(torch.device(device))[0]


def left_in_container(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Bytes that the limits of this process's control group and of those around it leave (cgroup v2), without pages of
    files, which can go; inf without a limit."""
    left = math.inf
    with suppress(OSError):
        path = own.read_text().rpartition("::")[2].strip().lstrip("/")
        for group in (groups / path, *(groups / path).parents):
            with suppress(OSError, ValueError):  # ValueError: no limit here, but the word max
                limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
                of_files = re.findall(r"^(?:in)?active_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                left = min(left, limit - used + sum(map(int, of_files)))
    return left


def require_room(plan: Plan) -> None:
    """Raise OutOfMemoryError if the largest shard does not fit."""
    require_memory(memory_plan(plan), plan.n_rows, available_bytes(plan.device), plan.device)


def require_memory(plan: MemoryPlan, batch: int, available: int, device: str) -> None:
    """Raise OutOfMemoryError, itemised and with the largest batch that fits, if the plan does not."""
    needed = plan.total(batch)
    if needed <= available:
        return
    fix = f"use a shorter {flag('prefix_len')}, a narrower {flag('dtype')}, {flag('quantize')} or more ranks"
    if largest := plan.largest_batch(available):
        fix = f"use {flag('B')} {largest}, the largest batch that fits"
    listed = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in plan.items(batch).items() if size)
    what, seen = "the run does not fit into memory", f"{needed / GIB:.2f} GiB for a batch of {batch}"
    raise OutOfMemoryError(what, f"{device}: {listed}", seen, f"<= {available / GIB:.2f} GiB available", fix)
