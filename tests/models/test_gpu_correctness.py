"""Attention, random numbers, quantised layers and graphs are right on this machine's device: a GPU, or else the CPU.

`pytest -m gpu` runs these tests, and others that need a GPU. Errors are the largest
|out - exact| / (1 + |exact|), exact in float64 over the same entries.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.errors import ConfigError
from common.say import dtype_name
from engine import ModelRunner, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.drafters.ngram import NGram
from engine.graphs import CudaGraphs
from engine.sampling.noise import Stream, gumbel, uniform
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.entries import KV, SCORE_CHUNK, Packed, quantize
from kv_cache.refreshed import SelectionOps
from kv_cache.verify_topk import VerifyTopK
from models import ModelConfig, Transformer, load_model
from models.attention import AttentionSpec, TorchAttention, select_backend
from models.kernels.pointwise import EAGER, compiled, use_pointwise
from models.kernels.quantize import GROUP, SCHEMES, quantize_groups, quantized_linear
from tests.support.attention_cases import Case, make_case, packed_case, packed_in_turns
from tests.support.recorded_graph import RecordedGraphs
from tests.support.tiny import random_prompts, tiny_model

ON_CUDA = torch.cuda.is_available()
if ON_CUDA:
    from kv_cache import triton_packing
    from kv_cache.triton_choosing import TritonSelectionOps
DEVICE, GRAPHS = ("cuda", CudaGraphs) if ON_CUDA else ("cpu", RecordedGraphs)
# On a GPU kernels are compiled for minutes.
pytestmark = [pytest.mark.gpu, *([pytest.mark.slow] if ON_CUDA else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROUNDED_QUERIES = 2e-4  # to 15 bits, as the CPU kernel does before it multiplies int8 entries
# Relative error of a layer's output: activations are rounded to 8 bits, or scales and activations to bfloat16.
QUANTISED_TOLERANCE = 2e-2
BACKENDS = ("triton", "flash", "torch") if ON_CUDA else ("cpp", "torch")
DTYPES = (torch.bfloat16, torch.float16) if ON_CUDA else (torch.float32, torch.bfloat16)
STORAGES = (None, torch.int8, torch.float8_e4m3fn)
# Tokens, query heads of a KV head, head_dim: every size of the kernels' tiles, and each head_dim.
BLOCKS = [(1, 3, 64), (1, 4, 128), (4, 4, 128), (8, 4, 128), (16, 8, 64)] if ON_CUDA else [(1, 1, 64), (4, 3, 64)]
LENGTHS = [4500, 2100, 130, 16] if ON_CUDA else [300, 41, 16]


@pytest.mark.parametrize("order", ["in order", "ring", "4 bits beside a ring"])
@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: dtype_name(storage) if storage else "same")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(backend, dtype, storage, order, record_property):
    tolerance = max(TOLERANCE[dtype], ROUNDED_QUERIES if (backend, storage) == ("cpp", torch.int8) else 0)
    errors = {}
    for n_token, group, head_dim in BLOCKS:
        kind = {"group": group, "head_dim": head_dim, "storage": storage or dtype, "dtype": dtype}
        if order.startswith("4 bits"):
            each = [packed_case(n_token, quant_group=16, sliding_window=window, **kind) for window in (None, 100)]
        else:
            case = make_case(LENGTHS, n_token, capacity=max(LENGTHS), ring=order == "ring", **kind)
            each = [case, case.among_other_rows()]
        errors[n_token, group, head_dim] = max(error_of(opened(backend, case.spec), case) for case in each)
    record_property(f"{backend}, {dtype_name(dtype)}, {dtype_name(storage or dtype)} KV, {order}", max(errors.values()))
    assert max(errors.values()) <= tolerance, errors


def opened(backend: str, spec: AttentionSpec):
    try:
        found, why = select_backend(backend, DEVICE, spec)
    except ConfigError as error:
        pytest.skip(str(error))
    if found.name != backend:
        pytest.skip(f"{backend} does not take this: {why}")
    return found


def error_of(backend, case: Case) -> float:
    """Return the case's largest error, infinite where a result is not finite."""
    out, exact = on_device(case).run(backend).cpu().double(), case.reference()
    return ((out - exact).abs() / (1 + exact.abs())).nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def on_device(case: Case) -> Case:
    """Return the case with its tensors on the device, in the same layout."""
    packed = case.kv.packed and Packed(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in case.kv.packed))
    kv = KV(*(None if x is None else x.to(DEVICE) for x in case.kv[:-1]), packed=packed)
    slots = replace(case.slots, positions=case.slots.positions.to(DEVICE), rows=kv.rows)
    return replace(case, q=case.q.to(DEVICE), kv=kv, queries=case.queries.to(DEVICE), slots=slots)


def test_numbers_are_those_of_the_cpu():
    """Uniform numbers are equal bit for bit, Gumbel numbers except where two logarithms round apart."""
    keys = [torch.tensor(x)[:, None] for x in ([0, 7, 2**40 + 3, -5], [0, 1, 2**31, 2**32 - 1])]
    given, n_ids = [*keys, torch.tensor([[0, 1, 8191, 131071]])], 49152 if ON_CUDA else 501
    there = [x.to(DEVICE) for x in given]
    for stream in Stream:
        assert torch.equal(uniform(*there, stream, n_ids).cpu(), uniform(*given, stream, n_ids))
        drawn, wanted = gumbel(*there, stream, n_ids).cpu(), gumbel(*given, stream, n_ids)
        assert (drawn != wanted).float().mean() < 1e-3
        torch.testing.assert_close(drawn, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not ON_CUDA, reason="tests/models/kernels/test_quantize.py is of CPUs")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_of_quantised_layers(scheme, record_property):
    """Layers equal the product with their dequantised weights, for few rows and for many."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(1024, 576, generator=generator), torch.randn(1024, generator=generator)
    if scheme == "int8":
        q, scale = quantize(weight, torch.int8)
        grid = q * scale[:, None]
    else:
        levels, scale, low = quantize_groups(weight)
        grid = (levels.unflatten(1, (-1, GROUP)) * scale[..., None] + low[..., None]).flatten(1)
    layer, errors = quantized_linear(weight.to(DEVICE), bias.to(DEVICE), scheme), []
    for n_row in (1, 16, 17, 32, 64, 100, 300):
        x = torch.randn(n_row, 576, generator=generator)
        wanted = x.double() @ grid.double().T + bias
        errors.append(((layer(x.to(DEVICE)).cpu() - wanted).norm() / wanted.norm()).item())
    record_property(f"error, {scheme} layers", max(errors))
    assert all(error <= QUANTISED_TOLERANCE for error in errors), errors


@pytest.mark.skipif(not ON_CUDA, reason="Triton's interpreter runs triton_cases.py instead")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=dtype_name)
@pytest.mark.parametrize("n_slot", [3000, 20000])
def test_selection_kernel(dtype, n_slot):
    """Entries are chosen as in PyTorch, again and again: programs must not race."""
    config, generator = ModelConfig(8, 1, 64, 8, 2, 128, 8, 99999), torch.Generator().manual_seed(n_slot)
    full = FullKVCache(config, 6, n_slot, DEVICE, dtype)
    values = torch.randn(6, n_slot, 2, 2, 128, generator=generator).to(DEVICE)
    full.write(0, torch.arange(n_slot, device=DEVICE).expand(6, -1), values)
    rows, n_chunk = torch.tensor([3, 0, 5, 1], device=DEVICE), -(-n_slot // SCORE_CHUNK)
    cache = VerifyTopK(512, 96).new_cache(config, 6, 0, DEVICE, dtype)
    for step in range(25):
        shares = torch.randint(9, (4, 2, n_chunk), generator=generator) / 8
        shares *= torch.rand(shares.shape, generator=generator) < (0.1, 0.4, 1)[step % 3]
        ends = n_slot - 40 + step - torch.tensor([0, 1700, 900, 33])
        shares, ends = shares.to(DEVICE), ends.to(DEVICE)
        TritonSelectionOps().choose(cache.view(rows), 0, full.view(rows), 0, shares, ends)
        slots = cache.source_slots[0, rows]
        best = SelectionOps().best_chunks(shares, cache.chunk, ends, cache.n_first, cache.n_fixed)
        assert torch.equal(slots.sort().values, best.sort().values)
        entries = full.entries[0][:, rows[:, None, None], torch.arange(2, device=DEVICE)[:, None], slots]
        copied = cache.entries[0][:, rows, :, : cache.n_fixed]
        assert torch.equal(copied.view(torch.uint8), entries.view(torch.uint8))


@pytest.mark.skipif(not ON_CUDA, reason="Triton's interpreter runs triton_cases.py instead")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8], ids=dtype_name)
@pytest.mark.parametrize("group", [16, 64])
def test_packing_kernel(stored, group):
    """Bits in 4-bit entries equal PyTorch's, for rows that go on in blocks."""
    found = [packed_in_turns(stored, group, 128, kernel, DEVICE) for kernel in (None, triton_packing)]
    assert all(map(torch.equal, *found))


def test_numbers_of_a_chunk_come_from_a_flash_kernel():
    """A chunk of a prompt attends without a mask in memory."""
    n_token, n_slot, dtype = (2048, 8192, torch.bfloat16) if ON_CUDA else (64, 256, torch.float32)
    case = make_case([n_slot], n_token, n_kv_head=8, group=4, head_dim=128, capacity=n_slot, dtype=dtype)
    case, backend = on_device(replace(case, slots=replace(case.slots, block_ends_view=True))), TorchAttention()
    with profile(activities=[ProfilerActivity.CUDA if ON_CUDA else ProfilerActivity.CPU]) as profiler:
        case.run(backend)
    names = {event.name for event in profiler.events()}
    assert any("flash" in name.lower() for name in names), names


class CapturedShapes(ModelRunner):
    """Runner whose called rounds have the rows and slots of captured ones, so that kernels split sums alike."""

    narrows = False


# The budget is below every prompt: the draft's cache then has the same shape in every round, called or captured.
BUDGET, LIMITS = 64, [12, 8, 16, 11, 5, 14] if ON_CUDA else [6, 3, 8, 5, 4, 7]
MODES = ["greedy", "coupled", "rejection"] if ON_CUDA else ["coupled"]  # test_captured_rounds.py is of CPUs


def model_and_prompts() -> tuple[Transformer, list[list[int]]]:
    """Return a model, of the default model's shape on a GPU, and six ragged prompts."""
    if not ON_CUDA:
        return tiny_model(), random_prompts([70, 66, 90, 80, 65, 77])
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model = load_model(name, load_format="dummy", device=DEVICE, dtype=torch.bfloat16)
    return model, random_prompts([700, 96, 333, 80, 480, 129], 49152)


def new_runner(model: Transformer, kind=ModelRunner, **how) -> ModelRunner:
    return kind(model, FullKVCache(model.config, 4, 1024 if ON_CUDA else 128, DEVICE, model.dtype), **how)


def draft_cache(model: Transformer) -> StreamingKVCache:
    return StreamingKVCache(model.config, 4, BUDGET, device=DEVICE, dtype=model.dtype)


@torch.inference_mode()
def tokens_of(runner: ModelRunner, prompts: list[list[int]], mode: str) -> list[list[list[int]]]:
    """Generate with every drafter, twice over: graphs of one drafter have to survive the others."""
    model, sampling = runner.model, None if mode == "greedy" else SamplingParams(temperature=0.6, seed=5)
    drafters = [None, SelfSpeculation(runner, draft_cache(model), gamma=3), NGram(runner, gamma=3)]
    drafters.append(StandaloneDraft(ModelRunner(model, draft_cache(model)), gamma=3))
    how = {"max_new_tokens": LIMITS, "sampling": sampling, "verification": mode}
    return [generate(runner, prompts, drafter=drafter, **how).tokens for drafter in drafters * 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiles", [False, True] if ON_CUDA else [False])
def test_replayed_rounds_emit_what_called_rounds_do(compiles, mode):
    """Six prompts through four rows: rows finish, idle and are refilled, called and replayed alike."""
    model, prompts = model_and_prompts()
    use_pointwise(model, compiled() if compiles else EAGER)
    called = tokens_of(new_runner(model, CapturedShapes), prompts, mode)
    runner = new_runner(model, new_graphs=GRAPHS)
    assert tokens_of(runner, prompts, mode) == called
    runner.drop_graphs()
