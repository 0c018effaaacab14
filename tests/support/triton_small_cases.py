"""Random numbers, filters and quantised linear layers by the Triton kernels against PyTorch, in Triton's interpreter;
test_triton_kernels.py runs them in a separate process."""

import math
from itertools import islice

import pytest
import torch

from common.launch import run
from engine.sampling import triton_draws
from engine.sampling.distribution import Distribution
from engine.sampling.noise import Stream, gumbel, triton_kernels, uniform
from engine.sampling.triton_draws import PAIRS, plan_draw, plan_filter
from kv_cache.entries import quantize as quantize_rows
from models.kernels import quantize, triton_int4, triton_quantize
from models.kernels.triton_int4 import MOST_ROWS
from models.kernels.triton_quantize import OUTPUTS, plan_products, plan_rows
from tests.support.fake_cuda_linear import cuda_linears
from tests.support.filter_cases import FILTERS, kept_by_sorting, scaled_logits

GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "dtype,n_row,n_in", [(torch.float32, 1, 24), (torch.float16, 5, 136), (torch.bfloat16, 20, 24)]
)
def test_rows_are_rounded_as_in_pytorch(dtype, n_row, n_in):
    """Ties, zeros, rows of a wider tensor; padding rows are zero, and a row that is not finite disturbs no other."""
    x = (torch.randn(n_row, n_in + 8, generator=GENERATOR) * torch.logspace(3, -3, n_row)[:, None]).to(dtype)[:, :n_in]
    x[0] = torch.arange(n_in) % 255 / 2 - 63.5
    x[-1, ::2] *= n_row > 5
    wanted, wanted_scales = quantize_rows(x, torch.int8)
    rows, scales = run(plan_rows(x, quantize.FEWEST_CUDA_ROWS))
    assert torch.equal(rows[:n_row], wanted) and torch.equal(scales, wanted_scales)
    assert rows.shape == (max(n_row, quantize.FEWEST_CUDA_ROWS), n_in) and not rows[n_row:].any()
    for value in (float("nan"), float("inf"), float("-inf")):
        x[0, 3] = value
        again, scales = run(plan_rows(x, quantize.FEWEST_CUDA_ROWS))
        assert not scales[0].isfinite() and torch.equal(scales[1:], wanted_scales[1:])
        assert torch.equal(again[1:], rows[1:])


@pytest.mark.parametrize(
    "dtype,with_bias,n_row,d_out", [(torch.float32, False, 3, OUTPUTS + 8), (torch.float16, True, 20, 16)]
)
def test_layers_in_8_bits_are_those_of_pytorch(monkeypatch, dtype, with_bias, n_row, d_out):
    x, weight = (torch.randn(n, 192, generator=GENERATOR) for n in (n_row, d_out))
    bias = torch.randn(d_out, generator=GENERATOR).to(dtype) if with_bias else None
    assert quantize.triton_kernels("cpu", 8) is triton_quantize
    with cuda_linears(monkeypatch):
        layer, planned = quantize.Int8Linear(weight, bias), []
        monkeypatch.setattr(quantize, "run", lambda given: planned.append(given) or run(given))
        got = layer(x.to(dtype))
        assert len(planned) == 2
        monkeypatch.setattr(quantize, "triton_kernels", lambda *_: None)
        assert torch.equal(got, layer(x.to(dtype))) and got.dtype == dtype and len(planned) == 2


@pytest.mark.parametrize("n_row,d_in", [(3, 96), (MOST_ROWS, 256), (MOST_ROWS + 1, 160)])
def test_layers_in_4_bits_are_those_of_pytorch(monkeypatch, n_row, d_in):
    """Up to MOST_ROWS rows use the kernel that unpacks, more the weights that another writes; twice, since the first
    call leaves a counter for the second. The interpreter multiplies float32 alone."""
    weight, bias = torch.randn(128, d_in, generator=GENERATOR), torch.randn(128, generator=GENERATOR)
    x, planned = torch.randn(n_row, d_in, generator=GENERATOR), []
    assert quantize.triton_kernels("cpu", 4) is triton_int4
    with cuda_linears(monkeypatch):
        layer = quantize.Int4Linear(weight, bias)
    monkeypatch.setattr(quantize, "INT4_DTYPE", torch.float32)
    monkeypatch.setattr(quantize, "run", lambda given: planned.append(given[0].kernel) or run(given))
    kernel = triton_int4.multiply if n_row <= MOST_ROWS else triton_int4.write_weights
    wanted = x @ quantize.dequantize(layer.weight, layer.grids, d_in).float().T + bias
    for _ in range(2):
        assert (layer(x) - wanted).norm() < 1e-2 * wanted.norm()  # `dequantize` rounds weights to bfloat16
    assert planned == [kernel] * 2


def test_kernels_that_compute_otherwise_are_not_used(monkeypatch, capsys):
    plan_product, plan_weights = triton_int4.plan_product, triton_int4.plan_weights
    int8, int4, kernels = (triton_quantize, 8), (triton_int4, 4), quantize.triton_kernels
    for (module, bits), name, wrong, said in (
        (int8, "plan_rows", lambda x, fewest: plan_rows(x * 1.1, fewest), "[True, False"),
        (int8, "plan_products", lambda sums, *by: plan_products(sums + 9, *by), "False]"),
        (int8, "run", lambda planned: 1 / 0, "ZeroDivisionError"),
        (int4, "plan_weights", lambda w, grids, n: plan_weights(w, grids + 1, n), "weights False"),
        (int4, "plan_product", lambda x, *by: plan_product(x.roll(32, 1), *by), "weights True"),
    ):
        kernels.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            assert kernels("cpu", bits) is None and said in capsys.readouterr().err
        kernels.cache_clear()


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
