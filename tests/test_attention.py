"""The torch backend against attention written out by hand, with expanded heads and an explicit mask."""

from __future__ import annotations

import pytest
import torch
from attention_cases import FakeSlots, make_case

from kv_cache import KV
from models.attention import MAX_BLOCK, AttentionSpec, ObservingAttention, TorchAttention


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


@pytest.mark.parametrize("n_head,n_kv_head", [(2, 2), (6, 2), (4, 1), (7, 1)])
@pytest.mark.parametrize("n_token", [1, 4, MAX_BLOCK, MAX_BLOCK + 1, 40])
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_equals_attention_by_hand(n_head, n_kv_head, n_token, sliding_window):
    """Ragged rows whose slots are a shuffled ring with holes, as after evictions and rollbacks."""
    generator = torch.Generator().manual_seed(n_head * 100 + n_token)
    batch, n_slot, head_dim = 3, 64, 8

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(batch, n_token, n_head, head_dim)
    k, v = normal(batch, n_kv_head, n_slot, head_dim), normal(batch, n_kv_head, n_slot, head_dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    starts = torch.tensor([0, 9, 22])
    query_positions = starts[:, None] + torch.arange(n_token)
    slot_positions = torch.full((batch, n_slot), -1)
    for row in range(batch):
        last = int(query_positions[row, -1])
        slots = torch.randperm(n_slot, generator=generator)[: last + 1]
        slot_positions[row, slots] = torch.arange(last + 1)
    slot_positions[1, (slot_positions[1] >= 2) & (slot_positions[1] < 4)] = -1

    backend = TorchAttention()
    spec = AttentionSpec(n_head, n_kv_head, head_dim, sliding_window, torch.float64)
    prepared = backend.prepare(spec, query_positions, FakeSlots(slot_positions))
    out = backend.attend(q, KV(k, v), prepared)
    wanted = by_hand(q, k, v, query_positions, slot_positions, sliding_window)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_token", [1, MAX_BLOCK, MAX_BLOCK + 1])
def test_8_bit_entries_are_dequantised_as_the_backend_says(n_token):
    case, backend = make_case([40, 33], n_token, storage=torch.int8), TorchAttention()
    assert case.dequantizes(backend) and backend.dequantizes(n_token)


def test_observing_changes_no_answer(monkeypatch):
    backend = TorchAttention()
    monkeypatch.setattr(backend, "dequantizes", lambda n_token: n_token > 3)
    assert [ObservingAttention(backend).dequantizes(n_token) for n_token in (3, 4)] == [False, True]


def test_chunks_of_any_size_give_the_same_logits():
    from tiny import full_cache, random_prompts, tiny_model

    from engine import ModelRunner

    model = tiny_model()
    prompts = random_prompts([50, 31])
    whole = [ModelRunner(model, full_cache(model, 1)).prefill_row(0, p).logits for p in prompts]
    for chunk in (1, 3, 17, 49):
        runner = ModelRunner(model, full_cache(model, 2), prefill_chunk=chunk)
        for row, prompt in enumerate(prompts):
            torch.testing.assert_close(runner.prefill_row(row, prompt).logits, whole[row], rtol=0, atol=1e-12)
