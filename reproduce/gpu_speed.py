"""Measure what is fast on a GPU: kernels next to a copy, and rounds with and without speculation by rows and prefix.

    python -m reproduce.gpu_speed --output reproduction/gpu.jsonl
    python -m reproduce.gpu_speed --cells linears "8B 32x16000" --output reproduction/gpu.jsonl
    python -m pytest -m gpu    # what is right

A record of each cell is appended as it ends. Rounds in the shape of Llama-3.1-8B have random weights over random
entries; rows that do not fit into memory are left out. Exit code 1 if a cell failed.
"""

import itertools
import sys
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tyro.conf import arg

from bench import memory, passes
from bench.config import Output, SelfSpecFlags
from bench.passes import fill_with_noise, randomise
from bench.plan import resolve
from bench.record import make_record, rounded
from bench.session import Session
from common import cli
from common.errors import refuse
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from engine.controller import Controller
from engine.sampling.noise import Stream, gumbel
from kv_cache import FullKVCache, KVCache, StreamingKVCache
from kv_cache.entries import SCORE_CHUNK
from models.attention import AttentionSpec, select_backend
from models.config import ModelConfig
from models.kernels.linear_speed import graph_ms
from models.kernels.quantize import quantized_linear
from models.names import SCHEMES
from models.storage import KV_DTYPES
from reproduce.helpers.records import Record

PROFILED = 16  # tokens of a row


def milliseconds(device: str, call: Callable[[], object]) -> float:
    """Return the median time of a call; on a GPU it runs in a graph, where no launch waits for the host."""
    call()  # the first call is slower
    if device == "cpu":
        return 1e3 * median(timeit(call, number=1) for _ in range(3))
    return graph_ms(device, call)


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def copy_rate(device: str) -> float:
    """Return the bytes per ms that a copy within the device's memory reads and writes."""
    n_bytes = 2**22 if device == "cpu" else 2**31
    target, source = torch.ones(2, n_bytes, dtype=torch.uint8, device=device)
    return 2 * n_bytes / milliseconds(device, partial(target.copy_, source))


def attention(
    device: str,
    backend: str,
    shapes: Sequence,
    tokens: Sequence[int] = (1, 4),
    kv: Sequence[str] = ("same",),
    has_scores: bool = False,
    in_order: bool = True,
) -> Record:
    """Time a layer's attention over full rows, as a multiple of a copy of as many bytes. shapes: query and KV heads,
    head_dim, rows, entries a row. kv: storages of the entries. has_scores: scores of chunks are written, too.
    in_order: False for rings."""
    rate, times = copy_rate(device), dict[str, float]()
    for storage, (*heads, batch, n_slot), n_token in itertools.product(kv, shapes, tokens):
        spec = AttentionSpec(*heads, None, dtype_of(device))
        kernel, why = select_backend(backend, device, spec)
        assert kernel.name == backend, why
        config = ModelConfig(8, 1, 64, *heads, 8, max_context=n_slot)
        dtype = KV_DTYPES.get(storage, spec.dtype)
        cache: KVCache = FullKVCache(config, batch, n_slot, device, dtype)
        cache = cache if in_order else StreamingKVCache(config, batch, n_slot, 4, device, dtype)
        cache.positions.copy_(torch.arange(n_slot).expand(batch, -1))
        randomise(cache)
        q = torch.randn(batch, n_token, heads[0], heads[2], device=device).to(spec.dtype)
        prepared = kernel.prepare(spec, cache.positions[:, -n_token:].clone(), cache)
        to = torch.empty(batch, n_token, heads[1], -(-n_slot // SCORE_CHUNK), device=device) if has_scores else None
        ms = milliseconds(device, partial(kernel.attend, q, cache.read(0)._replace(chunk_scores=to), prepared))
        name = "{}/{} heads of {}, B {}, S {}, T {}, {} KV".format(*heads, batch, n_slot, n_token, storage)
        times[name] = ms * rate / cache.n_bytes
    return {"copy_tb_per_s": rate * 1e-9, "times_copy": times, "median_times_copy": median(times.values())}


def linears(device: str, shapes: Sequence[tuple[int, int]], rows: Sequence[int]) -> Record:
    """Time linear layers in the model's dtype, 8 and 4 bits. shapes: outputs, inputs."""
    times = Record()
    for (d_out, d_in), n_row in itertools.product(shapes, rows):
        plain = nn.Linear(d_in, d_out, bias=False, device=device, dtype=dtype_of(device))
        x = torch.randn(n_row, d_in, device=device).to(plain.weight.dtype)
        for name in ("plain", *SCHEMES):
            layer = plain if name == "plain" else quantized_linear(plain.weight, None, name)
            assert layer is not None
            key = f"{name}_ms_{n_row}"
            times[key] = times.get(key, 0) + milliseconds(device, partial(layer, x))
    return times


def noise(device: str, rows: int, tokens: int, n_ids: int) -> Record:
    """Time drawing a round's Gumbel numbers, and divide by a copy of as many bytes."""
    request, position = torch.arange(rows, device=device)[:, None], torch.arange(tokens, device=device)
    ms = milliseconds(device, partial(gumbel, request, request, position, Stream.COUPLED, n_ids))
    return {"noise_ms": ms, "times_copy": ms * copy_rate(device) / (2 * 4 * rows * tokens * n_ids)}


def profiled_rounds(session: Session, controller: Controller) -> tuple[Counter[str], float]:
    """Return the ms a round of each kernel and copy on the GPU (on a CPU: of each operation), and how many ran, without
    the first round, which follows the prefill of drafts."""
    kind = "CPU" if session.runner.device.type == "cpu" else "CUDA"
    generation = session.generation(controller=controller)
    generation.run(1)
    with profile(activities=[getattr(ProfilerActivity, kind)]) as profiler:
        generation.run(PROFILED * session.plan.target.n_rows)
    times, n_node, n_round = Counter[str](), 0, len(generation.rounds) - 1
    for event in profiler.events():
        # A user annotation covers kernels that are events, too.
        if event.device_type == getattr(DeviceType, kind) and not event.is_user_annotation:
            times[event.name[:160]] += event.time_range.elapsed_us() / 1e3 / n_round
            n_node += 1
    return times, n_node / n_round


def open_fitting(words: str) -> Session:
    """Open a session for flags after ROUNDS, with the rows that fit into memory. Errors: OutOfMemoryError if none
    fits."""
    plan = resolve(cli.read(SelfSpecFlags, f"{ROUNDS} {words}".split(), "selfspec_benchmark.py").config())
    most = memory.memory_plan(plan).largest_batch(memory.available_bytes(plan.target.device))
    n_rows = min(plan.target.n_rows, most) or plan.target.n_rows
    return Session.of_plan(replace(plan, target=replace(plan.target, n_rows=n_rows), n_prompts=n_rows))


def rounds(device: str, words: str) -> Record:
    """Return the record of tests/selfspec_benchmark.py for flags, with the kernels of its rounds and the peak of
    memory over the plan."""
    if device != "cpu":  # a profile may miss kernels of graphs that were captured before the first profile
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.ones(8, device=device).sum().item()
    session = open_fitting(f"{words} --device {device}")
    runner, is_dummy = session.runner, session.plan.config.target.load_format == "dummy"
    if is_dummy:
        fill_with_noise(runner, session.prompts)  # the passes then find the prompts prefilled
    done = passes.run_passes(session)
    record = make_record("gpu_speed", session, done)
    runner.drop_graphs()
    drafters = session.drafters()
    passes.warm_up(session, drafters)
    times, n_node = profiled_rounds(session, passes.make_controller(session, drafters, done.costs))
    runner.drop_graphs()
    planned = memory.memory_plan(session.plan).total(session.plan.target.n_rows)
    mean_ms = 1e3 * done.last.stats.decode_seconds / len(done.last.stats.rounds)
    return record | {
        "prefill_seconds": None if is_dummy else record["prefill_seconds"],
        "kernel_ms": times.total(),
        "gap_percent": 100 * (1 - times.total() / mean_ms) if device != "cpu" else None,
        "nodes_per_layer": n_node / runner.model.config.n_layer,
        "peak_over_plan": record["peak_memory_bytes"] / planned if device != "cpu" else None,
        "largest": times.most_common(10),
    }


MEASURES: dict[str, Callable[..., Record]] = {each.__name__: each for each in (attention, linears, noise, rounds)}
FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROUNDS, CELLS = FILE["rounds"], FILE["cells"]
Name: Any = Literal[tuple(CELLS)]


@dataclass(frozen=True)
class Flags(Output):
    cells: Annotated[tuple[Name, ...], arg(help_behavior_hint="(default: all)")] = ()  # cells to measure


def measure(cells: Mapping[str, Mapping[str, Any]], device: str, output: str | None) -> int:
    """Publish a record of each cell as it ends. cells: tables of gpu_speed.toml. Returns how many failed."""
    n_failed = 0
    for name, cell in cells.items():
        say(name)
        arguments = {key: value for key, value in cell.items() if key != "measure"}
        try:
            with torch.inference_mode():
                figures = {"status": "done"} | MEASURES[cell["measure"]](device, **arguments)
        except Exception as error:  # the other cells may run
            traceback.print_exc()
            n_failed += 1
            figures = {"status": "error", "error": f"{type(error).__name__}: {str(error)[:2000]}"}
        publish(output, rounded(figures | {"benchmark": "gpu_speed", "cell": name} | provenance()))
    return n_failed


def main(flags: Flags) -> None:
    if not torch.cuda.is_available():
        refuse("the machine", "no CUDA device", "a CUDA device that PyTorch sees", fix="run this on a machine with one")
    require_appendable(flags.output)
    if measure({name: CELLS[name] for name in flags.cells or CELLS}, "cuda", flags.output):
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main, Flags)
