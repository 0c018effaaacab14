"""Quantised linear layers against the arithmetic they stand for, written out."""

import pytest
import torch

from kv_cache import FullKVCache
from kv_cache.entries import quantize as quantize_rows
from models import load_model
from models.config import ModelConfig
from models.kernels import linear_cpp, quantize
from models.kernels.packed_linear import PackedLinear
from models.kernels.quantize import GROUP, Int4Linear, Int8Linear, quantize_groups
from tests.support.fake_cuda_linear import cuda_linears
from tests.support.machine import needs_bfloat16_layers, needs_int8


def weight_and_input(d_out: int, d_in: int, n_row: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of very different magnitudes, which need a scale each."""
    generator = torch.Generator().manual_seed(d_out + n_row)
    weight = torch.randn(d_out, d_in, generator=generator) * torch.logspace(-2, 2, d_out)[:, None]
    x = torch.randn(n_row, d_in, generator=generator) * torch.logspace(2, -2, n_row)[:, None]
    return weight, x.to(dtype)


def grid_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values that 4 bits stand for, and the scales."""
    q, scale, low = quantize_groups(weight)
    return (q.unflatten(1, (-1, GROUP)) * scale[..., None] + low[..., None]).flatten(1), scale


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_row,with_bias", [(1, False), (17, True)])
def test_int8_is_the_product_of_rounded_factors(dtype, n_row, with_bias):
    weight, x = weight_and_input(128, 192, n_row, dtype)
    bias = torch.linspace(-1, 1, 128).to(dtype) if with_bias else None
    q, scale = quantize_rows(weight, torch.int8)
    x_scale = x.float().abs().amax(1, keepdim=True) / 127
    x_q = (x.float() / x_scale + 128).round() - 128
    exact = (x_q.double() @ q.double().T) * x_scale.double() * scale.double()
    assert relative_error(exact, x.double() @ weight.double().T) < 0.03
    wanted = (exact + (bias if with_bias else 0)).to(dtype)
    got = Int8Linear(weight, bias)(x.view(1, n_row, 192))
    rounding = 1e-6 if dtype == torch.float32 else 1e-2  # the bias is added before or after rounding to bfloat16
    torch.testing.assert_close(got, wanted[None], rtol=rounding, atol=rounding * float(exact.abs().amax()))


@pytest.mark.parametrize("d_in", [96, 256])
def test_int4_on_a_gpu_is_the_product_with_its_grid(monkeypatch, d_in):
    """Without Triton, weights are written out; they are those that the codes and grids stand for. A CPU may round
    activations to 8 bits."""
    weight, x = weight_and_input(64, d_in, 5, torch.float32)
    bias = torch.linspace(-1, 1, 64)
    with cuda_linears(monkeypatch):
        layer = Int4Linear(weight, bias)
        got = layer(x)
    q, scale, low = quantize_groups(weight)
    scale, zero = (each.bfloat16().float()[..., None] for each in (scale, low + 8 * scale))
    written = ((q.unflatten(1, (-1, GROUP)) - 8) * scale + zero).flatten(1)
    assert torch.equal(quantize.dequantize(layer.weight, layer.grids, d_in), written.bfloat16())
    grid, scale = grid_of(weight)
    assert (grid - weight).abs().amax() <= 0.51 * scale.amax()
    wanted = x.double() @ grid.double().T + bias
    assert relative_error(got, wanted) < 1e-2
    for dtype in (torch.float32, torch.bfloat16):
        assert relative_error(Int4Linear(weight, bias.to(dtype))(x.to(dtype)), wanted) < 1.5e-2


CONFIG = ModelConfig(vocab_size=256, n_layer=2, dim=128, n_head=2, n_kv_head=1, head_dim=64, ffn_dim=192)


@pytest.mark.parametrize("scheme,most", [pytest.param("int8", 0.05, marks=needs_int8), ("int4", 0.25)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_model_is_close(scheme, most, dtype):
    """Two rows at different positions. tests/bench/test_memory.py shows by the bytes that every layer is quantised."""
    tokens = torch.randint(256, (2, 5), generator=torch.Generator().manual_seed(1))
    positions, how = torch.tensor([[0], [9]]) + torch.arange(5), {"load_format": "dummy", "config": CONFIG}
    models = (load_model("none", **how, dtype=dtype, quantize=each) for each in (None, scheme))
    wanted, got = (model(tokens, positions, FullKVCache(CONFIG, 2, 256, dtype=dtype)).float() for model in models)
    assert 1e-4 < (got - wanted).norm() / wanted.norm() < most


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("new_layer", [Int8Linear, Int4Linear, pytest.param(PackedLinear, marks=needs_bfloat16_layers)])
def test_a_row_that_is_not_finite_stays_so_and_alone(new_layer, value):
    weight, x = weight_and_input(128, 192, 3, torch.bfloat16)
    if not linear_cpp.takes_shape(weight.shape):
        pytest.skip("the CPU lacks the instructions of linear_cpp")
    layer, others = new_layer(weight.bfloat16(), None), torch.tensor([0, 2])
    before = layer(x)[others]
    x[1, 77] = value
    assert not layer(x)[1].isfinite().any() and torch.equal(layer(x)[others], before)
