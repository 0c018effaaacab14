"""Every storage of weights and entries on a CPU: plain decoding, speculation, and llama.cpp, in turns in one run.

    python reproduce/cpu_storages.py --output reproduce/results/cpu_storages.jsonl
    python -m venv scratch && CMAKE_ARGS=-DGGML_NATIVE=ON scratch/bin/pip install llama-cpp-python==0.3.36
    python reproduce/cpu_storages.py --llama_cpp scratch/bin/python --output reproduce/results/cpu_storages.jsonl

All storages of the built-in model are prefilled, then their passes alternate, each as short as `--gen_len`, so that a
busy machine slows all of them. For every phase the run says how many bytes and operations it takes at least, and what
share of the time it would take at the rates that this machine reached in the same turns: reading memory, and products
of matrices in the phase's dtype. llama.cpp runs the same GGUF in a process of its own, with as many threads; of its
steps neither sampling nor the host is counted. Needs about 12 GB of memory at 8 rows of 7500 tokens.
"""

import json
import subprocess
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

import bench
from bench.config import DEFAULT_MODEL, BatchSize, Output, RunConfig, Sampling, Sizes, Target, Text
from bench.draft_flags import draft_flags
from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import publish
from common.provenance import provenance
from common.say import dtype_name
from common.tables import markdown
from cost_model.machines import Machine
from cost_model.roofline import ModelStorage, forward_parts
from models.packed_linear import pack_linears
from reproduce.gamma_cell import Contender
from reproduce.paper.columns import of, phases_of, rows_of
from reproduce.paper.in_turns import in_turns

STORAGES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8-int8": {"dtype": "bfloat16", "quantize": "int8", "kv_dtype": "int8"},
    "int4-int8": {"dtype": "bfloat16", "quantize": "int4", "kv_dtype": "int8"},
}
SAMPLINGS = {"greedy": Sampling(), "coupled, 0.6": Sampling(temperature=0.6, verification="coupled")}
# llama.cpp's own entries, steps of it in a turn, and room for the tokens that they append to a row.
PEER, PEER_ENTRIES = Path(__file__).parent / "peers" / "llama_cpp_steps.py", ("f16", "q8_0")
PEER_STEPS, PEER_ROOM = 16, 256
# Of the tensors that rates are measured with: numbers to read, and rows of square matrices.
N_READ, N_MATRIX = 1 << 26, 1024
SelfDraft: Any = draft_flags(["self"])
Question = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Flags:
    text: Text = field(default_factory=Text)
    draft: SelfDraft = field(default_factory=SelfDraft)
    output: Output = field(default_factory=Output)
    model: str = DEFAULT_MODEL  # the converted checkpoint, with its GGUF beside it for llama.cpp
    B: BatchSize = 8  # rows decoded together
    prefix_len: int = 7500  # prompt tokens per row
    gen_len: int = 64  # new tokens per row
    storages: tuple[Literal[tuple(STORAGES)], ...] = tuple(STORAGES)  # WEIGHTS-ENTRIES, or one dtype of both
    turns: int = 3  # how often all are run, interleaved
    llama_cpp: str | None = None  # an interpreter that has llama-cpp-python


@torch.inference_mode()
def rates() -> dict[str, float]:
    """Return bytes per second of reading memory, and operations per second of products of matrices by dtype. Linear
    layers are packed, as a model's are: products of plain matrices reach less than half of that on some CPUs."""

    def per_second(n: float, run: Callable[[], object]) -> float:
        run()
        return n / median(timeit.repeat(run, number=1, repeat=9))

    read = torch.ones(N_READ)
    found = {"bandwidth": per_second(read.nbytes, read.sum)}
    ones = torch.ones(N_MATRIX, N_MATRIX)
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Sequential(nn.Linear(N_MATRIX, N_MATRIX, bias=False, dtype=dtype))
        pack_linears(layer)
        found[dtype_name(dtype)] = per_second(2 * N_MATRIX**3, partial(layer, ones.to(dtype)))
    small = ones.to(torch.int8)
    return found | {"int8": per_second(2 * N_MATRIX**3, partial(torch._int_mm, small, small.t()))}


def phases(session: bench.Session, row: Mapping[str, Any], seconds: float, limits: Mapping[str, float]) -> list[Any]:
    """Return what prefill, plain step, verification and draft step take, and their least time by the limits. seconds:
    of the prefill, whose bytes do not limit it."""
    config, draft = session.plan.target.config, session.plan.draft
    model = ModelStorage(
        config, dtype_name(session.plan.dtype), session.plan.config.target.quantize, dtype_name(session.plan.kv_dtype)
    )
    drafts = ModelStorage(config, dtype_name(draft.dtype), draft.quantize, dtype_name(draft.kv_dtype))
    machine = Machine(limits["bandwidth"], limits["bfloat16"], limits["float32"], tile=1)
    n, rows = session.plan.prefix_len, session.plan.n_rows
    each = [
        ("prefill", model, n, n // 2, 1e3 * seconds),
        ("plain step", model, 1, n, row["baseline_step_ms"]),
        (f"verification of {draft.gamma + 1}", model, draft.gamma + 1, n, row["verify_step_ms"]),
        ("draft step", drafts, 1, draft.capacity, row["draft_step_ms"]),
    ]
    found = []
    for name, stored, tokens, entries, ms in each:
        linear, attention = forward_parts(stored, machine, rows, tokens, entries)
        if name == "prefill":  # whose head runs for the last tokens alone
            share = 1 - config.vocab_size * config.dim / stored.n_weights
            linear, attention = linear._replace(n_bytes=0, ops=share * linear.ops), attention._replace(n_bytes=0)
        # 8-bit entries take two products in 8 bits each, as long as one in bfloat16. 4-bit weights are multiplied in 8
        # bits but count as bfloat16 too, so their limit is a little too high.
        least = [
            max(part.n_bytes / limits["bandwidth"], part.ops / limits[dtype])
            for part, dtype in (
                (linear, "int8" if stored.weights == "int8" else stored.dtype),
                (attention, stored.dtype),
            )
        ]
        n_bytes, ops = linear.n_bytes + attention.n_bytes, linear.ops + attention.ops
        found.append({"phase": name, "bytes": n_bytes or None, "ops": ops, "ms": ms, "limit_ms": 1e3 * sum(least)})
    return found


@contextmanager
def llama_cpp(python: str, setup: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Question]]:
    """Yield what a process of llama.cpp says of its prefill, and a function that asks it for steps. Errors: ConfigError
    if it ends."""

    def ask(question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (OSError, ValueError):
            raise no_peer(python, f"{' '.join(map(str, command))} has ended") from None

    command, pipe = [python, PEER], subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    except OSError as error:
        raise no_peer(python, error) from None
    with process:
        yield ask(setup), ask


def no_peer(python: str, seen: object) -> ConfigError:
    required, fix = "an interpreter that has llama-cpp-python", "make one as the top of this file says, or leave it out"
    return ConfigError("llama.cpp does not run", f"{flag('llama_cpp')} {python}", seen, required, fix)


def gguf_beside(model: str) -> Path:
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    if (found := next(folder.glob("*.gguf"), None)) is None:
        raise ConfigError("llama.cpp reads a GGUF", flag("model"), folder, "a folder with one", "leave out llama_cpp")
    return found


def peer_record(name: str, prefilled: Mapping[str, Any], seen: Sequence[Any], flags: Flags) -> dict[str, Any]:
    """The record of llama.cpp. seen: the answers to the questions for plain steps and for verifications, by turn."""
    plain, verified = (median(ms for turn in seen for ms in turn[part]["ms"]) for part in (0, 1))
    rates = {"baseline_step_ms": plain, "baseline_tokens_per_second": 1e3 * flags.B / plain, "verify_step_ms": verified}
    sizes = {"B": flags.B, "prefix_len": flags.prefix_len}
    return {"benchmark": "cpu_storages", "storage": name, **sizes, **prefilled, "rows": [rates], **provenance()}


def wall_rate(one: bench.Decoded) -> float:
    """Tokens per second to the last row."""
    return one.stats.counts.emitted / one.stats.decode_seconds


def main(flags: Flags) -> None:
    require_at_least("turns", flags.turns, 1)
    draft, sizes = flags.draft.config(), Sizes(flags.B, flags.prefix_len, flags.gen_len)
    sessions: dict[str, bench.Session] = {}
    for name in dict.fromkeys(flags.storages):
        target = Target(model=flags.model, device="cpu", **STORAGES[name])
        sessions[name] = bench.Session.open(RunConfig(target, flags.text, sizes, output=flags.output, draft=draft))
    runs, peers = {"rates": rates}, {}
    with ExitStack() as running:
        for entries in PEER_ENTRIES if flags.llama_cpp else ():
            gguf, prompt = gguf_beside(flags.model), next(iter(sessions.values())).prompts[0]
            setup = {"model": str(gguf), "prompt": prompt, "rows": flags.B, "room": PEER_ROOM, "entries": entries}
            setup["threads"] = torch.get_num_threads()
            name = f"llama.cpp, {gguf.stem.rpartition('.')[2]}, {entries}"
            peers[name], ask = running.enter_context(llama_cpp(flags.llama_cpp, setup))
            blocks = [{"tokens": n, "steps": PEER_STEPS} for n in (1, 1 + draft.gamma)]
            runs[name] = partial(lambda ask, blocks: [ask(block) for block in blocks], ask, blocks)
        seconds = {name: bench.prefill(session) for name, session in sessions.items()}
        contenders = {}
        for (name, session), (said, sampling) in product(sessions.items(), SAMPLINGS.items()):
            plain = Contender(f"{name}, {said}, plain", session.variant(draft=None, sampling=sampling))
            own = session.variant(sampling=sampling)
            drafts = {"draft_budget": own.plan.draft.policy.budget, "gamma": own.plan.draft.gamma}
            contenders[name, said] = Contender(f"{name}, {said}", own, plain, own.drafters(), drafts)
            runs |= {one.name: one.run for one in (plain, contenders[name, said])}
        seen = in_turns(runs, flags.turns)
    limits = {name: median(one[name] for one in seen["rates"]) for name in seen["rates"][0]}
    records = []
    for name, session in sessions.items():
        rows = []
        for said in SAMPLINGS:
            own = contenders[name, said]
            rows.append(own.row() | {"sampling": said, "wall_tokens_per_second": median(map(wall_rate, own.outputs))})
        measured = {"storage": name, "prefill_seconds": seconds[name], "turns": flags.turns, "limits": limits}
        measured |= {"rows": rows, "phases": phases(session, rows[0], seconds[name], limits)}
        without = ("verification", "temperature", "seed")
        records.append(bench.record_of("cpu_storages", session, measured, without=without))
    records += [peer_record(name, prefilled, seen[name], flags) for name, prefilled in peers.items()]
    for record in records:
        record["cell"] = f"{record['storage']}, {flags.B} x {flags.prefix_len}"
    tables = markdown(rows_of(records), of("cpu_storages")), markdown(phases_of(records), of("cpu_phases"))
    print("\n\n".join(tables))
    for record in records:
        publish(flags.output.output, bench.rounded(record))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
