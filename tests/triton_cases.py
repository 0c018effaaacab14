"""The Triton backend against the torch backend, in Triton's interpreter; run by test_triton_attention.py.

A module of its own, in a process of its own: TRITON_INTERPRET has to be set before anything imports triton,
and must not be while torch compiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_cases import FakeSlots, make_case

from kv_cache.entries import KV, largest, quantize
from models.attention import MAX_BLOCK, AttentionSpec, TorchAttention
from models.attention.triton_backend import Block, TritonAttention, unsupported

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
# Small enough for a few hundred slots to make several chunks; a multiple of every tile.
CHUNK = 64
STALE = 50.0


@dataclass
class Case:
    """Rows whose queries stand at `queries [B, T]`, over slots with `positions [B, C]`."""

    queries: torch.Tensor
    positions: torch.Tensor
    in_order: bool
    group: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    entries: torch.dtype | None = None
    sliding_window: int | None = None
    n_kv_head: int = 2

    def run(self, min_chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
        """What the Triton backend gives, and what attention in float64 over the same entries gives."""
        generator = torch.Generator().manual_seed(0)
        (batch, n_token), n_slot = self.queries.shape, self.positions.shape[1]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        n_head = self.n_kv_head * self.group
        q = normal(batch, n_head, n_token, self.head_dim).to(self.dtype).transpose(1, 2)
        last = self.queries.amax(1)[:, None]
        stale = (self.positions < 0) | (self.positions > last)
        stored, scales = [], []
        for _ in range(2):
            x = normal(batch, self.n_kv_head, n_slot, self.head_dim)
            x.masked_fill_(stale[:, None, :, None], STALE)
            entries, scale = (x.to(self.dtype), None) if self.entries is None else quantize(x, self.entries)
            stored.append(entries.transpose(1, 2))
            scales.append(None if scale is None else scale.transpose(1, 2))
        kv = KV(*stored, *scales)
        slots = FakeSlots(self.positions, self.in_order)
        spec = AttentionSpec(n_head, self.n_kv_head, self.head_dim, self.sliding_window, self.dtype)
        backend = TritonAttention(sm_count=1000, min_chunk=min_chunk)
        prepared = backend.prepare(spec, self.queries, slots)
        assert isinstance(prepared, Block)
        out = backend.attend(q, kv, prepared)
        assert out.is_contiguous() and out.dtype == self.dtype
        exact = TorchAttention()
        spec = AttentionSpec(n_head, self.n_kv_head, self.head_dim, self.sliding_window, torch.float64)
        return out, exact.attend(q.double(), _exact(kv), exact.prepare(spec, self.queries, slots))

    def check(self, min_chunk: int = CHUNK) -> None:
        out, wanted = self.run(min_chunk)
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n_token", [1, MAX_BLOCK, MAX_BLOCK + 1])
def test_8_bit_entries_are_dequantised_as_the_backend_says(n_token):
    case, backend = make_case([40, 33], n_token, storage=torch.int8), TritonAttention()
    assert case.dequantizes(backend) == backend.dequantizes(n_token) == (n_token > MAX_BLOCK)


def _exact(kv: KV) -> KV:
    keys, values = (x.double() for x in (kv.keys, kv.values))
    if kv.key_scales is None:
        return KV(keys, values)
    return KV(keys * kv.key_scales[..., None], values * kv.value_scales[..., None])


def in_order(lengths: list[int], n_token: int, n_slot: int, **settings) -> Case:
    """Rows whose first query stands after `lengths` tokens; the slots behind the last are stale."""
    queries = torch.tensor(lengths)[:, None] + torch.arange(n_token)
    positions = torch.arange(n_slot).expand(len(lengths), n_slot)
    positions = positions.masked_fill(positions > queries.amax(1)[:, None], -1)
    return Case(queries, positions, in_order=True, **settings)


def ring(lengths: list[int], n_token: int, n_slot: int, **settings) -> Case:
    """Rows whose slots hold the newest tokens in any order, with holes and with tokens yet to come."""
    generator = torch.Generator().manual_seed(1)
    case = in_order(lengths, n_token, n_slot, **settings)
    case.in_order = False
    for row, length in enumerate(lengths):
        held = torch.arange(length + n_token + 3).flip(0)[:n_slot]
        held[8:20:3] = -1
        slots = torch.randperm(n_slot, generator=generator)[: held.numel()]
        case.positions[row] = -1
        case.positions[row, slots] = held
    return case


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("n_token", [1, 2, 4, 5, 8, 16])
def test_ragged_rows_in_order(n_token, group, head_dim):
    # A row of nothing but its queries, one up to a chunk's border, one to the last slot.
    lengths = [0, CHUNK - n_token, 150 - n_token]
    in_order(lengths, n_token, n_slot=150, group=group, head_dim=head_dim, n_kv_head=1).check()


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_lengths_around_the_borders_of_tiles_and_chunks(shift):
    """A chunk of two tiles: lengths end a tile, a chunk, a chunk and a tile, two chunks."""
    for n_token in (1, 4):
        lengths = [border * CHUNK - n_token + shift for border in (1, 2, 3, 4)]
        in_order(lengths, n_token, n_slot=5 * CHUNK - 9, group=4, n_kv_head=1).check(min_chunk=2 * CHUNK)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("n_token", [1, 5])
@pytest.mark.parametrize("make", [in_order, ring])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("entries", [None, torch.int8, torch.float8_e4m3fn])
def test_entries(entries, dtype, make, n_token, group):
    make([0, 129], n_token, n_slot=140, group=group, dtype=dtype, entries=entries).check()


@pytest.mark.parametrize("n_token,group", [(1, 1), (2, 3), (4, 4), (16, 8)])
@pytest.mark.parametrize("n_slot", [33, 150])
def test_ring_with_holes(n_slot, n_token, group):
    ring([1, 40, 400], n_token, n_slot, group=group, head_dim=128, n_kv_head=1).check()


@pytest.mark.parametrize("make", [in_order, ring])
@pytest.mark.parametrize("sliding_window", [1, 64, 100, 1000])
def test_sliding_window(sliding_window, make):
    for n_token in (1, 5):
        make([0, 70, 200], n_token, n_slot=210, group=2, sliding_window=sliding_window, n_kv_head=1).check()


@pytest.mark.parametrize("is_in_order", [True, False])
def test_queries_that_do_not_follow_each_other(is_in_order):
    """An idle row repeats a position; nothing says that positions ascend."""
    case = in_order([0, 130, 60], 3, n_slot=140)
    case.queries = torch.tensor([[0, 0, 0], [132, 70, 131], [62, 62, 3]])
    case.in_order = is_in_order
    case.check()


@pytest.mark.parametrize("make", [in_order, ring])
def test_one_chunk_needs_no_merge(make):
    for entries in (None, torch.int8):
        make([0, 90, 141], 4, n_slot=150, group=3, entries=entries).check(min_chunk=256)


def test_a_block_that_is_a_view_of_more_rows_and_slots():
    """A row's positions, and its queries, need not lie where those of whole tensors would."""
    for make in (in_order, ring):
        case = make([70, 0, 120, 20], 2, n_slot=150)
        wide = torch.cat([case.positions, case.positions.flip(1)], 1)
        case.positions = wide[1:3, :150]
        case.queries = torch.stack([case.queries, case.queries], 2).flatten(1)[1:3, ::2]
        case.check()


def test_what_the_kernel_does_not_take_goes_to_torch():
    for n_token, head_dim, dtype in (
        (MAX_BLOCK + 1, 64, torch.float32),
        (2, 80, torch.float32),
        (2, 64, torch.float64),
    ):
        generator = torch.Generator().manual_seed(2)
        case = in_order([0, 40], n_token, n_slot=60)
        spec = AttentionSpec(4, 2, head_dim, None, dtype)
        slots = FakeSlots(case.positions, in_order=True)
        q = torch.randn(2, n_token, 4, head_dim, generator=generator, dtype=dtype)
        kv = KV(*(torch.randn(2, 60, 2, head_dim, generator=generator, dtype=dtype) for _ in range(2)))
        outs = [b.attend(q, kv, b.prepare(spec, case.queries, slots)) for b in (TritonAttention(), TorchAttention())]
        assert torch.equal(*outs)
        assert (unsupported(spec) is None) == (n_token > MAX_BLOCK)


def test_every_kind_of_entries_is_tested():
    assert set(largest()) == {torch.int8, torch.float8_e4m3fn}
