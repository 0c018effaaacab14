"""The torch backend against attention written out by hand, with expanded heads and an explicit mask."""

from __future__ import annotations

import pytest
import torch

from models.attention import MAX_BLOCK, TorchAttention
from tests.support.attention_cases import make_case, masked_attention


@pytest.mark.parametrize("group,n_kv_head", [(1, 2), (3, 2), (7, 1)])
@pytest.mark.parametrize("n_token", [1, 4, MAX_BLOCK, MAX_BLOCK + 1, 40])
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_attention_equals_a_plain_softmax(group, n_kv_head, n_token, sliding_window):
    """Ragged rows whose slots are a shuffled ring with holes, as after evictions and rollbacks."""
    lengths = [n_token, n_token + 9, n_token + 22]
    shape = {"group": group, "n_kv_head": n_kv_head, "head_dim": 8, "capacity": 64}
    case = make_case(lengths, n_token, **shape, dtype=torch.float64, ring=True, sliding_window=sliding_window)
    queries, slots = case.queries[..., None], case.slots.positions[:, None]
    visible = (slots >= 0) & (slots <= queries) & (queries - slots < (sliding_window or 10**9))
    wanted = masked_attention(case.q, *case.kv[:2], visible)
    torch.testing.assert_close(case.run(TorchAttention()), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(case.among_other_rows().run(TorchAttention()), case.run(TorchAttention()))
    case.among_other_rows().assert_notes(TorchAttention())
    stored = make_case(lengths, n_token, **shape, ring=True, storage=torch.int8, sliding_window=sliding_window)
    stored.assert_notes(TorchAttention())
