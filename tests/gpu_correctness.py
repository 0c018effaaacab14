"""What has to hold on a device: attention against float64, random numbers, quantised layers, replayed rounds.

The cells of part a of reproduce/gpu.py, which records them; test_gpu_correctness.py runs them on this machine.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from attention_cases import Case, make_case, packed_case
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common.say import dtype_name
from engine import ModelRunner, NGram, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.bench.record import identical_rows
from engine.drafters import Drafter
from engine.graphs import CudaGraphs
from engine.noise import Stream, uniform
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.entries import KV, Packed, quantize
from models import Transformer, load_model
from models.attention import TorchAttention
from models.checkpoints.default_model import DEFAULT_BOOK, DEFAULT_CHECKPOINT, DEFAULT_NAME
from models.checkpoints.tokenizer import load_tokenizer
from models.pointwise import compiled, use_pointwise
from models.quantize import GROUP, SCHEMES, quantize_groups, quantized_linear
from reproduce.gpu_parts.bandwidth import Shape, backends, open_backend
from reproduce.gpu_parts.cells import IN_4_BITS, Cell, Options, Record, Skip, breaks_device, describe, verdict

# The largest |out - reference| / (1 + |reference|), the reference in float64 over the very same entries.
ROUNDED_QUERIES = 2e-4  # to 15 bits, as the CPU kernel does before it multiplies int8 entries
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LLAMA_31_8B = Shape("Llama-3.1-8B", 32, 8, 128)
TOKENS = (1, 2, 4, 8, 16)
STORAGES = (None, torch.int8, torch.float8_e4m3fn)
BESIDE_RING = f"{IN_4_BITS} beside a ring"
# Of a layer's output, relative: activations are rounded to 8 bits, or scales and activations to bfloat16.
QUANTISED_TOLERANCE = 2e-2


def cells(options: Options) -> list[Cell]:
    found: list[tuple] = [
        ("gpu_noise", "noise", noise),
        *(("gpu_quantised_error", f"{scheme} layers", quantised, scheme) for scheme in SCHEMES),
        ("gpu_prefill_kernel", "a chunk of a prompt", prefill_kernel),
        *(("gpu_identity", f"replayed rounds, {mode}", identity, mode) for mode in ("greedy", "coupled", "rejection")),
        ("gpu_survival", "one runner's graphs go, another's stay", survival),
    ]
    devices = dict.fromkeys(backends(options), options.device) | ({"cpp": "cpu"} if options.on_cuda else {})
    for backend, device in devices.items():
        dtypes = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16, torch.float16)
        for kind in itertools.product(dtypes, STORAGES, ("in order", "ring", BESIDE_RING)):
            dtype, storage, order = kind
            if dtype == torch.float16 and storage is not None:
                continue  # the same code as in bfloat16
            what = f"{dtype_name(dtype)}, {dtype_name(storage or dtype)} KV, {order}"
            found.append(("gpu_attention_error", f"{backend}, {what}", attention, backend, device, *kind))
    return [Cell("a", benchmark, name, partial(run, options, *kind)) for benchmark, name, run, *kind in found]


def attention(
    options: Options, name: str, device: str, dtype: torch.dtype, storage: torch.dtype | None, order: str
) -> Record:
    """The worst error of one backend in one dtype over one kind of cache, over all shapes of blocks."""
    lengths, groups, head_dims = (options.sizes[name] for name in ("lengths", "groups", "head_dims"))
    kind: dict[str, Any] = {"storage": storage or dtype, "dtype": dtype}
    errors, broken = [(0.0, "none")], []
    for n_token, group, head_dim in itertools.product(TOKENS, groups, head_dims):
        if order == BESIDE_RING:
            each_group = ((7, None), (16, None), (64, 100))  # and a sliding window
            fitting = ((n, {"sliding_window": w}) for n, w in each_group if n_token <= n)
            cases = [packed_case(n_token, head_dim, n, group=group, **w, **kind) for n, w in fitting]
        else:
            one = {"capacity": max(lengths), "ring": order == "ring", "group": group, "head_dim": head_dim}
            case = make_case(lengths, n_token, **one, **kind)
            cases = [case, case.among_other_rows()]
        backend, shape = open_backend(name, device, cases[0].spec), f"T {n_token}, group {group}, head_dim {head_dim}"
        try:
            each = [on(one, device).run(backend).cpu().double() for one in cases]
        except Exception as error:
            if breaks_device(error):
                raise
            broken.append(shape + ": " + describe(error)["error"])
            continue
        errors.append((max(error_of(out, case.reference()) for out, case in zip(each, cases, strict=True)), shape))
    worst, where = max(errors)
    rounds_queries = name == "cpp" and storage == torch.int8
    tolerance = max(TOLERANCE[dtype], ROUNDED_QUERIES if rounds_queries else 0)
    record = verdict(not broken and worst <= tolerance) | {"backend": name, "dtype": dtype_name(dtype)}
    record |= {"kv_dtype": dtype_name(storage or dtype), "order": order, "worst_error": float(f"{worst:.3g}")}
    return record | {"worst_case": where, "tolerance": tolerance, "shapes": len(errors) - 1, "broken": broken}


def error_of(out: Tensor, wanted: Tensor) -> float:
    """Infinite where anything is not finite."""
    return ((out - wanted).abs() / (1 + wanted.abs())).nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def on(case: Case, device: str) -> Case:
    """The same case with its tensors on another device, in the same layout."""
    packed = case.kv.packed and Packed(*(x.to(device) if isinstance(x, Tensor) else x for x in case.kv.packed))
    kv = KV(*(None if x is None else x.to(device) for x in case.kv[:-1]), packed=packed)
    slots = replace(case.slots, positions=case.slots.positions.to(device), rows=kv.rows)
    return replace(case, q=case.q.to(device), kv=kv, queries=case.queries.to(device), slots=slots)


def noise(options: Options) -> Record:
    """The random numbers of all streams on the device, bit for bit those of the CPU."""
    keys = [torch.tensor(x)[:, None] for x in ([0, 7, 2**40 + 3, -5], [0, 1, 2**31, 2**32 - 1])]
    positions = torch.tensor([[0, 1, 8191, 131071]])
    n_same = n_all = 0
    for stream in Stream:
        here = uniform(*keys, positions, stream, options.sizes["n_ids"])
        given = (x.to(options.device) for x in (*keys, positions))
        there = uniform(*given, stream, options.sizes["n_ids"]).cpu()
        n_same += int((here == there).sum())
        n_all += here.numel()
    return verdict(n_same == n_all) | {"same": n_same, "numbers": n_all}


def quantised(options: Options, scheme: str) -> Record:
    """A quantised layer against the product with the grid that it stands for, for few rows and for many."""
    if options.device == "cpu" and scheme == "int8" and not torch.cpu._is_vnni_supported():
        raise Skip("no VNNI")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(1024, 576, generator=generator), torch.randn(1024, generator=generator)
    if scheme == "int8":
        q, scale = quantize(weight, torch.int8)
        grid = q * scale[:, None]
    else:
        levels, scale, low = quantize_groups(weight)
        grid = (levels.unflatten(1, (-1, GROUP)) * scale[..., None] + low[..., None]).flatten(1)
    layer = quantized_linear(weight.to(options.device), bias.to(options.device), scheme)
    assert layer is not None
    worst = 0.0
    for n_row in (1, 16, 17, 300):
        x = torch.randn(n_row, 576, generator=generator)
        wanted = x.double() @ grid.double().T + bias
        error = (layer(x.to(options.device)).cpu() - wanted).norm() / wanted.norm()
        worst = max(worst, error.nan_to_num(nan=math.inf, posinf=math.inf).item())
    record = verdict(worst <= QUANTISED_TOLERANCE) | {"scheme": scheme, "worst_error": float(f"{worst:.3g}")}
    # Whether many rows are multiplied by dequantised weights, or the layout of 4 bits is not the expected one.
    return record | {"tolerance": QUANTISED_TOLERANCE, "unpacks": getattr(layer, "unpacks", None)}


@torch.inference_mode()
def prefill_kernel(options: Options) -> Record:
    """Whether a chunk of a prompt attends in a fused kernel without a mask in memory, and what runs there."""
    n_token, n_slot = options.sizes["chunk"]
    cache = LLAMA_31_8B.cache(options, 1, n_slot)
    slots = cache.view(extent=n_slot, block_at_end=True)
    q, queries = LLAMA_31_8B.block(options, cache, n_token)
    backend = TorchAttention()
    with profile(activities=[ProfilerActivity.CUDA if options.on_cuda else ProfilerActivity.CPU]) as profiler:
        backend.attend(q, slots.read(0), backend.prepare(LLAMA_31_8B.spec(options), queries, slots))
    kernels = sorted({event.name[:160] for event in profiler.events()})
    record = verdict(any("flash" in name.lower() for name in kernels))
    return record | {"tokens": n_token, "slots": n_slot, "kernels": kernels}


class CapturedShapes(ModelRunner):
    """Called rounds over the rows and slots of captured ones: the kernels then cut sums in the same places."""

    narrows = False


PROMPT_LENGTHS, LIMITS = [700, 96, 333, 80, 480, 129], [40, 24, 64, 33, 17, 48]
# Shorter than every prompt: the draft's cache then has the same shape in every round, called or captured.
BUDGET = 64
# Written over what the graphs that are gone have left.
RUBBISH_BYTES = 256 << 20


@torch.inference_mode()
def identity(options: Options, mode: str) -> Record:
    """Six ragged prompts through four rows: rows finish, idle and are refilled, called and replayed alike."""
    model, prompts, name = _model_and_prompts(options)
    sampling = None if mode == "greedy" else SamplingParams(temperature=0.6, seed=5)
    use_pointwise(model, compiled())

    def tokens_of(runner_of: Callable[..., ModelRunner]) -> dict[str, list[list[int]]]:
        runner = _runner(options, model, runner_of)
        drafters: dict[str, Drafter | None] = {
            "plain": None,
            "speculation": SelfSpeculation(runner, _draft_cache(runner), gamma=3),
            "standalone": StandaloneDraft(ModelRunner(model, _draft_cache(runner)), gamma=3),
            "ngram": NGram(runner, gamma=3),
        }
        how = {"max_new_tokens": LIMITS, "sampling": sampling, "verification": mode}
        # Twice over: what was captured for one has to survive the others.
        runs = [*drafters.items(), *drafters.items()]
        return {what: generate(runner, prompts, drafter=drafter, **how).tokens for what, drafter in runs}

    called, replayed = tokens_of(CapturedShapes), tokens_of(partial(ModelRunner, new_graphs=CudaGraphs))
    same = {f"identical_rows_{what}": identical_rows(called[what], replayed[what]) for what in called}
    record = verdict(set(same.values()) == {len(prompts)}) | {"model": name, "mode": mode}
    return record | {"attention": model.backend.name, "rows": len(prompts), **same, "tokens": sum(LIMITS)}


@torch.inference_mode()
def survival(options: Options) -> Record:
    """What one runner has captured gives the same tokens after another's graphs, and their memory, are gone."""
    model, prompts, name = _model_and_prompts(options)

    def captured() -> Callable[[], list[list[int]]]:
        runner = _runner(options, model, partial(ModelRunner, new_graphs=CudaGraphs))
        drafter = SelfSpeculation(runner, _draft_cache(runner), gamma=3)
        return lambda: generate(runner, prompts, max_new_tokens=LIMITS, drafter=drafter).tokens

    stays, goes = captured(), captured()
    before = [stays(), goes()]
    del goes
    rubbish = torch.full((RUBBISH_BYTES // 4,), float("nan"), device=options.device)
    same = identical_rows(before[0], stays())
    record = verdict(same == len(prompts) and before[0] == before[1]) | {"model": name, "rows": len(prompts)}
    return record | {"identical_rows": same, "rubbish_bytes": rubbish.nbytes}


def _runner(options: Options, model: Transformer, runner_of: Callable[..., ModelRunner]) -> ModelRunner:
    return runner_of(model, FullKVCache(model.config, 4, 1024, device=options.device, dtype=model.dtype))


def _draft_cache(runner: ModelRunner) -> StreamingKVCache:
    return StreamingKVCache(runner.model.config, 4, BUDGET, device=runner.device, dtype=runner.model.dtype)


def _model_and_prompts(options: Options) -> tuple[Transformer, list[list[int]], str]:
    """The default model and book in bfloat16; random weights of its shape where they are missing."""
    if not options.on_cuda:
        raise Skip("CUDA graphs need a GPU")
    how = {"device": options.device, "dtype": torch.bfloat16}
    if (DEFAULT_CHECKPOINT / "model.pth").exists() and DEFAULT_BOOK.is_file():
        model, name = load_model(DEFAULT_CHECKPOINT / "model.pth", **how), DEFAULT_NAME
        tokens = load_tokenizer(DEFAULT_CHECKPOINT).encode(DEFAULT_BOOK.read_text(encoding="utf-8-sig")[:20000])
    else:
        model = load_model(f"HuggingFaceTB/{DEFAULT_NAME}", load_format="dummy", **how)
        name = f"HuggingFaceTB/{DEFAULT_NAME}, random weights"
        tokens = torch.randint(49152, (5000,), generator=torch.Generator().manual_seed(0)).tolist()
    left = iter(tokens)
    return model, [list(itertools.islice(left, length)) for length in PROMPT_LENGTHS], name
