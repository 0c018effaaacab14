"""The Triton backend: the KV of a short block is read once, in chunks that fill the GPU, with lengths on the device."""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from common.launch import Launch, launch_on, multiprocessors, strides_of
from common.say import say
from kv_cache.entries import KV, SCORE_CHUNK, Packed
from models.attention.base import MAX_BLOCK, AnySlots, AttentionSpec
from models.attention.torch_backend import TorchAttention
from models.attention.triton_kernels import combine, score_chunks, split_kv

HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Programs that a multiprocessor usually runs at once, and about how many waves of them a launch over full rows takes.
PROGRAMS_PER_WAVE, WAVES = 2, 4
MIN_CHUNK = 256  # slots; a shorter chunk would spend its time filling its pipeline
# Slots of a chunk for each query row: writing and reading float32 results then moves about an eighth of the bytes of KV
# entries of 16 bits.
SLOTS_PER_ROW = 16
# Bytes of shared memory that the largest tile of 16-bit entries takes with all its stages.
LARGEST_SHARED = 125 * 1024
# Chunks that `combine` merges at a time, and its warps.
COMBINE_CHUNKS, COMBINE_WARPS = 16, 4
# Scores that a program of `score_chunks` takes, chunks whose sums it merges at a time, and its warps.
SCORED_CHUNKS, MERGED_CHUNKS, SCORE_WARPS = 512, 128, 4
MIN_ROWS, MAX_ROWS = 16, 64  # the smallest tile of tensor cores, and the largest whose accumulator fits registers


def unsupported(spec: AttentionSpec) -> str | None:
    """Return why a model of this shape runs on torch instead; None if the kernel takes it."""
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim is {spec.head_dim}, and the Triton kernel takes {' or '.join(map(str, HEAD_DIMS))}"
    if spec.dtype not in DTYPES:
        return f"the model computes in {spec.dtype}, and the Triton kernel in float16, bfloat16 or float32"
    return None


def runs_on(capability: tuple[int, int], dtype: torch.dtype, entries: torch.dtype) -> bool:
    """True if a GPU of this compute capability should run the kernel in `dtype` over cache entries in `entries`. Only
    Ada and Hopper convert float8. Tensor cores do not multiply in float32, and without them the tiles spill."""
    return dtype != torch.float32 and (entries != torch.float8_e4m3fn or capability >= (8, 9))


@dataclass(frozen=True)
class TileConfig:
    """The work of a program: `rows` of query tokens times group, and `slots` of KV per step; its warps and stages."""

    rows: int
    slots: int
    num_warps: int
    num_stages: int


def tile_config(n_row: int, head_dim: int, kv_itemsize: int, shared: int) -> TileConfig:
    """Return the tile for `n_row` query rows (tokens times group) per KV head, entries of `kv_itemsize` bytes, and
    `shared` bytes of shared memory.

    The stages keep some 64 KiB in flight on a multiprocessor, in the one to four programs whose registers fit there.
    Nothing spilled on sm_80, sm_86 or sm_90; `tests/models/test_triton_kernels.py` compiles the commonest.
    """
    rows = min(max(triton.next_power_of_2(n_row), MIN_ROWS), MAX_ROWS)
    num_stages = 3 if head_dim * kv_itemsize >= 256 else 4
    if rows < MAX_ROWS:
        # Where 64 slots would not leave room for two programs, 32 slots in more stages do.
        is_large = rows * head_dim > 2048 or head_dim * kv_itemsize == 64
        return TileConfig(rows, 32, 4, num_stages=5) if is_large else TileConfig(rows, 64, 4, num_stages)
    # Registers leave room for one program per multiprocessor; entries of 8 bits need more of them to be converted.
    num_stages += shared >= LARGEST_SHARED
    return TileConfig(rows, 32 if kv_itemsize == 1 else 64, num_warps=8, num_stages=num_stages)


def packed_tile_config(n_row: int) -> TileConfig:
    """Return the tile for tokens in 4 bits, which is smaller since unpacking them takes registers. Groups of 16 do not
    spill; others may, some 300 bytes at most."""
    rows = min(max(triton.next_power_of_2(n_row), MIN_ROWS), 2 * MIN_ROWS)
    return TileConfig(rows, 32, 4, num_stages=3 if rows == MIN_ROWS else 5)


def chunk_length(n_slot: int, n_program: int, tile: TileConfig, sm_count: int, min_chunk: int) -> int:
    """Return the slots per chunk, a multiple of the tile's, if a chunk of all rows takes `n_program` programs.

    It is chosen from the two numbers of chunks around WAVES waves: the one that leaves less of the last wave empty. It
    depends on shapes alone, so that a captured graph stays valid as rows grow.
    """
    wave = PROGRAMS_PER_WAVE * sm_count
    fewer, more = max(1, WAVES * wave // n_program), triton.cdiv(WAVES * wave, n_program)
    chunks = [max(triton.cdiv(n_slot, n_chunk), min_chunk) for n_chunk in (fewer, more)]

    def filled(chunk: int) -> float:
        """Return the share of its waves that has programs to run."""
        n_wave = n_program * triton.cdiv(n_slot, chunk) / wave
        return n_wave / math.ceil(n_wave)

    return max((triton.cdiv(chunk, tile.slots) * tile.slots for chunk in chunks), key=filled)


@dataclass
class TritonPrepared:
    """The inputs that all layers of a forward share: positions of queries `[B, T]` int64, and the slots."""

    spec: AttentionSpec
    queries: Tensor
    slots: AnySlots

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the slots, `[B, C]`; any tensor if slots are in order, since the kernel does not read them."""
        return self.queries if self.slots.in_order else self.slots.positions

    @cached_property
    def for_torch(self) -> Any:
        return TorchAttention().prepare(self.spec, self.queries, self.slots)


def plan(q: Tensor, kv: KV, block: TritonPrepared) -> tuple[list[Launch], Tensor]:
    """Plan the launches that attend `q [B, T, H, D]` to `kv`; return them and the output `[B, T, H, D]`."""
    batch, n_token, n_head, head_dim = q.shape
    n_slot, n_kv_head = kv.keys.shape[1:3]
    group = n_head // n_kv_head
    n_row = n_token * group
    has = multiprocessors(q.device)
    sources = [(_stored(q, kv, block), tile_config(n_row, head_dim, kv.keys.element_size(), has.shared))]
    if kv.packed is not None:
        sources.append((_packed(kv.packed), packed_tile_config(n_row)))
    chunks, counts = [], []
    for source, tile in sources:
        n_program = triton.cdiv(n_row, tile.rows) * batch * n_kv_head
        # Chunks below the minimum cost more than the balance that they bring is worth.
        min_chunk = max(MIN_CHUNK, SLOTS_PER_ROW * n_row)
        if n_program >= has.n and not source["IN_ORDER"]:  # rings are equally long, and fill the device whole
            min_chunk = source["n_slot"]
        chunks.append(chunk_length(source["n_slot"], n_program, tile, has.n, min_chunk))
        counts.append(triton.cdiv(source["n_slot"], chunks[-1]))
    n_chunk = sum(counts)
    is_split, is_scored = n_chunk > 1, kv.chunk_scores is not None
    out = partial = log_sums = maxima = q.new_empty(batch, n_token, n_head, head_dim)
    if is_split:
        partial = q.new_empty(batch, n_token, n_head, n_chunk, head_dim, dtype=torch.float32)
    if is_split or is_scored:
        log_sums = q.new_empty(batch, n_token, n_head, n_chunk, dtype=torch.float32)
    if is_scored:
        assert block.slots.in_order and kv.packed is None, "chunks are scored in the order of positions"
        maxima = q.new_empty(batch, n_token, n_head, triton.cdiv(n_slot, SCORE_CHUNK), dtype=torch.float32)
    window = block.spec.sliding_window
    others = {"q": q, "queries": block.queries, "out": partial, "log_sums": log_sums, "maxima": maxima}
    others["stored_rows"] = block.queries if kv.rows is None else kv.rows
    numbers = {"n_token": n_token, "n_kv_head": n_kv_head, "n_chunk": n_chunk, "window": window or 0}
    shape = {"GROUP": group, "HEAD_DIM": head_dim, "MAX_TOKENS": MAX_BLOCK}
    variant = {"MAPPED": kv.rows is not None, "SCORED": SCORE_CHUNK * is_scored, "SPLIT": is_split}
    variant["WINDOWED"] = window is not None
    shared: dict[str, Any] = others | strides_of("row token head", q=q) | numbers | shape | variant
    shared["scale"] = head_dim**-0.5 * math.log2(math.e)
    launches, first = [], 0
    for (source, tile), chunk, count in zip(sources, chunks, counts, strict=True):
        arguments = shared | source | {"chunk": chunk, "ROWS": tile.rows, "SLOTS": tile.slots}
        arguments["RUN"] = math.gcd(source["PACKED"], tile.slots)
        if is_split:  # launches fill different chunks
            arguments |= {"out": partial[..., first:, :], "log_sums": log_sums[..., first:]}
        grid = (triton.cdiv(n_row, tile.rows), count, batch * n_kv_head)
        launches.append(Launch(split_kv, grid, arguments, tile.num_warps, tile.num_stages))
        first += count
    if is_split:
        arguments = {"partial": partial, "log_sums": log_sums, "out": out, "n_chunk": n_chunk}
        arguments |= {"HEAD_DIM": head_dim, "CHUNKS": COMBINE_CHUNKS}
        launches.append(Launch(combine, (batch * n_token * n_head,), arguments, COMBINE_WARPS, num_stages=1))
    if kv.chunk_scores is not None:
        names = ["maxima", "log_sums", "stored_rows", "queries", "GROUP", "SCORED", "MAPPED", "WINDOWED", "n_slot"]
        arguments = {name: launches[0].arguments[name] for name in (*names, *numbers)}
        arguments |= {"chunk_scores": kv.chunk_scores, "SCORES": SCORED_CHUNKS, "CHUNKS": MERGED_CHUNKS}
        arguments |= strides_of("row token head", scores=kv.chunk_scores)
        blocks = batch * n_token * n_kv_head, triton.cdiv(n_slot, SCORED_CHUNKS * SCORE_CHUNK)
        launches.append(Launch(score_chunks, blocks, arguments, SCORE_WARPS, num_stages=1))
    return launches, out


def _stored(q: Tensor, kv: KV, block: TritonPrepared) -> dict[str, Any]:
    """Return the arguments of `split_kv` for `kv.keys` and `kv.values`: all entries, or the ring with packed ones."""
    # Pointers that a variant never follows still need a tensor.
    key_scales, value_scales = (q[..., 0] if x is None else x for x in (kv.key_scales, kv.value_scales))
    positions = block.positions if kv.packed is None else kv.packed.recent
    entries = {"keys": kv.keys, "values": kv.values, "key_scales": key_scales, "value_scales": value_scales}
    strides = strides_of("row slot head", k=kv.keys, v=kv.values, ks=key_scales, vs=value_scales)
    none = dict.fromkeys(("n_ring", "PACKED", "PARTS"), 0)
    is_in_order, is_quantized = block.slots.in_order and kv.packed is None, kv.key_scales is not None
    of_slots = {"n_slot": kv.keys.shape[1], "positions": positions, "positions_row": positions.stride(0)}
    return entries | strides | none | of_slots | {"IN_ORDER": is_in_order, "QUANTIZED": is_quantized}


def _packed(packed: Packed) -> dict[str, Any]:
    """Return the arguments of `split_kv` for tokens in 4 bits."""
    keys, values, key_grids, value_grids = packed[:4]
    codes_and_grids = {"keys": keys, "values": values, "key_scales": key_grids, "value_scales": value_grids}
    strides = strides_of("row head", k=keys, v=values) | strides_of("slot row head", ks=key_grids, vs=value_grids)
    strides |= {"k_slot": 0, "v_slot": value_grids.stride(3)}
    of_slots = {"n_slot": packed.n_token, "positions": packed.recent, "positions_row": packed.recent.stride(0)}
    variant = {"PACKED": packed.group, "PARTS": packed.value_grids.shape[3], "IN_ORDER": True, "QUANTIZED": False}
    return codes_and_grids | strides | of_slots | variant | {"n_ring": packed.recent.shape[1]}


class TritonAttention:
    """Attention of blocks of up to MAX_BLOCK tokens in the shapes that the kernel takes; torch runs all others."""

    name = "triton"
    fallback = TorchAttention()

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> Any:
        if queries.shape[1] > MAX_BLOCK or unsupported(spec):
            return self.fallback.prepare(spec, queries, slots)
        return TritonPrepared(spec, queries.contiguous(), slots)

    def attend(self, q: Tensor, kv: KV, prepared: Any) -> Tensor:
        if not isinstance(prepared, TritonPrepared):
            return self.fallback.attend(q, kv, prepared)
        if q.is_cuda and not runs_on(torch.cuda.get_device_capability(q.device), q.dtype, kv.keys.dtype):
            return self.fallback.attend(q, kv, prepared.for_torch)
        q = q if q.stride(-1) == 1 else q.contiguous()
        launches, out = plan(q, kv, prepared)
        try:
            launch_on(q.device, launches)
        except OutOfResources as error:
            _note_fallback(str(error))
            return self.fallback.attend(q, kv, prepared.for_torch)
        return out


@cache
def _note_fallback(why: str) -> None:
    say(f"note: attention of some blocks runs in PyTorch, since the Triton kernel does not fit on this GPU: {why}")
