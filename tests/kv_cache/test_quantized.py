"""QuantizedKVCache against quantisation on plain numbers."""

import pytest
import torch

from kv_cache import FullKVCache
from kv_cache.entries import stored_as
from kv_cache.quantized import Quantized, QuantizedKVCache, kernel_for
from tests.support.tiny import TINY

GROUP, WINDOW, N_ROWS, LONGEST = 4, 8, 3, 90
RING = WINDOW + 3 * GROUP
LAYERS, HEADS, DIM = TINY.n_layer, TINY.n_kv_head, TINY.head_dim


def quantized(dtype=torch.float32) -> QuantizedKVCache:
    return QuantizedKVCache(TINY, N_ROWS, LONGEST, GROUP, WINDOW, dtype=dtype)


def entries_of(n: int, seed: int = 0) -> torch.Tensor:
    """Return random entries `[n_layer, B, n, 2, n_kv_head, head_dim]` whose channels differ in size."""
    x = torch.randn(LAYERS, N_ROWS, n, 2, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    return x * 2.0 ** torch.arange(-3, DIM - 3) + 5


def rounded(x: float) -> float:
    return float(torch.tensor(x).bfloat16())


def in_four_bits(numbers: list[float]) -> list[float]:
    """Round a group's numbers to 16 levels between its smallest and its largest."""
    low = rounded(min(numbers))
    step = rounded((max(numbers) - low) / 15)
    return [low + step * min(15, max(0, round((x - low) / step))) for x in numbers]


def expected(entries: torch.Tensor, layer: int, row: int, length: int, n_packed: int) -> torch.Tensor:
    """Return `[2, n, n_kv_head, head_dim]`, whose first `n_packed` tokens are in 4 bits."""
    raw = entries[layer, row, :length].transpose(0, 1)
    out = raw.clone()
    for head in range(HEADS):
        for first in range(0, n_packed, GROUP):
            for channel in range(DIM):
                at = slice(first, first + GROUP), head, channel
                out[0][at] = torch.tensor(in_four_bits(out[0][at].tolist()))
        for token in range(n_packed):
            for first in range(0, DIM, GROUP):
                at = token, head, slice(first, first + GROUP)
                out[1][at] = torch.tensor(in_four_bits(out[1][at].tolist()))
    out[:, n_packed:] = raw[:, n_packed:]
    return out


def write(cache, entries: torch.Tensor, starts: list[int], n: int) -> None:
    positions = torch.tensor(starts)[:, None] + torch.arange(n)
    slots = cache.begin(positions)
    rows = torch.arange(len(starts))[:, None] if cache.rows is None else cache.rows[:, None]
    for layer in range(LAYERS):
        cache.write(layer, slots, entries[layer][rows, positions])


def out_of_ring(length: int) -> int:
    return max(0, length - RING)


@pytest.mark.parametrize("lengths", [[70, 9, 41], [24, 25, 53]])
def test_a_filled_row_equals_plain_numbers_and_goes_on(lengths):
    """Tokens in the ring read as they are; groups that leave it are in 4 bits."""
    cache, source, entries = quantized(), FullKVCache(TINY, N_ROWS, LONGEST), entries_of(LONGEST)
    write(source, entries, [0] * N_ROWS, LONGEST)
    for row, length in enumerate(lengths):
        cache.fill_row(row, source, length)
    write(cache, entries, lengths, 1)
    now = [length + 1 for length in lengths]
    layer = LAYERS - 1
    kv = cache.view(slice(None), max(now)).read(layer).unpacked(torch.float32)
    for row, n in enumerate(now):
        found = torch.stack([kv.keys[row, :n], kv.values[row, :n]])
        torch.testing.assert_close(found, expected(entries, layer, row, n, out_of_ring(n)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 3, GROUP])
def test_a_row_that_is_written_in_blocks_equals_a_filled_row(n):
    """Rows by name, in another order; the row between them stays empty, and rejected tokens are overwritten."""
    cache, source, entries = quantized(), FullKVCache(TINY, N_ROWS, LONGEST), entries_of(LONGEST)
    rejected = entries_of(LONGEST, seed=1)
    write(source, entries, [0] * N_ROWS, LONGEST)
    rows, starts = torch.tensor([2, 0]), [0, 0]
    while max(starts) + GROUP <= 60:
        write(cache.view(rows), rejected, starts, GROUP)
        cache.view(rows).rollback(torch.tensor(starts))
        write(cache.view(rows), entries, starts, n)
        starts = [start + n for start in starts]
    filled = quantized()
    filled.fill_row(0, source, starts[1])
    filled.fill_row(2, source, starts[0])
    assert not cache.packed[1][:, 1].any()
    found, wanted = (each.view(rows, starts[0]).read(1).unpacked(torch.float32) for each in (cache, filled))
    for tokens in (slice(0, out_of_ring(starts[0])), slice(-WINDOW, None)):
        assert torch.equal(found.keys[:, tokens], wanted.keys[:, tokens])
        assert torch.equal(found.values[:, tokens], wanted.values[:, tokens])


@pytest.mark.parametrize(
    "target,stored", [(torch.int8, torch.float32), (torch.float8_e4m3fn, torch.int8), (torch.float32, torch.int8)]
)
def test_entries_of_8_bits_are_quantised_from_their_values(target, stored):
    cache, source, entries = quantized(stored), FullKVCache(TINY, N_ROWS, LONGEST, dtype=target), entries_of(LONGEST)
    write(source, entries, [0] * N_ROWS, LONGEST)
    cache.fill_row(0, source, 60)
    meant = torch.stack(source.read(0).dequantized(torch.float32))[:, 0, :60]
    found = torch.stack(cache.read(0).dequantized(torch.float32))[:, 0, :60]
    packed = expected(meant.transpose(0, 1)[None, None], 0, 0, 60, out_of_ring(60))
    if stored == torch.int8:
        values, scales = stored_as(packed[:, out_of_ring(60) :], None, stored)
        packed[:, out_of_ring(60) :] = values * scales[..., None]
        torch.testing.assert_close(found, packed, rtol=0.005, atol=0.25)  # read in bfloat16, in two steps
    else:
        torch.testing.assert_close(found, packed, rtol=1e-5, atol=1e-5)


def test_a_row_that_is_cut_far_back_keeps_its_codes():
    """The ring has lost the entries there, so those in 4 bits stay as they are."""
    cache, source, entries = quantized(), FullKVCache(TINY, N_ROWS, LONGEST), entries_of(LONGEST)
    write(source, entries, [0] * N_ROWS, LONGEST)
    cache.fill_row(0, source, 80)
    codes = cache.packed[1].clone()
    cache.rollback(torch.tensor([45, 0, 0]))
    write(cache.view(slice(0, 1)), entries, [45], 2)
    assert torch.equal(cache.packed[1], codes)


def test_tokens_that_are_written_again_further_back_are_quantised_again():
    cache, entries, others = quantized(), entries_of(LONGEST), entries_of(LONGEST, seed=1)
    rows = cache.view(slice(0, 2))
    for written, starts in ((others, (0, 8)), (entries, (40, 24))):
        for i in range(0, 40, GROUP):
            rows.rollback(torch.tensor([start + i for start in starts]))
            write(rows, written, [start + i for start in starts], GROUP)
    codes = cache.packed[1][:, :2].clone()
    for row, start in enumerate((40, 24)):
        again = quantized()
        source = FullKVCache(TINY, N_ROWS, LONGEST)
        write(source, entries, [0] * N_ROWS, LONGEST)
        again.fill_row(row, source, start + 40)
        new = slice(start, (start + 40 - GROUP - WINDOW) // GROUP * GROUP)
        assert new.stop > start + GROUP
        assert torch.equal(codes[:, row, :, new], again.packed[1][:, row, :, new])


def test_a_kernel_that_fails_is_replaced_with_a_note(monkeypatch, capsys):
    """Triton fails here, without a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr("kv_cache.quantized.triton_reads", lambda entries: True)
    kernel_for.cache_clear()
    cache, full = Quantized().new_cache(TINY, 1, 99, "cpu", torch.float32), FullKVCache(TINY, 1, 99)
    kernel_for.cache_clear()
    cache.fill_row(0, full, 98)
    cache.begin(torch.tensor([[98]]))
    assert capsys.readouterr().err and cache.packed[2].any()
