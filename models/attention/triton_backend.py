"""The Triton backend: the KV of a short block is read once, in chunks that fill the GPU, with lengths on the device."""

import math
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kv_cache.entries import KV
from models.attention.base import MAX_BLOCK, AttentionSpec, Slots
from models.attention.torch_backend import TorchAttention
from models.attention.triton_kernels import combine, note, split_kv

HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Programs that a multiprocessor usually runs at once, and about how many waves of them a launch over full rows takes.
PROGRAMS_PER_WAVE, WAVES = 2, 4
MIN_CHUNK = 256  # slots: a shorter chunk would spend its time filling its pipeline
# Slots of a chunk for each of its rows: the float32 results written and read again stay near an eighth of the KV.
SLOTS_PER_ROW = 16
DEFAULT_SM_COUNT = 132  # of an H100 or H200, for a device that cannot be asked
COMBINE_CHUNKS, COMBINE_WARPS = 16, 4  # that one step of `combine` merges, and that run it
NOTE_SLOTS, NOTE_WARPS = 1024, 4  # that one program of `note` takes, and that run it
MIN_ROWS, MAX_ROWS = 16, 64  # the tensor cores' smallest tile, the largest whose accumulator stays in registers


def unsupported(spec: AttentionSpec) -> str | None:
    """Why a model of this shape runs on torch instead; None if the kernel takes it."""
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim is {spec.head_dim}, and the Triton kernel takes {' or '.join(map(str, HEAD_DIMS))}"
    if spec.dtype not in DTYPES:
        return f"the model computes in {spec.dtype}, and the Triton kernel in float16, bfloat16 or float32"
    return None


def runs_on(capability: tuple[int, int], dtype: torch.dtype, entries: torch.dtype) -> bool:
    """Whether a GPU of this compute capability should run the kernel in `dtype` over such entries. Only Ada and Hopper
    convert float8. Tensor cores do not multiply in float32, and without them the tiles spill."""
    return dtype != torch.float32 and (entries != torch.float8_e4m3fn or capability >= (8, 9))


def missing_launcher() -> str | None:
    """Why Triton cannot start kernels here, in one line; None if it can. Its driver has the launcher of all kernels in
    one C module, built or loaded from Triton's cache here."""
    if triton.knobs.runtime.interpret:
        return None
    try:
        getattr(triton.runtime.driver.active, "utils")  # noqa: B009, which is what builds or loads it
    except Exception as error:  # of many classes: no compiler, no headers, no libcuda, no GPU
        takes = "a C compiler (gcc or clang; CC names another one) with Python's headers"
        cause = traceback.format_exception_only(error)[0].splitlines()[0]
        return f"Triton cannot build or load its launcher, which takes {takes}: {cause}"
    return None


@dataclass(frozen=True)
class TileConfig:
    """One program's share: `rows` of query tokens times group, `slots` of KV per step, and how it is run."""

    rows: int
    slots: int
    num_warps: int
    num_stages: int


def tile_config(n_row: int, head_dim: int, kv_itemsize: int) -> TileConfig:
    """The tile for `n_row` query rows (tokens times group) per KV head, and entries of `kv_itemsize` bytes.

    As many stages as keep some 64 KiB in flight on a multiprocessor, among the one to four programs whose
    registers fit there. Nothing spills on sm_80 or sm_90 (`reproduce/kernel_report.py`).
    """
    rows = min(max(triton.next_power_of_2(n_row), MIN_ROWS), MAX_ROWS)
    num_stages = 3 if head_dim * kv_itemsize >= 256 else 4
    if rows < MAX_ROWS:
        # Where 64 slots would not leave room for two programs or more, half of them in more stages do.
        is_large = rows * head_dim > 2048 or head_dim * kv_itemsize == 64
        return TileConfig(rows, 32, 4, num_stages=5) if is_large else TileConfig(rows, 64, 4, num_stages)
    # Registers leave room for one program per multiprocessor; entries of 8 bits need more of them to be converted.
    return TileConfig(rows, 32 if kv_itemsize == 1 else 64, num_warps=8, num_stages=num_stages + 1)


def min_chunk_length(n_row: int) -> int:
    """Slots below which a chunk of `n_row` query rows costs more than the balance it brings is worth."""
    return max(MIN_CHUNK, SLOTS_PER_ROW * n_row)


def chunk_length(n_slot: int, n_program: int, tile: TileConfig, sm_count: int, min_chunk: int) -> int:
    """Slots per chunk, a multiple of the tile's, where one chunk of all rows takes `n_program` programs.

    Of the two numbers of chunks around WAVES waves, the one whose programs leave less of their last wave empty.
    Depends on shapes alone, so that a captured graph stays valid whatever the rows' lengths become.
    """
    wave = PROGRAMS_PER_WAVE * sm_count
    fewer, more = max(1, WAVES * wave // n_program), triton.cdiv(WAVES * wave, n_program)
    chunks = [max(triton.cdiv(n_slot, n_chunk), min_chunk) for n_chunk in (fewer, more)]

    def filled(chunk: int) -> float:
        """The share of the time of its waves in which there are programs to run."""
        n_wave = n_program * triton.cdiv(n_slot, chunk) / wave
        return n_wave / math.ceil(n_wave)

    return max((triton.cdiv(chunk, tile.slots) * tile.slots for chunk in chunks), key=filled)


class Launch(NamedTuple):
    """One kernel launch; `reproduce/kernel_report.py` compiles the same ones without a GPU."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def __call__(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass
class Block:
    """What the layers of one forward share: queries `[B, T]` int64 on the device, and the slots they see."""

    spec: AttentionSpec
    queries: Tensor
    slots: Slots

    @cached_property
    def positions(self) -> Tensor:
        """Those of the slots `[B, C]`; any tensor, where the kernel goes by the slots' order."""
        return self.queries if self.slots.in_order else self.slots.positions

    @cached_property
    def for_torch(self) -> Any:
        return TorchAttention().prepare(self.spec, self.queries, self.slots)


def plan(
    q: Tensor, kv: KV, block: Block, sm_count: int = DEFAULT_SM_COUNT, min_chunk: int | None = None
) -> tuple[list[Launch], Tensor]:
    """The launches that attend `q [B, T, H, D]` to `kv`, and the output `[B, T, H, D]` that they fill."""
    batch, n_token, n_head, head_dim = q.shape
    n_slot, n_kv_head = kv.keys.shape[1:3]
    group = n_head // n_kv_head
    n_row = n_token * group
    tile = tile_config(n_row, head_dim, kv.keys.element_size())
    row_blocks = triton.cdiv(n_row, tile.rows)
    n_program = row_blocks * batch * n_kv_head
    chunk = chunk_length(n_slot, n_program, tile, sm_count, min_chunk or min_chunk_length(n_row))
    n_chunk = triton.cdiv(n_slot, chunk)
    is_split = n_chunk > 1
    is_noted = kv.noted is not None
    out = partial = log_sums = kept = q.new_empty(batch, n_token, n_head, head_dim)
    if is_split:
        partial = q.new_empty(batch, n_token, n_head, n_chunk, head_dim, dtype=torch.float32)
    if is_split or is_noted:
        log_sums = q.new_empty(batch, n_token, n_head, n_chunk, dtype=torch.float32)
    if is_noted:
        assert block.slots.in_order, "noted by position"
        kept = q.new_empty(batch, n_token, n_head, n_slot, dtype=torch.float32)
    # Pointers that a variant never follows still need a tensor.
    key_scales, value_scales = (q[..., 0] if x is None else x for x in (kv.key_scales, kv.value_scales))
    positions, window = block.positions, block.spec.sliding_window
    entries = {"keys": kv.keys, "values": kv.values, "key_scales": key_scales, "value_scales": value_scales}
    others = {"q": q, "queries": block.queries, "positions": positions, "out": partial, "log_sums": log_sums}
    others["kept"] = kept
    others["stored_rows"] = block.queries if kv.rows is None else kv.rows
    strides = _strides(q=q) | _strides("slot", k=kv.keys, v=kv.values, ks=key_scales, vs=value_scales)
    sizes = {"n_token": n_token, "n_kv_head": n_kv_head, "n_slot": n_slot, "chunk": chunk, "n_chunk": n_chunk}
    shape = {"GROUP": group, "HEAD_DIM": head_dim, "MAX_TOKENS": MAX_BLOCK, "ROWS": tile.rows, "SLOTS": tile.slots}
    arguments: dict[str, Any] = {
        **entries | others | strides | sizes | shape,
        "positions_row": positions.stride(0),
        "window": window or 0,
        "scale": head_dim**-0.5 * math.log2(math.e),
        "MAPPED": kv.rows is not None,
        "QUANTIZED": kv.key_scales is not None,
        "NOTED": is_noted,
        "IN_ORDER": block.slots.in_order,
        "WINDOWED": window is not None,
        "SPLIT": is_split,
    }
    grid = (row_blocks, n_chunk, batch * n_kv_head)
    launches = [Launch(split_kv, grid, arguments, tile.num_warps, tile.num_stages)]
    if is_split:
        arguments = {"partial": partial, "log_sums": log_sums, "out": out, "n_chunk": n_chunk}
        arguments |= {"HEAD_DIM": head_dim, "CHUNKS": COMBINE_CHUNKS}
        launches.append(Launch(combine, (batch * n_token * n_head,), arguments, COMBINE_WARPS, num_stages=1))
    if kv.noted is not None:
        names = "kept", "log_sums", "stored_rows", "queries", "window", "GROUP", "MAPPED", "WINDOWED", *sizes
        arguments = {name: launches[0].arguments[name] for name in names if name != "chunk"}
        row, token, head, _ = kv.noted.stride()
        arguments |= {"noted": kv.noted, "noted_row": row, "noted_token": token, "noted_head": head}
        arguments |= {"SLOTS": NOTE_SLOTS}
        blocks = batch * n_token * n_kv_head, triton.cdiv(n_slot, NOTE_SLOTS)
        launches.append(Launch(note, blocks, arguments, NOTE_WARPS, num_stages=1))
    return launches, out


def _strides(second: str = "token", **tensors: Tensor) -> dict[str, int]:
    names = ("row", second, "head")
    return {f"{x}_{name}": tensors[x].stride(dim) for x in tensors for dim, name in enumerate(names)}


class TritonAttention:
    """Blocks of up to MAX_BLOCK tokens of the shapes that `unsupported` lets through; torch takes all others.
    `sm_count`: multiprocessors to fill, by default the device's; `min_chunk`: see `min_chunk_length`, the default."""

    name = "triton"

    def __init__(self, sm_count: int | None = None, min_chunk: int | None = None) -> None:
        self.torch, self.sm_count, self.min_chunk = TorchAttention(), sm_count, min_chunk

    def dequantizes(self, n_token: int) -> bool:
        return n_token > MAX_BLOCK

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: Slots) -> Any:
        """The block itself, or what torch makes of it."""
        if queries.shape[1] > MAX_BLOCK or unsupported(spec):
            return self.torch.prepare(spec, queries, slots)
        return Block(spec, queries.contiguous(), slots)

    def attend(self, q: Tensor, kv: KV, prepared: Any) -> Tensor:
        if not isinstance(prepared, Block):
            return self.torch.attend(q, kv, prepared)
        kv = kv.unpacked()
        if q.is_cuda and not runs_on(torch.cuda.get_device_capability(q.device), q.dtype, kv.keys.dtype):
            return self.torch.attend(q, kv, prepared.for_torch)
        q = q if q.stride(-1) == 1 else q.contiguous()
        on_device = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else DEFAULT_SM_COUNT
        launches, out = plan(q, kv, prepared, self.sm_count or on_device, self.min_chunk)
        # Triton launches on the current device, wherever the tensors are.
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            for launch in launches:
                launch()
        return out
