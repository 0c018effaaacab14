"""Inputs for tests of attention backends: ragged rows over ordered caches and rings, in any storage; and what kernels
that select entries have to choose and to copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from kv_cache import FullKVCache
from kv_cache.entries import KV, LARGEST, SCORE_CHUNK, dequantize, quantize
from kv_cache.quantized import QuantizedKVCache
from kv_cache.refreshed import RefreshedKVCache, SelectionOps
from kv_cache.verify_topk import VerifyTopK
from models import ModelConfig
from models.attention import AttentionSpec, TorchAttention
from models.attention.torch_backend import visibility


@dataclass(frozen=True)
class FakeSlots:
    positions: Tensor
    in_order: bool = False
    rows: Tensor | None = None
    block_ends_view: bool = False


@dataclass(frozen=True)
class Case:
    spec: AttentionSpec
    q: Tensor
    kv: KV
    queries: Tensor
    slots: FakeSlots

    def run(self, backend) -> Tensor:
        return backend.attend(self.q, self.kv, backend.prepare(self.spec, self.queries, self.slots))

    def among_other_rows(self) -> Case:
        """Return the case over a larger cache, in whose shuffled rows every other one is unused."""
        rows = 2 * torch.randperm(len(self.q), generator=torch.Generator().manual_seed(1)) + 1

        def spread(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            wide = x.transpose(1, 2)[:1].repeat(2 * len(x) + 1, *[1] * (x.dim() - 1))
            wide[rows] = x.transpose(1, 2)
            return wide.transpose(1, 2)

        return replace(self, kv=KV(*map(spread, self.kv[:4]), rows), slots=replace(self.slots, rows=rows))

    def assert_notes(self, backend, tolerance: float = 1e-5, plain: Tensor | None = None) -> None:
        """Require that noting changes no output, and that each token's shares of chunks are those of float64; the
        noted buffer is larger than the case. plain: the output without noting."""
        plain = self.run(backend) if plain is None else plain
        (batch, n_token), (n_slot, n_kv_head) = self.q.shape[:2], self.kv.keys.shape[1:3]
        rows = torch.arange(batch) if self.kv.rows is None else self.kv.rows
        noted = torch.full((len(self.kv.keys), n_token + 1, n_kv_head, -(-n_slot // SCORE_CHUNK) + 3), float("nan"))
        assert torch.equal(replace(self, kv=self.kv._replace(chunk_scores=noted)).run(backend), plain)
        keys = self.kv.dequantized(torch.float64)[0]
        scores = torch.einsum("btkgd,bckd->btkgc", self.q.double().unflatten(2, (n_kv_head, -1)), keys)
        visible = visibility(self.queries, self.slots.positions, self.spec.sliding_window)[:, :, None, None]
        scores = (scores * self.q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
        shares = scores.softmax(dim=-1).split(SCORE_CHUNK, dim=-1)
        wanted = torch.stack([some.amax(dim=-1) for some in shares], dim=-1).mean(dim=3)
        found = noted[rows, :n_token, :, : len(shares)].double()
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert noted.isfinite().sum() == found.numel()

    def reference(self) -> Tensor:
        """Return what the torch backend gives over the same entries, in float64."""
        keys, values = self.kv.dequantized(torch.float64)
        exact = replace(self, spec=replace(self.spec, dtype=torch.float64), q=self.q.double(), kv=KV(keys, values))
        return exact.run(TorchAttention())


def make_case(
    lengths: list[int],
    n_token: int,
    *,
    group: int = 3,
    n_kv_head: int = 2,
    head_dim: int = 64,
    capacity: int = 200,
    storage: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    ring: bool = False,
    sliding_window: int | None = None,
) -> Case:
    """Return ragged rows: row b's block ends at position `lengths[b] - 1`. Entries that no query may see are large.

    Entries are stored in `dtype` if not in another. A `ring` has the newest tokens in any order, holes, and tokens
    that follow the block.
    """
    generator = torch.Generator().manual_seed(0)
    batch = len(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ends = torch.tensor(lengths)
    queries = (ends[:, None] - n_token + torch.arange(n_token)).clamp(min=0)
    positions = torch.full((batch, capacity), -1)
    for row, length in enumerate(lengths):
        if ring:
            newest = torch.arange(length + 3).flip(0)[:capacity]
            newest[8:20:3] = -1
            positions[row, torch.randperm(capacity, generator=generator)[: len(newest)]] = newest
        else:
            positions[row, :length] = torch.arange(length)
    keys, values = normal(batch, n_kv_head, capacity, head_dim), normal(batch, n_kv_head, capacity, head_dim)
    unseen = ((positions < 0) | (positions > queries.amax(1, keepdim=True)))[:, None, :, None]
    keys, values = keys.masked_fill(unseen, 50.0), values.masked_fill(unseen, 1e4)
    key_scales = value_scales = None
    if storage in LARGEST:
        keys, key_scales = quantize(keys, storage)
        values, value_scales = quantize(values, storage)
        key_scales, value_scales = key_scales.transpose(1, 2), value_scales.transpose(1, 2)
    else:
        keys, values = keys.to(storage or dtype), values.to(storage or dtype)
    n_head = n_kv_head * group
    return Case(
        AttentionSpec(n_head, n_kv_head, head_dim, sliding_window, dtype),
        normal(batch, n_token, n_head, head_dim).to(dtype),
        KV(keys.transpose(1, 2), values.transpose(1, 2), key_scales, value_scales),
        queries,
        FakeSlots(positions, in_order=not ring),
    )


def packed_case(
    n_token: int,
    head_dim: int = 64,
    quant_group: int = 16,
    *,
    storage: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    group: int = 3,
    sliding_window: int | None = None,
    capacity: int = 500,
) -> Case:
    """Return rows by name of a cache in 4 bits, with several parts or none; recent tokens, and the block, in
    `storage`."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    config = ModelConfig(8, 2, 64, 2 * group, 2, head_dim, 8, 9999)
    cache = QuantizedKVCache(config, 4, capacity, quant_group, max(16, quant_group), dtype=storage)
    assert n_token <= cache.max_block, "a longer block overwrites its entries"
    full = FullKVCache(config, 4, capacity, dtype=storage)
    lengths, rows = torch.tensor([capacity - 40, 30, capacity - 89]), torch.tensor([3, 0, 1])
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        single = full.view(slice(row, row + 1))
        slots = single.begin(torch.arange(length)[None])
        for layer in range(2):
            single.write(layer, slots, normal(1, length, 2, 2, head_dim))
        cache.fill_row(row, full, length)
    view, queries = cache.view(rows, capacity - 40 + n_token), lengths[:, None] + torch.arange(n_token)
    view.write(1, view.begin(queries), normal(3, n_token, 2, 2, head_dim))
    spec = AttentionSpec(2 * group, 2, head_dim, sliding_window, dtype)
    q = normal(3, n_token, 2 * group, head_dim)
    return Case(spec, q.to(dtype), view.read(1), queries, FakeSlots(view.positions, view.in_order, view.rows))


def packed_in_turns(
    stored: torch.dtype, group: int, head_dim: int, packing: ModuleType | None, device: str = "cpu"
) -> list[Tensor]:
    """Return the tensors of a cache in 4 bits whose rows were filled, and went on by name in blocks, with rollbacks."""
    config, generator = ModelConfig(8, 2, 64, 4, 2, head_dim, 8, 9999), torch.Generator().manual_seed(group)
    full = FullKVCache(config, 4, 6 * group + 99, device, stored)
    new = (torch.randn(2, 4, full.capacity, 2, 2, head_dim, generator=generator) * 4 + 1).to(device)
    for layer in range(2):
        full.write(layer, torch.arange(full.capacity, device=device).expand(4, -1), new[layer])
    cache = QuantizedKVCache(config, 4, full.capacity, group, group + 3, device, stored, packing)
    for row, length in enumerate((4 * group + 5, 3, 2 * group, 3 * group + 9)):
        cache.fill_row(row, full, length)
    view, starts = cache.view(torch.tensor([3, 0, 1], device=device)), torch.tensor([3 * group + 9, 4 * group + 5, 3])
    starts = starts.to(device)
    for step, n_token in enumerate((1, 3, group, 5, 7, group, 2)):
        at = starts[:, None] + torch.arange(n_token, device=device)
        slots = view.begin(at)
        for layer in range(2):
            view.write(layer, slots, new[layer][view.rows[:, None], at])
        starts += n_token if step % 2 else n_token // 2
        if step == 4:
            starts[0] -= group  # further back than what is not in 4 bits
        cache.rollback(starts[[1, 2, 2, 0]])
    return [x.clone() for x in cache.tensors]


def chosen_of(cache: RefreshedKVCache) -> Tensor:
    """Return the second layer's chosen entries as numbers, sorted."""
    scales = None if cache.scales is None else cache.scales[1, ..., : cache.n_fixed]
    values = dequantize(cache.entries[1, ..., : cache.n_fixed, :], scales, torch.float64).transpose(0, 3).flatten(3)
    order = (values @ torch.arange(values.shape[-1], dtype=torch.float64).sin()).argsort(dim=0)
    return values.gather(0, order[..., None].expand_as(values))


def check_choices(
    ops: SelectionOps, source: torch.dtype, target: torch.dtype, keeps: bool, chunk: int = 8, by_name: bool = True
) -> None:
    """Require that several choices, in texts that end inside a chunk, are those of PyTorch, and that other rows stay.
    keeps: entries that are chosen again have to stay in place, and are not copied again."""
    config, generator = ModelConfig(8, 2, 64, 4, 2, 64, 8, 9999), torch.Generator().manual_seed(chunk)
    ours, expected = (VerifyTopK(60, 9, n_sink=1).new_cache(config, 4, 0, "cpu", target) for _ in range(2))
    ours.chunk = expected.chunk = chunk
    full = FullKVCache(config, 4, 200, dtype=source)
    full.write(0, torch.arange(200).expand(4, -1), torch.randn(4, 200, 2, 2, 64, generator=generator))
    rows = torch.tensor([3, 0, 1]) if by_name else slice(None)
    n_row, n_chunk = (3 if by_name else 4), -(-200 // chunk)
    for step in range(3):
        shares = torch.randint(9, (n_row, 2, n_chunk + 2), generator=generator) / 8
        # So few chunks that their number matters, and the order of equal ones.
        shares *= torch.rand(shares.shape, generator=generator) < (0.1, 0.4, 1)[step]
        ends = (torch.tensor([191, 61, 100, 52]) + step) * torch.tensor([True, step != 1, True, step != 2])
        before = ours.source_slots[1].clone()
        for cache, chooser in ((ours, ops), (expected, SelectionOps())):
            chooser.choose(cache.view(rows), 1, full.view(rows), 0, shares, ends[:n_row])
        assert torch.equal(chosen_of(ours), chosen_of(expected)) and chosen_of(ours).any()
        stayed = (before[..., None] == ours.source_slots[1][..., None, :]).any(-1) & (before >= 0)
        assert torch.equal(ours.source_slots[1][stayed], before[stayed]), "entries that are chosen again stay"
    if keeps:
        full.entries.zero_()
        ops.choose(ours.view(rows), 1, full.view(rows), 0, shares, ends[:n_row])
        assert torch.equal(chosen_of(ours), chosen_of(expected)) and stayed.any(), "no entry is copied again"
        ours.reset_row(0)
        ops.choose(ours.view(rows), 1, full.view(rows), 0, shares, ends[:n_row])
        has_entries = chosen_of(ours).abs().amax(dim=(0, 2, 3)) > 0
        assert has_entries.tolist() == [False, True, not by_name, True], "a row that is reset has lost its entries"


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return attention `[B, T, H, D]` by hand, KV expanded to every head; 0 for queries that see nothing.

    visible: `[B, T, S]`, or what broadcasts to it.
    """
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("bhts,bshd->bthd", weights, v)
