"""Views of named rows, and entries in 8 bits. test_policies.py has the retained positions."""

import pytest
import torch
from tiny import TINY

from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.entries import pack


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_a_view_of_named_rows_writes_and_forgets_in_those_alone(dtype):
    generator = torch.Generator().manual_seed(0)
    together, apart = (StreamingKVCache(TINY, 4, 10, 2, dtype=dtype) for _ in range(2))
    rows, starts = torch.tensor([3, 1]), torch.tensor([5, 14])
    for n_token in (4, 1, 6):
        positions = starts[:, None] + torch.arange(n_token)
        new = torch.randn(2, n_token, 2, 2, 8, generator=generator)
        view = together.view(rows, 25)
        view.write(1, view.begin(positions), new)
        view.rollback(starts + n_token - 1)
        for i, row in enumerate(rows.tolist()):
            one = apart.view(slice(row, row + 1))
            one.write(1, one.begin(positions[i : i + 1]), new[i : i + 1])
            one.rollback(starts[i : i + 1] + n_token - 1)
        assert torch.equal(together.entries, apart.entries) and torch.equal(together.positions, apart.positions)
        read, stored = view.read(1).dequantized(torch.float32), apart.read(1).dequantized(torch.float32)
        assert all(torch.equal(mine, all_rows[rows]) for mine, all_rows in zip(read, stored, strict=True))
        assert torch.equal(view.positions, apart.positions[rows]) and view.max_batch == 2
        starts += n_token - 1


@pytest.mark.parametrize("dtype,error", [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 0.04)])
def test_entries_in_8_bits_are_close_and_copied_with_their_scales(dtype, error):
    """Each token and head has its scale, so that magnitudes may differ; a zero stays zero."""
    target, draft = FullKVCache(TINY, 2, 20, dtype=dtype), StreamingKVCache(TINY, 2, 6, 2, dtype=dtype)
    positions = torch.arange(9).expand(2, 9)
    keys = torch.randn(2, 9, 2, 8) * torch.logspace(-3, 3, 9)[:, None, None]
    keys[0, 4] = 0
    for layer in range(TINY.n_layer):
        target.write(layer, target.begin(positions), pack(keys, -keys))
    stored_keys, stored_values = target.read(1).dequantized(torch.float32)
    largest = keys.abs().amax(-1, keepdim=True)
    assert ((stored_keys[:, :9] - keys).abs() <= 1.01 * error * largest).all()
    assert torch.equal(stored_values, -stored_keys)
    draft.fill_row(1, target, 9)
    kept = draft.retained_positions(9)
    copied = draft.read(1).dequantized(torch.float32)[0][1, draft.slots(kept)]
    assert torch.equal(copied, stored_keys[1, kept])
    plain = StreamingKVCache(TINY, 2, 6, 2)
    plain.fill_row(1, target, 9)
    assert torch.equal(plain.read(1).keys[1, plain.slots(kept)], stored_keys[1, kept])
    assert target.n_bytes == 2 * 2 * 2 * 20 * 2 * (8 + 4)
