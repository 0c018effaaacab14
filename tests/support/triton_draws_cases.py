"""Random numbers and filters by the Triton kernels against those by PyTorch, in Triton's interpreter.

test_triton_kernels.py runs them in a separate process.
"""

import math
from itertools import islice

import pytest
import torch

from engine.sampling import triton_draws
from engine.sampling.distribution import Distribution
from engine.sampling.noise import Stream, gumbel, triton_kernels, uniform
from engine.sampling.triton_draws import PAIRS, plan_draw, plan_filter, run
from tests.support.filter_cases import FILTERS, kept_by_sorting, scaled_logits

SEEDS, REQUESTS = (torch.tensor(x)[:, None] for x in ([0, -1, 2**62 + 1, -(2**63)], [7, 2**32 - 1, 0, 5]))
KEYS = SEEDS, REQUESTS, torch.tensor([[0, 2**32 - 1, 31_999]])


@pytest.mark.parametrize("stream,n_ids", [(Stream.ACCEPT, 2 * PAIRS + 3), (2**32 - 1, 1)])
def test_numbers_are_those_of_pytorch(stream, n_ids):
    """Two libraries' logarithms may differ in the last bit; the float32 numbers do not."""
    given = *KEYS, stream, n_ids
    assert torch.equal(run(plan_draw(*given)), uniform(*given))
    assert torch.equal(run(plan_draw(*given, torch.float32)), gumbel(*given, torch.float64).float())
    exact = gumbel(*given, torch.float64)
    torch.testing.assert_close(run(plan_draw(*given, torch.float64)), exact, rtol=1e-14, atol=1e-15)


def test_wrong_kernels_are_not_used(monkeypatch):
    triton_kernels.cache_clear()
    assert triton_kernels("cpu") is triton_draws
    for name, wrong in (
        ("plan_draw", lambda *keys: plan_draw(*keys[:2], keys[2] + 1, *keys[3:])),
        ("plan_filter", lambda scaled, k, p: plan_filter(scaled, k + 1, p)),
    ):
        triton_kernels.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(triton_draws, name, wrong)
            assert triton_kernels("cpu") is None


@pytest.mark.parametrize("vocab,dtype,n_step,every", [(70, torch.float32, 1, 1), (9, torch.float64, 2, 3)])
def test_filters_keep_what_they_keep_of_a_sorted_row(vocab, dtype, n_step, every):
    law = Distribution.of(FILTERS)
    for scaled in (each[:, :n_step] for each in islice(scaled_logits(vocab, dtype), 0, None, every)):
        wanted = scaled.masked_fill(~kept_by_sorting(scaled), -math.inf)
        assert torch.equal(run(plan_filter(scaled, law.top_k, law.top_p)), wanted)


def test_filters_end_where_logits_are_no_numbers():
    law, scaled = Distribution.of(FILTERS), torch.full((len(FILTERS), 1, 9), math.nan)
    run(plan_filter(scaled, law.top_k, law.top_p))
    scaled[..., ::2] = -math.inf
    run(plan_filter(scaled, law.top_k, law.top_p))
