"""The Triton kernels of quantised linear layers against PyTorch, in Triton's interpreter; run by
test_triton_kernels.py in a separate process."""

import pytest
import torch

from kv_cache.entries import quantize as quantize_rows
from models.kernels import quantize, triton_quantize
from models.kernels.quantize import FEWEST_CUDA_ROWS, Int8Linear, dequantize, triton_kernels
from models.kernels.triton_quantize import OUTPUTS, plan_products, plan_rows, plan_weights, run
from tests.support.fake_cuda_linear import cuda_linears

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
    rows, scales = run(plan_rows(x, FEWEST_CUDA_ROWS))
    assert torch.equal(rows[:n_row], wanted) and torch.equal(scales, wanted_scales)
    assert rows.shape == (max(n_row, FEWEST_CUDA_ROWS), n_in) and not rows[n_row:].any()
    for value in (float("nan"), float("inf"), float("-inf")):
        x[0, 3] = value
        again, scales = run(plan_rows(x, FEWEST_CUDA_ROWS))
        assert not scales[0].isfinite() and torch.equal(scales[1:], wanted_scales[1:])
        assert torch.equal(again[1:], rows[1:])


@pytest.mark.parametrize(
    "dtype,with_bias,n_row,d_out", [(torch.float32, False, 3, OUTPUTS + 8), (torch.float16, True, 20, 16)]
)
def test_layers_in_8_bits_are_those_of_pytorch(monkeypatch, dtype, with_bias, n_row, d_out):
    x, weight = (torch.randn(n, 192, generator=GENERATOR) for n in (n_row, d_out))
    bias = torch.randn(d_out, generator=GENERATOR).to(dtype) if with_bias else None
    assert triton_kernels("cpu") is triton_quantize
    with cuda_linears(monkeypatch):
        layer, planned = Int8Linear(weight, bias), []
        monkeypatch.setattr(triton_quantize, "run", lambda given: planned.append(given) or run(given))
        got = layer(x.to(dtype))
        assert len(planned) == 2
        monkeypatch.setattr(quantize, "triton_kernels", lambda _: None)
        assert torch.equal(got, layer(x.to(dtype))) and got.dtype == dtype and len(planned) == 2


@pytest.mark.parametrize("d_in,tiles", [(96, 2), (8448, 8)])
def test_weights_in_4_bits_are_those_of_pytorch(d_in, tiles):
    """bfloat16 holds the numbers of these grids: the interpreter cuts off bits where a GPU rounds."""
    packed = torch.randint(-(2**31), 2**31, (2, d_in // (16 * tiles), 32, tiles // 2), generator=GENERATOR)
    grids = torch.randint(-7, 8, (d_in // 32, 16, 2), generator=GENERATOR).bfloat16()
    assert torch.equal(run(plan_weights(packed.int(), grids)), dequantize(packed.int(), grids))


def test_kernels_that_compute_otherwise_are_not_used(monkeypatch, capsys):
    triton_kernels.cache_clear()
    assert triton_kernels("cpu") is triton_quantize
    for name, wrong, said in (
        ("plan_rows", lambda x, fewest: plan_rows(x * 1.1, fewest), "[True, False, True, True]"),
        ("plan_products", lambda sums, *given: plan_products(sums + 9, *given), "[True, True, False, True]"),
        ("plan_weights", lambda packed, grids: plan_weights(packed, grids + 1), "[True, True, True, False]"),
        ("run", lambda planned: 1 / 0, "ZeroDivisionError"),
    ):
        triton_kernels.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(triton_quantize, name, wrong)
            assert triton_kernels("cpu") is None and said in capsys.readouterr().err
    triton_kernels.cache_clear()
