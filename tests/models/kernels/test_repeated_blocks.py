"""Blocks in one call compute the bits that they compute one by one; blocks that are not alike run one by one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_cache import FullKVCache, StreamingKVCache, WriteThroughKVCache
from kv_cache.quantized import QuantizedKVCache
from kv_cache.refreshed import ObservingKVCache, RefreshedKVCache
from kv_cache.verify_topk import VerifyTopK
from models import ModelConfig, Transformer
from models.attention.cpp_backend import CppAttention
from models.kernels import linear_cpp
from models.kernels.packed_linear import pack_linears
from models.kernels.pointwise_cpp import pointwise_for
from models.kernels.quantize import quantize_linears
from tests.support.machine import needs_cpp_compiler
from tests.support.tiny import tiny_model

# Dtypes whose linear layers run in the project's kernel on this CPU.
KERNEL_DTYPES = [
    *[torch.float32] * linear_cpp.multiplies_floats((32, 32)),
    *[torch.bfloat16] * linear_cpp.multiplies_best(torch.empty(32, 32, dtype=torch.bfloat16)),
]
pytestmark = [needs_cpp_compiler, pytest.mark.skipif(not KERNEL_DTYPES, reason="linear layers run in PyTorch here")]
DTYPE, OTHER = (*KERNEL_DTYPES, torch.float32)[0], torch.float16
CONFIG = ModelConfig(
    vocab_size=64, n_layer=4, dim=128, n_head=2, n_kv_head=1, head_dim=64, ffn_dim=160, max_context=256
)
N_ROW, N_TOKEN, CAPACITY = 3, 4, 48
ROWS = torch.tensor([2, 0, 1])
LENGTHS = torch.tensor([9, 30, 17])


def packed_model(config: ModelConfig = CONFIG, scheme: str | None = None) -> Transformer:
    """Return a model whose blocks C++ kernels compute."""
    model = tiny_model(config, dtype=DTYPE)
    if scheme:
        quantize_linears(model.layers, scheme)
    pack_linears(model.layers)
    model.backend, model.pointwise = CppAttention(), pointwise_for("cpp")
    return model


def full(dtype: torch.dtype = DTYPE) -> FullKVCache:
    return FullKVCache(CONFIG, N_ROW, CAPACITY, dtype=dtype)


def through(dtype: torch.dtype = DTYPE) -> WriteThroughKVCache:
    return WriteThroughKVCache(full(), StreamingKVCache(CONFIG, N_ROW, 16, dtype=dtype))


def observing() -> ObservingKVCache:
    draft = VerifyTopK().new_cache(CONFIG, N_ROW, CAPACITY, "cpu", DTYPE)
    assert isinstance(draft, RefreshedKVCache)
    draft.scores = draft.new_scores(N_TOKEN, CONFIG.n_head, DTYPE, CAPACITY)
    return ObservingKVCache(WriteThroughKVCache(full(), draft))


def tensors_of(cache: Any) -> list[Tensor]:
    """Return all tensors that a forward over a cache fills."""
    if isinstance(cache, WriteThroughKVCache):
        scores = [cache.scores.seen] if isinstance(cache, ObservingKVCache) else []
        return [*tensors_of(cache.target), *tensors_of(cache.draft), *scores]
    return cache.tensors


def run(model: Transformer, cache: Any, layers: tuple[int, ...] = ()) -> tuple[list[Tensor], int]:
    """Run a prompt of each row, and a block of N_TOKEN tokens of all rows, in another order. Returns what these compute
    and store, and the number of blocks that Python called."""
    random, n_called = torch.Generator().manual_seed(0), 0

    def count(*_: object) -> None:
        nonlocal n_called
        n_called += 1

    hooks = [layer.register_forward_pre_hook(count) for layer in model.layers]
    n_prompt = int(LENGTHS.max())
    prompts = torch.arange(n_prompt).expand(N_ROW, -1)
    target = cache.target if isinstance(cache, WriteThroughKVCache) else cache
    states = [model.hidden(torch.randint(64, (N_ROW, n_prompt), generator=random), prompts, target)]
    view = cache.view(ROWS, n_prompt + N_TOKEN)
    block = torch.randint(64, (N_ROW, N_TOKEN), generator=random)
    states += model.hidden_states(block, LENGTHS[:, None] + torch.arange(N_TOKEN), view, layers)
    for hook in hooks:
        hook.remove()
    return [*states, *tensors_of(cache)], n_called


def compare(model: Transformer, new_cache: Callable[[], Any], layers: tuple[int, ...] = ()) -> int:
    """Assert that a model computes the same bits with and without repeated calls; return how many blocks Python called
    with them."""
    found, n_called = run(model, new_cache(), layers)
    model.pointwise = replace(model.pointwise, repeat=None)
    expected, _ = run(model, new_cache(), layers)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert all(x.isfinite().all() for x in found if x.is_floating_point())
    return n_called


@pytest.mark.parametrize(
    "new_cache", [full, partial(full, torch.int8), through, partial(through, torch.int8), observing]
)
def test_every_cache_has_the_entries_of_every_layer(new_cache):
    assert compare(packed_model(), new_cache) == 2  # forwards


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_layers_with_norms_and_biases_and_quantised_layers(scheme):
    config = replace(CONFIG, qk_norm=True, qkv_bias=True, mlp_bias=True, sliding_window=12)
    assert compare(packed_model(config, scheme), full) == 2


def test_states_between_layers_are_those_of_their_layers():
    assert compare(packed_model(), full, (1, 4)) == 1 + 2


@pytest.mark.parametrize(
    "new_cache",
    [
        partial(through, OTHER),  # PyTorch stores the draft's entries
        lambda: QuantizedKVCache(CONFIG, N_ROW, CAPACITY, 4, 8, dtype=DTYPE),
    ],
)
def test_what_pytorch_stores_is_stored_layer_by_layer(new_cache):
    assert compare(packed_model(), new_cache) >= 1 + CONFIG.n_layer


def test_layers_that_differ_run_one_by_one():
    model = packed_model()
    model.layers[2].feed_forward.w2 = packed_model(scheme="int8").layers[2].feed_forward.w2
    assert compare(model, full) == 2 * CONFIG.n_layer
    assert compare(packed_model(replace(CONFIG, unrotated_layers=(1,))), full) == 2 * CONFIG.n_layer


def test_an_input_that_pytorch_copies_stops_the_repetition():
    model = packed_model()
    for layer in model.layers:
        layer.attention.wo = torch.nn.Sequential(torch.nn.Softplus(), layer.attention.wo)
    assert compare(model, full) == 2 * CONFIG.n_layer
