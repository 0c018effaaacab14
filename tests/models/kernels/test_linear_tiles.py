"""Linear layers in tiles of AMX: emulated on any CPU with AVX512-BF16, and real where the CPU has them."""

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kernels import build as cpp_build
from models.kernels import linear_cpp
from models.kernels.linear_check import D_IN, D_OUT, Layer, layers
from models.kernels.packed_linear import PackedLinear
from models.kernels.row_bits import CHUNK
from tests.support.machine import needs_bfloat16_products

EMULATED = ("-march=native", "-DAMX", "-DEMULATED")
FLAGS = cpp_build.BUILDS | {"emulated AMX": EMULATED}

pytestmark = needs_bfloat16_products


@cache
def function_of(build: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cpp_build.BUILDS, build, FLAGS[build])
        return linear_cpp.function_of(cpp_build.open_library(cpp_build.build_library("linear", build)))


def product_of(build: str, layer: Layer, x: Tensor) -> Tensor:
    return linear_cpp.linear(x, layer.packed, layer.bits, D_OUT, layer.scale, None, function_of(build))


def layer_and_rows(bits: int, n_row: int) -> tuple[Layer, Tensor]:
    x = torch.randn(n_row, D_IN, generator=torch.Generator().manual_seed(n_row)).bfloat16()
    return next(layer for layer in layers() if layer.bits == bits), x


@pytest.mark.parametrize("n_row", [15, 16, 17, 31, 32, 48, 97, 130])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_row_in_tiles_has_the_bits_that_it_has_alone(bits, n_row):
    """Rows share tiles, groups of tiles, and panels with a few rows after the last full one."""
    layer, x = layer_and_rows(bits, n_row)
    some = sorted({0, n_row // 2, n_row - 1})
    alone = torch.cat([product_of("emulated AMX", layer, x[row, None]) for row in some])
    assert torch.equal(product_of("emulated AMX", layer, x)[some], alone)


def test_integers_in_tiles_have_the_bits_of_vnni():
    layer, x = layer_and_rows(8, 37)
    assert torch.equal(product_of("emulated AMX", layer, x), product_of("native", layer, x))


@pytest.mark.skipif("AMX" not in cpp_build.builds_of(cpp_build.KERNELS["linear"]), reason="this CPU has no AMX")
@pytest.mark.parametrize("n_row", [1, 37])
def test_tiles_have_the_bits_of_their_emulation(n_row):
    layer, x = layer_and_rows(16, n_row)
    assert torch.equal(product_of("AMX", layer, x), product_of("emulated AMX", layer, x))


def test_chunks_of_prompts_are_multiplied_by_onednn_on_a_cpu_with_amx(monkeypatch):
    """A bias, which the kernel takes in float32, is added in either."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(linear_cpp, "choose", lambda name: SimpleNamespace(build="AMX"))
    monkeypatch.setattr(linear_cpp, "linear", partial(linear_cpp.linear, function=function_of("emulated AMX")))
    weight, x = torch.randn(64, 96).bfloat16(), torch.randn(CHUNK, 96).bfloat16()
    layer, in_onednn = PackedLinear(weight, weight[:, 0]), []
    monkeypatch.setattr(layer, "multiply", lambda x: in_onednn.append(len(x)) or PackedLinear.multiply(layer, x))
    rows, chunk, wanted = layer(x[:-1]), layer(x), torch.nn.functional.linear(x, weight, weight[:, 0])
    assert in_onednn == [CHUNK]
    assert (rows - wanted[:-1]).abs().max() <= 0.1 >= (chunk - wanted).abs().max()
    monkeypatch.setattr(linear_cpp, "choose", lambda name: SimpleNamespace(build="native"))
    assert PackedLinear(weight, None).kernel_weight is None, "without tiles of its own"
