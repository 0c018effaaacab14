"""The Triton kernel that selects entries and copies them; `kv_cache.refreshed` does that in PyTorch."""

from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.launch import Launch, launch_on, strides_of, works
from kv_cache.base import KVCache, TrialShape
from kv_cache.full import FullKVCache
from kv_cache.refreshed import RefreshedKVCache, SelectionOps
from kv_cache.verify_topk import VerifyTopK

# Entries that a program of `choose` copies at once, chunks that a warp ranks, and ranked chunks that are read at once.
COPIED_ENTRIES, CHUNKS_PER_WARP, TILE_CHUNKS = 32, 512, 1024
# The rank of a chunk that is always chosen.
ALWAYS = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["n_kv_head", "n_chunk", "n_first", "n_chosen"])
def choose(
    shares, ends, rows, source_slots, scratch, source, target, source_scales, target_scales,
    share_row, share_head, s_both, s_row, s_head, s_slot, t_both, t_row, t_head, t_slot,
    ss_both, ss_row, ss_head, ts_both, ts_row, ts_head,
    n_kv_head, n_chunk, n_first, n_chosen,
    SCALED: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Choose `n_chosen` entries of a row and KV head by the shares of its chunks of CHUNK entries, and copy them; grid
    `[B * n_kv_head]`.

    The result is that of `SelectionOps.choose`. Of a chunk that is chosen in part, the first entries are chosen.
    `source_slots [rows, n_kv_head, n_chosen]` int64 has the source's slot of each entry of `target`: entries that are
    chosen again stay in place, and new ones go to the other places, with their scales if SCALED. scratch: int32 `[B *
    n_kv_head, 2 * (n_chunk + n_chosen)]`.
    """
    index = tl.program_id(0).to(tl.int64)
    b, h = index // n_kv_head, index % n_kv_head
    row, end = tl.load(rows + b), tl.load(ends + b).to(tl.int32)
    if end == 0:
        return
    ranks = scratch + index * 2 * (n_chunk + n_chosen)
    marks, fresh, free = ranks + n_chunk, ranks + 2 * n_chunk, ranks + 2 * n_chunk + n_chosen
    chunk, place = tl.arange(0, CHUNKS), tl.arange(0, PLACES)
    share = tl.load(shares + b * share_row + h * share_head + chunk, mask=chunk < n_chunk, other=0.0)

    # Floats that are not negative have the order of their bits. `lowest`, the rank of the last chunk that is chosen, is
    # the highest number such that chunks of at least that rank have enough entries.
    rank = tl.where(chunk < n_first // CHUNK, ALWAYS, share.to(tl.int32, bitcast=True))
    rank = tl.where(chunk * CHUNK < end, rank, -1)
    size = tl.minimum(end - chunk * CHUNK, CHUNK)
    lowest = tl.full([], 0, tl.int32)
    for bit in tl.range(0, 31):
        higher = lowest | (1 << (30 - bit))
        lowest = tl.where(tl.sum(tl.where(rank >= higher, size, 0), 0) >= n_chosen, higher, lowest)
    left = n_chosen - tl.sum(tl.where(rank > lowest, size, 0), 0)
    tl.store(ranks + chunk, rank, mask=chunk < n_chunk)

    # `marks` has the number of each chunk's entries that are in `target`, then the number that is chosen. `fresh` lists
    # the entries to be copied, `free` the places for them.
    source_slots += (row * n_kv_head + h) * n_chosen + place
    entry = tl.load(source_slots, mask=place < n_chosen, other=-1).to(tl.int32)
    entry = tl.where(entry < n_chunk * CHUNK, entry, -1)  # left by a longer text in the same row
    of_chunk, in_chunk = tl.maximum(entry, 0) // CHUNK, tl.maximum(entry, 0) % CHUNK
    tl.store(marks + chunk, 0, mask=chunk < n_chunk)
    tl.debug_barrier()
    tl.atomic_max(marks + of_chunk, in_chunk + 1, mask=entry >= 0)
    tl.debug_barrier()
    n_copied = tl.full([], 0, tl.int32)
    for start in tl.range(0, n_chunk, TILE):
        tile = start + tl.arange(0, TILE)
        tile_rank = tl.load(ranks + tile, mask=tile < n_chunk, other=-1)
        known = tl.load(marks + tile, mask=tile < n_chunk, other=0)
        tile_size = tl.minimum(end - tile * CHUNK, CHUNK)
        equal = tl.where(tile_rank == lowest, tile_size, 0)  # of equal chunks, the first are chosen
        taken = tl.minimum(tl.maximum(left - tl.cumsum(equal, 0) + equal, 0), equal)
        left -= tl.sum(equal, 0)
        taken = tl.where(tile_rank > lowest, tile_size, taken)
        n_new = tl.maximum(taken - known, 0)
        first = n_copied + tl.cumsum(n_new, 0) - n_new
        n_copied += tl.sum(n_new, 0)
        for i in tl.range(0, CHUNK):
            tl.store(fresh + first + i, tile * CHUNK + known + i, mask=i < n_new)
        tl.store(marks + tile, taken, mask=tile < n_chunk)
    tl.debug_barrier()
    stays = (entry >= 0) & (in_chunk < tl.load(marks + of_chunk))
    is_free = (place < n_chosen) & (stays == 0)
    order = tl.cumsum(is_free.to(tl.int32), 0) - 1
    tl.store(source_slots, tl.load(fresh + order, mask=is_free, other=0).to(tl.int64), mask=is_free)
    tl.store(free + order, place, mask=is_free)
    tl.debug_barrier()

    dims = tl.arange(0, HEAD_DIM)[None, :]
    source += row * s_row + h * s_head
    target += row * t_row + h * t_head
    for start in tl.range(0, n_copied, ENTRIES):
        at = start + tl.arange(0, ENTRIES)
        copied = at < n_copied
        slot = tl.load(fresh + at, mask=copied, other=0).to(tl.int64)
        to = tl.load(free + at, mask=copied, other=0).to(tl.int64)
        for both in tl.static_range(2):
            vectors = tl.load(source + both * s_both + slot[:, None] * s_slot + dims, mask=copied[:, None])
            target_at = target + both * t_both + to[:, None] * t_slot + dims
            tl.store(target_at, vectors.to(target.dtype.element_ty), mask=copied[:, None])
            if SCALED:
                scales = tl.load(source_scales + both * ss_both + row * ss_row + h * ss_head + slot, mask=copied)
                tl.store(target_scales + both * ts_both + row * ts_row + h * ts_head + to, scales, mask=copied)


def plan_choice(
    to: RefreshedKVCache, to_layer: int, source: KVCache, from_layer: int, share: Tensor, ends: Tensor
) -> Launch:
    """Plan the launch that replaces `SelectionOps.choose`, between caches of the same dtype or without scales."""
    n_kv_head, n_chosen = to.source_slots.shape[2:]
    read, written = source.entries[from_layer], to.entries[to_layer]
    n_chunk, n_program = min(triton.cdiv(read.shape[3], to.chunk), share.shape[-1]), len(ends) * n_kv_head
    if read.dtype.itemsize == 1:  # copied as bytes, which any GPU can
        read, written = read.view(torch.uint8), written.view(torch.uint8)
    # Pointers that a variant never follows still need a tensor.
    both = (source.scales, from_layer, read), (to.scales, to_layer, written)
    scales = [entries[..., 0] if scales is None else scales[layer] for scales, layer, entries in both]
    tensors = {"source": read, "target": written, "source_scales": scales[0], "target_scales": scales[1]}
    tensors |= {"shares": share, "ends": ends, "rows": to.row_indices.contiguous()}
    tensors["source_slots"] = to.source_slots[to_layer]
    tensors["scratch"] = to.source_slots.new_empty(n_program, 2 * (n_chunk + n_chosen), dtype=torch.int32)
    strides = strides_of("row head", share=share) | strides_of("both row head slot", s=read, t=written)
    strides |= strides_of("both row head", ss=scales[0], ts=scales[1])
    numbers = {"n_kv_head": n_kv_head, "n_chunk": n_chunk, "n_first": to.n_first, "n_chosen": n_chosen}
    n_ranked = max(triton.next_power_of_2(n_chunk), CHUNKS_PER_WARP)
    variant: dict[str, Any] = {"SCALED": to.scales is not None, "HEAD_DIM": read.shape[-1], "CHUNK": to.chunk}
    variant |= {"PLACES": triton.next_power_of_2(n_chosen), "ENTRIES": COPIED_ENTRIES}
    variant |= {"CHUNKS": n_ranked, "TILE": min(n_ranked, TILE_CHUNKS)}
    n_warp = min(max(n_ranked // CHUNKS_PER_WARP, 4), 16)
    return Launch(choose, (n_program,), tensors | strides | numbers | variant, n_warp, num_stages=1)


class TritonSelectionOps(SelectionOps):
    """SelectionOps that use the kernel where it takes the dtypes."""

    def choose(
        self, to: RefreshedKVCache, to_layer: int, source: KVCache, from_layer: int, share: Tensor, ends: Tensor
    ) -> None:
        given = to, to_layer, source, from_layer, share, ends
        if to.scales is source.scales is None or to.entries.dtype == source.entries.dtype:
            launch_on(to.device, [plan_choice(*given)])
        else:
            super().choose(*given)


@cache
def is_right(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel runs on a device and chooses as PyTorch does; else a note is printed."""
    return works(partial(difference, device, dtype, head_dim), "chooses entries")


def difference(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return how entries that the kernel chooses and copies, again and again, differ from PyTorch's; None if all are
    equal."""
    generator, ops, shape = torch.Generator().manual_seed(0), TritonSelectionOps(), TrialShape(head_dim=head_dim)
    full, cache = FullKVCache(shape, 3, 640, device, dtype), VerifyTopK(96, 16).new_cache(shape, 3, 0, device, dtype)
    assert isinstance(cache, RefreshedKVCache)
    new = torch.randn(3, 640, 2, shape.n_kv_head, shape.head_dim, generator=generator)
    full.write(0, torch.arange(640, device=device).expand(3, -1), new.to(device))
    for step in range(4):
        share = (torch.randint(9, (3, shape.n_kv_head, 640 // cache.chunk), generator=generator) / 8).to(device)
        ends = torch.tensor([640, 427, 240], device=device) - 7 * step
        ops.choose(cache, 0, full, 0, share, ends)
        slots, n = cache.source_slots[0], cache.n_fixed
        best = ops.best_chunks(share, cache.chunk, ends, cache.n_first, n)
        are_best = torch.equal(slots.sort().values, best.sort().values)
        found = cache.entries[0, ..., :n, :], None if cache.scales is None else cache.scales[0, ..., :n]
        pairs = [(x, y) for x, y in zip(found, full.gather(0, slots), strict=True) if x is not None]
        are_copied = [torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs if y is not None]
        if not (are_best and all(are_copied)):
            return f"choice {step}: the best entries {are_best}, copies of them and of their scales {are_copied}"
    return None
