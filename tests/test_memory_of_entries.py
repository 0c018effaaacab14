"""The memory estimate of entries that are turned into others, or chosen: what that takes at its peak."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from live_bytes import LiveBytes
from memory_plans import BLOCK, BUDGET, CAPACITY, never, plan_of, self_draft
from tiny import TINY

from bench.dummy_prefill import randomise
from bench.memory import Footprint
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.quantized import QuantizedKVCache
from kv_cache.refreshed import SelectionOps
from kv_cache.retrieval import Retrieval
from kv_cache.snapkv import SnapKV
from kv_cache.verify_topk import VerifyTopK


def always(n_token: int, group: int | None) -> bool:
    return True


def longer_blocks(n_token: int, group: int | None) -> bool:
    return n_token > BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "kind,stored,slack",
    [
        *((FullKVCache, stored, 1) for stored in (None, torch.int8, torch.float8_e4m3fn)),
        *((QuantizedKVCache, stored, 1.3) for stored in (torch.float32, torch.bfloat16, torch.int8)),
        *((partial(QuantizedKVCache, group=group), torch.bfloat16, 1.5) for group in (1, 2, 7)),
        (partial(QuantizedKVCache, window=5000), torch.int8, 1.8),
    ],
)
def test_entries_that_attention_cannot_read_are_counted_as_they_are_turned_into_others(kind, stored, slack, dtype):
    """Of all rows, as they lie or by name; fewer of them take no more."""
    cache, of_row = (kind(TINY, n, 700, device=on, dtype=stored or dtype) for n, on in ((3, "cpu"), (1, "meta")))
    planned = 3 * Footprint(TINY, dtype, (of_row,), dequantizes=always).dequantized(1)
    peaks = []
    for rows in (torch.tensor([2, 0, 1]), slice(None), torch.tensor([2, 0])):
        view = cache.view(rows)
        with LiveBytes() as live:
            view.read(0).dequantized(dtype)
        peaks.append(live.peak)
    assert peaks[2] < max(peaks) <= planned <= slack * max(peaks)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_random_entries_of_8_bits_are_drawn_a_row_at_a_time(stored: torch.dtype) -> None:
    """Into the first rows of a wider and longer cache, each of which gets its own numbers; other slots get none."""
    cache = FullKVCache(TINY, 7, 700, dtype=stored)
    with LiveBytes() as live:
        randomise(cache.view(slice(0, 5), 600))
    of_row = 600 * TINY.n_kv_head * TINY.head_dim
    assert live.peak == 2 * of_row * 4
    everything = cache.entries.float()
    filled = everything[:, :, :5, :, :600]
    assert filled.std(dim=2).mean() > 0.5 and filled.count_nonzero() == everything.count_nonzero()


def test_blocks_that_attention_reads_take_no_memory_beyond_what_a_chunk_of_one_row_takes() -> None:
    each = ((never, BLOCK), (always, BLOCK), (longer_blocks, BLOCK), (longer_blocks, BLOCK + 1))
    read, all_rows, one_row, longer = (
        plan_of(TINY, kv_dtype=torch.int8, dequantizes=dequantizes, gamma=block - 1) for dequantizes, block in each
    )
    assert read.per_row["dequantised KV"] == one_row.per_row["dequantised KV"] == 0
    assert longer.per_row["dequantised KV"] == all_rows.per_row["dequantised KV"] > 0
    assert longer.fixed["activations"] == all_rows.fixed["activations"] == read.fixed["activations"]
    assert one_row.fixed["activations"] == read.fixed["activations"] + all_rows.per_row["dequantised KV"]


def test_a_draft_dequantises_its_own_entries_when_the_target_does_not() -> None:
    """Steps of all rows, and where it runs prompts chunks of their blocks; SnapKV's runs one over the whole context."""
    plan = partial(plan_of, TINY, kv_dtype=torch.int8)
    own = self_draft(TINY, kv_dtype=torch.int8, dequantizes=always)
    chunks_only = replace(own, dequantizes=longer_blocks)
    prefills = replace(chunks_only, prefills=True)
    read, of_target = (plan(dequantizes=dequantizes, footprint=None) for dequantizes in (never, always))
    of_draft = of_target.per_row["dequantised KV"] * BUDGET // CAPACITY
    assert plan(footprint=own).per_row["dequantised KV"] == of_draft > 0
    both = plan(footprint=own, dequantizes=always)
    assert both.per_row["dequantised KV"] == of_target.per_row["dequantised KV"]
    assert plan(footprint=own, dequantizes=longer_blocks).fixed["activations"] == (
        read.fixed["activations"] + of_target.per_row["dequantised KV"] - of_draft
    )
    for draft, chunk in ((own, 0), (chunks_only, 0), (prefills, CAPACITY // 8 * of_draft)):
        assert plan(footprint=draft).fixed["activations"] == read.fixed["activations"] + chunk
    inner = SimpleNamespace(inner=SimpleNamespace(gamma=BLOCK), source=None)  # whose round the draft verifies
    assert plan(footprint=chunks_only).per_row["dequantised KV"] == 0
    assert plan(footprint=chunks_only, draft=inner).per_row["dequantised KV"] == of_draft
    observing = replace(prefills, caches=(SnapKV(BUDGET, 6).new_cache(TINY, 1, 0, "meta", torch.int8),))
    selects, reads = (plan(footprint=replace(observing, dequantizes=d)) for d in (longer_blocks, never))
    assert selects.fixed["activations"] == reads.fixed["activations"] + of_target.per_row["dequantised KV"]
    # What verification chooses takes scores and keys of a layer.
    choosing = replace(own, caches=(VerifyTopK(BUDGET, 6).new_cache(TINY, 1, 0, "meta", torch.float32),))
    chooses, copies = (plan(footprint=choosing, dequantizes=d).per_row["dequantised KV"] for d in (never, always))
    scores = CAPACITY * 12 * BLOCK * TINY.n_head
    assert chooses == scores + CAPACITY * 4 * 2 * 8 > of_draft
    assert copies == scores + of_target.per_row["dequantised KV"]
    # Of several budgets' caches one is read at a time, but all are held.
    caches = (StreamingKVCache(TINY, 1, n, 4, "meta", torch.int8) for n in (BUDGET, BUDGET // 2, BUDGET // 2))
    several = plan(footprint=replace(own, caches=tuple(caches)))
    assert several.per_row["dequantised KV"] == of_draft
    assert several.per_row["draft KV"] == 2 * plan(footprint=own).per_row["draft KV"]


@pytest.mark.parametrize("part", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("kind", [VerifyTopK, partial(Retrieval, chunk=1), Retrieval])
def test_choosing_entries_is_planned_whatever_part_is_chosen(kind, part) -> None:
    """Of all rows, as they lie or by name, and copied from one storage to another."""
    config, policy = replace(TINY, head_dim=64), kind(int(part * CAPACITY), 8, n_sink=0)
    for dtype, stored in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.int8),
    ):
        own, of_row = (policy.new_cache(config, n, CAPACITY, on, stored) for n, on in ((3, "cpu"), (1, "meta")))
        target, peaks = FullKVCache(config, 3, CAPACITY, dtype=dtype), []
        planned = 3 * plan_of(config, dtype, footprint=self_draft(config, caches=(of_row,))).per_row["dequantised KV"]
        observed = own.observer(BLOCK, config.n_head, dtype, CAPACITY)
        observed.starts[:] = CAPACITY - BLOCK
        for rows in (torch.tensor([2, 0, 1]), slice(None)):
            with LiveBytes() as live:
                own.view(rows).choose(target.view(rows), torch.full([3], CAPACITY), observed, [0], SelectionOps())
            peaks.append(live.peak)
        assert max(peaks) <= planned <= 2 * max(peaks)


def test_unpacking_is_planned_whatever_cache_stands_beside() -> None:
    caches = QuantizedKVCache(TINY, 1, 700, device="meta"), StreamingKVCache(TINY, 1, 40, 4, "meta")
    each = (caches[:1], caches, caches[::-1])
    alone, *both = (Footprint(TINY, torch.float32, one, dequantizes=always).dequantized(1) for one in each)
    assert both == [alone] * 2 and alone > 0
    read = Footprint(TINY, torch.float32, caches[:1], dequantizes=lambda n_token, group: group != 16)
    assert read.dequantized(1) == 0


def test_a_chunk_of_entries_in_the_dtype_of_the_model_copies_those_of_blocks_alone() -> None:
    read, chunks_only, copied = (plan_of(TINY, dequantizes=one) for one in (never, longer_blocks, always))
    assert chunks_only == read != copied
    prefills = replace(self_draft(TINY, dequantizes=longer_blocks), prefills=True)
    copies = plan_of(TINY, footprint=prefills).fixed["activations"] - read.fixed["activations"]
    assert copies == CAPACITY // 8 * 2 * 4 * BUDGET * TINY.n_kv_head * TINY.head_dim


def test_selecting_entries_is_planned_for() -> None:
    """Scores of the observed queries over a whole context, keys in order, and a draft's whole prompt."""
    plain = plan_of(TINY).fixed["activations"]
    of_target = self_draft(TINY, caches=(SnapKV(BUDGET, 6).new_cache(TINY, 1, 0, "meta", torch.float32),))
    own = replace(of_target, shares_weights=False, prefills=True)
    scores = 4 * 6 * TINY.n_head * CAPACITY
    keys = 4 * TINY.n_kv_head * TINY.head_dim * CAPACITY
    needed, with_prompt = (plan_of(TINY, footprint=draft).fixed["activations"] - plain for draft in (of_target, own))
    assert needed >= 2 * scores + keys
    assert with_prompt == needed + FullKVCache(TINY, 1, CAPACITY).n_bytes
