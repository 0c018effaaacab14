"""The torch backend against attention written out by hand, with expanded heads and an explicit mask."""

from __future__ import annotations

import pytest
import torch

from models.attention import MAX_BLOCK, TorchAttention
from tests.support.attention_cases import make_case


def by_hand(q, k, v, query_positions, slot_positions, sliding_window):
    """Softmax attention with KV expanded to every head; no packing, no fused kernel."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    queries, slots = query_positions[:, None, :, None], slot_positions[:, None, None, :]
    visible = (slots >= 0) & (slots <= queries)
    if sliding_window:
        visible = visible & (queries - slots < sliding_window)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize("group,n_kv_head", [(1, 2), (3, 2), (4, 1), (7, 1)])
@pytest.mark.parametrize("n_token", [1, 4, MAX_BLOCK, MAX_BLOCK + 1, 40])
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_attention_equals_a_plain_softmax(group, n_kv_head, n_token, sliding_window):
    """Ragged rows whose slots are a shuffled ring with holes, as after evictions and rollbacks."""
    lengths = [n_token, n_token + 9, n_token + 22]
    shape = {"group": group, "n_kv_head": n_kv_head, "head_dim": 8, "capacity": 64}
    case = make_case(lengths, n_token, **shape, dtype=torch.float64, ring=True, sliding_window=sliding_window)
    wanted = by_hand(case.q, *case.kv[:2], case.queries, case.slots.positions, sliding_window)
    torch.testing.assert_close(case.run(TorchAttention()), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(case.among_other_rows().run(TorchAttention()), case.run(TorchAttention()))


@pytest.mark.parametrize("n_token", [1, 4, MAX_BLOCK + 1])
@pytest.mark.parametrize("storage", [None, torch.int8])
def test_notes_the_shares_of_each_token(n_token, storage):
    for sliding_window in (None, 5):
        case = make_case([30, 64, 20], n_token, storage=storage, sliding_window=sliding_window)
        case.assert_notes(TorchAttention())
        case.among_other_rows().assert_notes(TorchAttention())
