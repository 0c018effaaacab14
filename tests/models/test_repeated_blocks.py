"""Blocks in one call compute the bits that they compute one by one; blocks that need Python run one by one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
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
from models.kernels import linear_cpp, packed_linear
from models.kernels.packed_linear import pack_linears
from models.kernels.pointwise_cpp import pointwise_for
from models.kernels.quantize import quantize_linears
from models.llama import Block, run_in_turn, select_layers
from models.repeated_blocks import repeat_blocks
from tests.support.machine import needs_bfloat16_layers, needs_cpp_compiler
from tests.support.tiny import tiny_model

pytestmark = [
    needs_cpp_compiler,
    pytest.mark.skipif(not linear_cpp.runs(), reason="linear layers run in PyTorch here"),
]
DTYPE = torch.float32
CONFIG = ModelConfig(
    vocab_size=64, n_layer=4, dim=128, n_head=2, n_kv_head=1, head_dim=64, ffn_dim=160, max_context=256
)
N_ROW, N_TOKEN, CAPACITY, N_LAYER = 3, 4, 48, CONFIG.n_layer
ROWS, LENGTHS = torch.tensor([2, 0, 1]), torch.tensor([9, 30, 17])
N_PROMPT = 32


@pytest.fixture
def called(monkeypatch) -> list[Block]:
    """Note the blocks that Python calls."""
    blocks, forward = list[Block](), Block.forward

    def noted(block: Block, *inputs: Any) -> Any:
        blocks.append(block)
        return forward(block, *inputs)

    monkeypatch.setattr(Block, "forward", noted)
    return blocks


def packed_model(config: ModelConfig = CONFIG, scheme: str = "plain") -> Transformer:
    """Return a model whose linear layers are packed for kernels: in 8 bits where oneDNN would run them.
    bfloat16: a model in bfloat16."""
    model = tiny_model(config, dtype=torch.bfloat16 if scheme == "bfloat16" else DTYPE)
    if scheme in ("int8", "int4") or (scheme != "bfloat16" and not linear_cpp.multiplies_floats()):
        quantize_linears(model.layers, "int4" if scheme == "int4" else "int8")
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


def run(model: Transformer, cache: Any, layers: tuple[int, ...] = ()) -> list[Tensor]:
    """Run prompts over the target's cache, then a block of all rows in another order over all caches; return all that
    these compute and store."""
    tokens = torch.randint(64, (N_ROW, N_PROMPT + N_TOKEN), generator=torch.Generator().manual_seed(0))
    target = cache.target if isinstance(cache, WriteThroughKVCache) else cache
    step = min(N_PROMPT, target.max_block)
    for at in torch.arange(N_PROMPT).split(step):
        hidden = model.hidden(tokens[:, at], at.expand(N_ROW, -1), target)
    view = cache.view(ROWS, N_PROMPT + N_TOKEN)
    states = model.hidden_states(tokens[:, N_PROMPT:], LENGTHS[:, None] + torch.arange(N_TOKEN), view, layers)
    return [hidden, *states, *tensors_of(cache)]


def n_called(
    called: list[Block], model: Transformer, new_cache: Callable[[], Any] = full, layers: tuple[int, ...] = ()
) -> int:
    """Assert that blocks compute the bits that they compute one by one; return how many Python called."""
    called.clear()
    found, n = run(model, new_cache(), layers), len(called)
    model.run_blocks = run_in_turn
    assert all(map(torch.equal, found, run(model, new_cache(), layers)))
    assert all(x.isfinite().all() for x in found if x.is_floating_point())
    return n


def repeating(model: Transformer) -> Transformer:
    repeat_blocks(model)
    assert model.run_blocks is not run_in_turn
    return model


@pytest.mark.parametrize(
    "new_cache", [full, partial(full, torch.int8), partial(full, torch.bfloat16), through, observing]
)
def test_every_layer_of_every_cache_gets_its_entries(called, new_cache):
    assert n_called(called, repeating(packed_model()), new_cache) == 2  # forwards


IN_BFLOAT16 = pytest.param("bfloat16", marks=needs_bfloat16_layers)


@pytest.mark.parametrize("scheme", ["plain", "int8", "int4", IN_BFLOAT16])
def test_norms_biases_windows_and_quantised_layers(called, scheme):
    config = replace(CONFIG, qk_norm=True, qkv_bias=True, mlp_bias=True, sliding_window=12)
    new_cache = partial(full, torch.bfloat16 if scheme == "bfloat16" else DTYPE)
    assert n_called(called, repeating(packed_model(config, scheme)), new_cache) == 2


def test_states_between_layers_are_those_of_their_layers(called):
    assert n_called(called, repeating(packed_model()), full, (1, 4)) == 1 + 2


def test_layers_selected_of_a_model_that_ran_are_run(called):
    model = repeating(packed_model())
    run(model, full())
    assert n_called(called, repeating(select_layers(model, (0, 2, 3)))) == 2


def test_entries_that_pytorch_stores_are_stored_layer_by_layer(called):
    assert n_called(called, repeating(packed_model()), partial(through, torch.float16)) == 1 + N_LAYER
    in_4_bits = partial(QuantizedKVCache, CONFIG, N_ROW, CAPACITY, 16, 32, dtype=DTYPE)
    assert n_called(called, repeating(packed_model()), in_4_bits) == 3 * N_LAYER


def other_weights(model: Transformer) -> None:
    model.layers[2].feed_forward.w2 = packed_model(scheme="int4").layers[2].feed_forward.w2


def hooked(model: Transformer) -> None:
    for layer in model.layers:
        layer.attention.wo.register_forward_hook(lambda module, given, result: result.mul_(2))


def in_pytorch(model: Transformer) -> None:
    for layer in model.layers:
        layer.attention.wo = torch.nn.Linear(128, 128, dtype=DTYPE)


@pytest.mark.parametrize("change", [other_weights, hooked, in_pytorch])
@pytest.mark.parametrize("has_run", [False, True])
def test_models_of_other_blocks_run_one_by_one(called, change, has_run):
    model = packed_model()
    if has_run:
        run(repeating(model), full())
        change(model)
    else:
        change(model)
        repeat_blocks(model)
    assert n_called(called, model) == 2 * N_LAYER


def test_unrotated_layers_and_layers_of_onednn_run_one_by_one(called, monkeypatch):
    model = packed_model(replace(CONFIG, unrotated_layers=tuple(range(N_LAYER))))
    assert n_called(called, repeating(model)) == 2 * N_LAYER
    monkeypatch.setattr(linear_cpp, "multiplies_floats", lambda: True)  # so that nothing is quantised
    monkeypatch.setattr(packed_linear, "_packed", lambda weight: (None, 0))
    assert n_called(called, repeating(packed_model())) == 2 * N_LAYER


PARTS = ["layers", "layers.2", "layers.2.feed_forward.w2", "layers.2.attention_norm.weight.data"]


@pytest.mark.parametrize("part", PARTS)
def test_what_replaces_a_part_after_a_forward_is_run(called, part):
    model, other = repeating(packed_model()), packed_model(scheme="int4")
    other.layers[2].attention_norm.weight += 1
    run(model, full())
    *owners, name = part.split(".")
    old, new = (reduce(getattr, owners, each) for each in (model, other))
    setattr(old, name, getattr(new, name))
    assert n_called(called, model) == 2 * N_LAYER
