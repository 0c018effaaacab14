"""On a CPU a row's bits depend neither on the other rows nor on their number, so speculation changes no token."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Decoder, ModelRunner, Request, SamplingParams, SelfSpeculation
from kv_cache import FullKVCache, StreamingKVCache
from models import ModelConfig, load_model
from models.experts import StackedExperts
from models.kernels import linear_cpp
from models.kernels.packed_linear import PackedExperts, PackedLinear, can_pack, pack_linears
from models.kernels.pointwise import EAGER
from models.kernels.quantize import Int4Linear, Int8Linear
from models.kernels.row_bits import CHUNK, MOST_TESTED, fewest_rows, multiply_rows
from tests.support.machine import needs_bfloat16_layers, needs_cpp_compiler, needs_int8
from tests.support.tiny import decode, random_prompts

COUNTS = (*range(1, 65), 100, 112)


def counts_that_differ(multiply: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """Return how many rows together, the first or the last of `x`, have other bits than each alone."""
    alone = torch.cat([multiply(row[None]) for row in x])
    parts = [(n, slice(start, start + n)) for n in COUNTS for start in {0, len(x) - n}]
    return [n for n, part in parts if not torch.equal(multiply(x[part]), alone[part])]


@pytest.mark.parametrize("most", [1, 5, 32, 200])
@pytest.mark.parametrize("lone_row_differs,last_row_differs", [(False, True), (True, False)])
def test_a_kernel_whose_bits_change_runs_in_blocks(most, lone_row_differs, last_row_differs):
    """The last row differs beyond `most` rows, or all rows do, and a row alone as well."""
    calls = []

    def kernel(x: Tensor) -> Tensor:
        calls.append(len(x))
        y = x * 3
        changes = len(x) > most or (lone_row_differs and len(x) == 1)
        y[-1 if last_row_differs else 0 :, 7] *= 1 + 1e-6 * changes
        return y

    name = "kernel", most, lone_row_differs, last_row_differs
    x = torch.randn(112, 1024, generator=torch.Generator().manual_seed(1))
    assert not counts_that_differ(lambda part: multiply_rows(kernel, part, name), x)
    for n in COUNTS:
        calls.clear()
        multiply_rows(kernel, x[:n], name)
        if most > 1:
            limit = min(most, MOST_TESTED)
            assert max(calls) <= limit and len(calls) < 2 * max(n / limit, 1) + 1, "no more blocks than are needed"
    calls.clear()
    multiply_rows(kernel, x.repeat(5, 1)[:CHUNK], name)
    assert calls == [CHUNK]


LAYERS = [
    pytest.param(PackedLinear, torch.float32, id="float32"),
    pytest.param(PackedLinear, torch.bfloat16, id="bfloat16"),
    *(
        pytest.param(Int8Linear, dtype, marks=needs_int8, id=f"int8 by {dtype}")
        for dtype in (torch.float32, torch.bfloat16)
    ),
    pytest.param(Int4Linear, torch.bfloat16, id="int4 by bfloat16"),
]


@pytest.mark.parametrize("new_layer,dtype", LAYERS)
def test_a_row_has_the_bits_that_it_has_alone(monkeypatch, new_layer, dtype, d_out=960, d_in=320):
    monkeypatch.setattr(linear_cpp, "takes_shape", lambda shape: False)  # the check of the C++ kernel tests its bits
    if new_layer is PackedLinear and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip(f"PyTorch packs no weights in {dtype} for this CPU")
    normal = torch.Generator().manual_seed(d_out)
    weight, bias, x = (
        torch.randn(*shape, generator=normal).to(dtype) for shape in ((d_out, d_in), (d_out,), (112, d_in))
    )
    with torch.inference_mode():
        assert not counts_that_differ(new_layer(weight, bias), x)


@pytest.mark.skipif(not linear_cpp.multiplies_floats(), reason="oneDNN multiplies float32 here")
def test_float32_layers_are_in_16_bits_where_these_hold_the_weights():
    """Products are those of float32; a single weight of more bits keeps its layer in 32."""
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(*shape, generator=generator) for shape in ((96, 64), (112, 64)))
    for exact in True, False:
        if exact:
            weight = weight.bfloat16().float()
        else:
            weight[-1, -1] = 1 + 2**-20
        layer, expected = PackedLinear(weight, weight[:, 0]), x.double() @ weight.double().T + weight[:, 0]
        assert layer.kernel_weight.dtype == (torch.bfloat16 if exact else torch.float32) and layer.onednn_weight is None
        assert (layer(x) - expected).abs().max() < 1e-5
        assert not counts_that_differ(layer, x)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16_layers)])
@pytest.mark.parametrize("d_out,d_in", [(96, 64), (40, 64), (96, 40), (7, 9)])
def test_layers_of_any_shape_are_packed(dtype, d_out, d_in):
    """Where the project's kernel multiplies, zeros fill its blocks, and a row has the bits that it has alone."""
    generator = torch.Generator().manual_seed(3)
    parts, experts = nn.Sequential(nn.Linear(d_in, d_out)), StackedExperts(3, d_in, d_out)
    for parameter in (*parts.parameters(), *experts.parameters()):
        nn.init.normal_(parameter, generator=generator)
    parts.append(experts)
    parts, x = parts.to(dtype), torch.randn(112, d_in, generator=generator).to(dtype)
    counts = torch.tensor([2, 0, 110])
    with torch.inference_mode():
        before = parts[0](x), experts(x, counts)
        pack_linears(parts)
        assert isinstance(parts[0], PackedLinear) and isinstance(parts[1], PackedExperts)
        for got, expected in zip((parts[0](x), parts[1](x, counts)), before, strict=True):
            assert got.is_contiguous() and (got - expected).norm() < 0.01 * expected.norm()
        assert not counts_that_differ(parts[0], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_bits_that_it_has_alone_beside_tokens_of_its_experts(dtype):
    config = replace(CONFIG, n_layer=1, n_expert=32, n_expert_per_token=4)
    layer = load_model("none", load_format="dummy", config=config, dtype=dtype).layers[0].feed_forward
    x = torch.randn(112, CONFIG.dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert not counts_that_differ(lambda x: layer(x, Namespace(pointwise=EAGER)), x)


CONFIG = ModelConfig(
    vocab_size=512, n_layer=2, dim=192, n_head=3, n_kv_head=1, head_dim=64, ffn_dim=320, max_context=256
)
PROMPTS = random_prompts([40, 90, 77, 2, 17, 64, 8, 25, 33, 5, 50, 12, 29, 70, 36, 3], CONFIG.vocab_size)
STORAGES = [
    ("float32", None, torch.float32),
    ("bfloat16", None, torch.bfloat16),
    ("bfloat16", None, torch.int8),
    ("bfloat16", "int4", torch.int8),
    pytest.param("bfloat16", "int8", torch.int8, marks=needs_int8),
]


def tokens_of(model, entries: torch.dtype, n_row: int, gamma: int, **how: Any) -> list[list[int]]:
    """Return the tokens of all prompts, half of them greedy, a quarter with top-p, in `n_row` rows, by a self-draft
    unless `gamma` is 0."""
    runner = ModelRunner(model, FullKVCache(CONFIG, n_row, 128, dtype=entries), fewest_rows=fewest_rows(model))
    cache = StreamingKVCache(CONFIG, n_row, budget=24, dtype=entries)
    drafter = SelfSpeculation(runner, cache, gamma) if gamma else None
    samplings = [SamplingParams(), SamplingParams(0.6, seed=5)] * 2
    samplings[3] = SamplingParams(0.6, top_p=0.9, seed=5)
    requests = [Request(prompt, 3 + i % 8, sampling=samplings[i % 4], id=i) for i, prompt in enumerate(PROMPTS)]
    decode(Decoder(runner, drafter=drafter, verification="coupled", **how), *requests)
    counts = [request.counts for request in requests]
    assert not gamma or 0 < sum(row.accepted for row in counts) < sum(row.verified for row in counts)
    return [request.tokens for request in requests]


@needs_cpp_compiler
@pytest.mark.parametrize("dtype,quantize,entries", STORAGES)
def test_speculation_emits_the_tokens_of_plain_decoding(dtype, quantize, entries):
    """Plain decoding in one row, and speculation in 2 to 16, of which the last to end is computed alone where kernels
    multiply; also prompts in parts, in rows that held others."""
    model = load_model("none", load_format="dummy", config=CONFIG, dtype=getattr(torch, dtype), quantize=quantize)
    assert fewest_rows(model) == 1 or not can_pack("cpu", getattr(torch, dtype))
    plain = tokens_of(model, entries, 1, 0)
    for gamma, n_row in ((1, 2), (3, 5), (6, 16)):
        assert tokens_of(model, entries, n_row, gamma) == plain, gamma
    assert tokens_of(model, entries, 3, 3, prefill_tokens=30, reuses="prefixes") == plain
