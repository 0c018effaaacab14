"""QuantizedKVCache against quantisation on plain numbers: what is in 4 bits, what is not yet, and what stays."""

import pytest
import torch
from tiny import TINY

from common.errors import ConfigError
from kv_cache import FullKVCache
from kv_cache.entries import stored_as
from kv_cache.quantized import Quantized, QuantizedKVCache

GROUP, WINDOW, N_ROWS, LONGEST = 4, 8, 3, 90
RING = WINDOW + 3 * GROUP
OPTIONS = ("quant_group", "quant_window")
LAYERS, HEADS, DIM = TINY.n_layer, TINY.n_kv_head, TINY.head_dim


def quantized(dtype=torch.float32) -> QuantizedKVCache:
    return QuantizedKVCache(TINY, N_ROWS, LONGEST, GROUP, WINDOW, dtype=dtype)


def entries_of(n: int, seed: int = 0) -> torch.Tensor:
    """`[n_layer, B, n, 2, n_kv_head, head_dim]`, of channels whose sizes differ."""
    x = torch.randn(LAYERS, N_ROWS, n, 2, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    return x * 2.0 ** torch.arange(-3, DIM - 3) + 5


def rounded(x: float) -> float:
    return float(torch.tensor(x).bfloat16())


def in_four_bits(numbers: list[float]) -> list[float]:
    """One group's numbers, by 16 levels between its smallest and its largest."""
    low = rounded(min(numbers))
    step = rounded((max(numbers) - low) / 15)
    return [low + step * min(15, max(0, round((x - low) / step))) for x in numbers]


def expected(entries: torch.Tensor, layer: int, row: int, length: int, n_packed: int) -> torch.Tensor:
    """`[2, n, n_kv_head, head_dim]`, of which so many tokens are in 4 bits."""
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


def assert_reads(cache, entries: torch.Tensor, lengths: list[int], n_packed: list[int]) -> None:
    rows = range(len(lengths)) if cache.rows is None else cache.rows.tolist()
    layer = LAYERS - 1
    kv = cache.read(layer).unpacked(torch.float32)
    assert kv.rows is None
    for i, (row, length, packed) in enumerate(zip(rows, lengths, n_packed, strict=True)):
        found = torch.stack([kv.keys[i, :length], kv.values[i, :length]])
        torch.testing.assert_close(found, expected(entries, layer, row, length, packed), rtol=1e-5, atol=1e-5)


def out_of_ring(length: int) -> int:
    return max(0, length - RING)


@pytest.mark.parametrize("lengths", [[70, 9, 41], [24, 25, 53], [1, 81, 20]])
def test_a_filled_row_reads_as_numbers_say_and_goes_on(lengths):
    """Tokens that the ring holds read as they are; groups that leave it are in 4 bits, in blocks of any length."""
    cache, source, entries = quantized(), FullKVCache(TINY, N_ROWS, LONGEST), entries_of(LONGEST)
    write(source, entries, [0] * N_ROWS, LONGEST)
    for row, length in enumerate(lengths):
        cache.fill_row(row, source, length)
    write(cache, entries, lengths, 1)
    now = [length + 1 for length in lengths]
    view = cache.view(slice(None), max(now))
    assert_reads(view, entries, now, [out_of_ring(n) for n in now])


@pytest.mark.parametrize("n", [1, 3, GROUP])
def test_written_block_by_block_a_row_is_what_it_is_filled_with(n):
    """Rows by name, in another order; the row between them stays empty. Rejected tokens are written over."""
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
    n_group = (starts[0] - n - WINDOW) // GROUP
    assert n_group * GROUP > 2 * RING
    for name, of_row, of_token, count in (
        ("_key_codes", 1, 3, n_group),
        ("_value_codes", 1, 3, n_group * GROUP),
        ("_key_grids", 2, 4, n_group),
        ("_value_grids", 2, 5, n_group * GROUP),
    ):
        own, again = (getattr(one, name).narrow(of_token, 0, count).movedim(of_row, 0) for one in (cache, filled))
        assert torch.equal(own[[0, 2]], again[[0, 2]]) and not own[1].any()
    found, wanted = (one.view(rows, starts[0]).read(1).unpacked(torch.float32) for one in (cache, filled))
    for tokens in (slice(0, out_of_ring(starts[0])), slice(-WINDOW, None)):
        for own, again in ((found.keys, wanted.keys), (found.values, wanted.values)):
            assert torch.equal(own[:, tokens], again[:, tokens])
    assert len(found.keys) == 2


@pytest.mark.parametrize("target", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("own", [torch.float32, torch.int8])
def test_entries_of_8_bits_are_quantised_from_what_they_mean(target, own):
    cache, source, entries = quantized(own), FullKVCache(TINY, N_ROWS, LONGEST, dtype=target), entries_of(LONGEST)
    write(source, entries, [0] * N_ROWS, LONGEST)
    cache.fill_row(0, source, 60)
    meant = torch.stack(source.read(0).dequantized(torch.float32))[:, 0, :60]
    found = torch.stack(cache.read(0).dequantized(torch.float32))[:, 0, :60]
    packed = expected(meant.transpose(0, 1)[None, None], 0, 0, 60, out_of_ring(60))
    if own == torch.int8:
        values, scales = stored_as(packed[:, out_of_ring(60) :], None, own)
        packed[:, out_of_ring(60) :] = values * scales[..., None]
        torch.testing.assert_close(found, packed, rtol=0.005, atol=0.25)  # read in bfloat16, in two steps
    else:
        torch.testing.assert_close(found, packed, rtol=1e-5, atol=1e-5)


def test_what_came_back_from_further_on_leaves_its_codes():
    """A row that is cut far back has lost what the ring held there: what was in 4 bits stays as it is."""
    cache, source, entries = quantized(), FullKVCache(TINY, N_ROWS, LONGEST), entries_of(LONGEST)
    write(source, entries, [0] * N_ROWS, LONGEST)
    cache.fill_row(0, source, 80)
    codes = cache._value_codes.clone()
    cache.rollback(torch.tensor([45, 0, 0]))
    write(cache.view(slice(0, 1)), entries, [45], 2)
    assert torch.equal(cache._value_codes, codes)


@pytest.mark.parametrize("known,length", [(30, 33), (30, 80), (9, 60), (3, 20), (60, 61)])
@pytest.mark.parametrize("n", [1, GROUP])
def test_a_row_takes_over_what_it_missed(known, length, n):
    """What it knew was written in blocks of n; then it is as if it had been filled at once."""
    source, entries = FullKVCache(TINY, N_ROWS, LONGEST), entries_of(LONGEST)
    write(source, entries, [0] * N_ROWS, LONGEST)
    caught_up, filled = quantized(), quantized()
    start = known % n
    caught_up.fill_row(1, source, start)
    for position in range(start, known, n):
        write(caught_up.view(torch.tensor([1])), entries, [position], n)
    caught_up.fill_row(1, source, length, n_known=known)
    filled.fill_row(1, source, length)
    found, wanted = (one.view(extent=length).read(1).unpacked(torch.float32) for one in (caught_up, filled))
    for own, again in ((found.keys, wanted.keys), (found.values, wanted.values)):
        assert torch.equal(own[1], again[1])
    assert torch.equal(caught_up.positions, filled.positions)
    packed = (length - WINDOW) // GROUP * GROUP
    assert torch.equal(caught_up._value_codes[:, 1, :, :packed], filled._value_codes[:, 1, :, :packed])


@pytest.mark.parametrize("n_prompt", [33, 36, 38])
def test_a_row_that_is_put_back_goes_on_as_before(n_prompt):
    """Behind a prompt in blocks: what is quantised first when it is decoded, after it was and was taken back."""
    entries, (put_back, other) = entries_of(LONGEST), (quantized(), quantized())
    for cache in (put_back, other):
        for start in range(0, n_prompt, GROUP):
            write(cache, entries, [start] * N_ROWS, min(GROUP, n_prompt - start))
    left = [x.clone() for x in put_back.tensors]
    write(put_back, entries, [n_prompt] * N_ROWS, 1)
    for x, copy in zip(put_back.tensors, left, strict=True):
        x.copy_(copy)
    for cache in (put_back, other):
        for position in range(n_prompt, n_prompt + 3 * GROUP):
            write(cache, entries, [position] * N_ROWS, 1)
    assert all(map(torch.equal, put_back.tensors, other.tensors))


def test_what_a_row_held_before_leaves_no_trace():
    """A ring is coarser than the target's entries: what was quantised of these is not quantised of that again."""
    source, entries = FullKVCache(TINY, N_ROWS, LONGEST), entries_of(LONGEST)
    write(source, entries, [0] * N_ROWS, 40)
    new, used = quantized(torch.int8), quantized(torch.int8)
    used.fill_row(1, source, 40)
    write(used.view(torch.tensor([1])), entries, [40], 1)
    for cache in (new, used):
        cache.fill_row(1, source, 40)
        write(cache.view(torch.tensor([1])), entries, [40], 3)
    assert torch.equal(new._value_codes[:, 1], used._value_codes[:, 1])
    assert torch.equal(new._key_codes[:, 1], used._key_codes[:, 1])


@pytest.mark.parametrize("at_once", [1, 7])
def test_a_row_is_filled_by_parts(at_once, monkeypatch):
    source = FullKVCache(TINY, N_ROWS, LONGEST)
    write(source, entries_of(LONGEST), [0] * N_ROWS, LONGEST)
    whole, by_parts = quantized(), quantized()
    whole.fill_row(1, source, LONGEST - 5)
    monkeypatch.setattr("kv_cache.quantized.FILLED_AT_ONCE", at_once)
    by_parts.fill_row(1, source, LONGEST - 5)
    assert all(map(torch.equal, whole.tensors, by_parts.tensors)) and whole._value_codes.any()


def test_what_is_written_anew_further_back_is_quantised_again():
    cache, entries, others = quantized(), entries_of(LONGEST), entries_of(LONGEST, seed=1)
    rows = cache.view(slice(0, 2))
    for written, starts in ((others, (0, 8)), (entries, (40, 24))):
        for i in range(0, 40, GROUP):
            rows.rollback(torch.tensor([start + i for start in starts]))
            write(rows, written, [start + i for start in starts], GROUP)
    codes = cache._value_codes[:, :2].clone()
    for row, start in enumerate((40, 24)):
        again = quantized()
        source = FullKVCache(TINY, N_ROWS, LONGEST)
        write(source, entries, [0] * N_ROWS, LONGEST)
        again.fill_row(row, source, start + 40)
        of_new = slice(start, (start + 40 - GROUP - WINDOW) // GROUP * GROUP)
        assert of_new.stop > start + GROUP
        assert torch.equal(codes[:, row, :, of_new], again._value_codes[:, row, :, of_new])


def test_what_cannot_work_is_refused():
    for group, window, named in ((0, 8, "quant_group 1"), (-3, -9, "quant_group 1"), (8, 7, "quant_window 8")):
        with pytest.raises(ConfigError, match=f"use --{named} or more$"):
            QuantizedKVCache(TINY, 1, 50, group, window)


def test_a_window_that_holds_the_whole_text_is_known_to():
    assert Quantized(quant_window=70).holds_all(70) and not Quantized(quant_window=70).holds_all(71)


def test_a_kernel_that_fails_is_replaced_and_it_is_said(monkeypatch, capsys):
    """As Triton's does here, where it has no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr("kv_cache.quantized.triton_reads", lambda entries: entries.device.type == "cpu")
    cache, full = QuantizedKVCache(TINY, 1, 99), FullKVCache(TINY, 1, 99)
    cache.fill_row(0, full, 98)
    cache.begin(torch.tensor([[98]]))
    assert "PyTorch packs 4 bits" in capsys.readouterr().err and cache.packed[2].any()
