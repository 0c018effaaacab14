"""Measure storages of weights and entries on a CPU: plain decoding, speculation, and llama.cpp, in turns.

    python -m reproduce.cpu_storages --output reproduction/cpu_storages.jsonl
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python==0.3.36
    python -m reproduce.cpu_storages --llama_cpp

The built-in model is prefilled in every storage; then short passes of all storages alternate, so that a busy machine
slows all of them. llama.cpp runs the same GGUF behind the same prompt with as many threads; its times do not count
sampling and the host. Needs about 12 GB of memory at 8 rows of 7500 tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import bench
from bench.config import DEFAULT_MODEL, BatchSize, Output, RunConfig, Sampling, Sizes, Target, Text
from bench.draft_flags import DraftFlags
from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import publish
from common.provenance import provenance
from common.tables import console
from reproduce.helpers.columns import of
from reproduce.helpers.in_turns import Contender, in_turns
from reproduce.helpers.records import rows_of

STORAGES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8-int8": {"dtype": "bfloat16", "quantize": "int8", "kv_dtype": "int8"},
    "int4-int8": {"dtype": "bfloat16", "quantize": "int4", "kv_dtype": "int8"},
}
SAMPLINGS = {"greedy": Sampling(), "coupled, 0.6": Sampling(temperature=0.6, verification="coupled")}
# Storages of llama.cpp's entries; its steps in a turn, and room in its rows for their tokens.
PEER_ENTRIES, PEER_STEPS, PEER_ROOM = ("f16", "q8_0"), 16, 256
COLUMNS = "storage sampling draft_weights plain_ms verify_ratio draft_ratio mean_accepted_length plain_rate rate "
COLUMNS += "speedup wall_speedup identical"


@dataclass(frozen=True)
class Flags:
    text: Text = field(default_factory=Text)
    draft: DraftFlags = field(default_factory=DraftFlags)
    output: Output = field(default_factory=Output)
    model: str = DEFAULT_MODEL  # the converted checkpoint, with a GGUF in its folder for llama.cpp
    B: BatchSize = 8  # rows decoded together
    prefix_len: int = 7500  # prompt tokens per row
    gen_len: int = 64  # new tokens per row
    storages: tuple[Literal[tuple(STORAGES)], ...] = tuple(STORAGES)  # WEIGHTS-ENTRIES, or one dtype of both
    turns: int = 3  # interleaved runs of each storage
    llama_cpp: bool = False  # time llama.cpp too


def llama_cpp_turns(flags: Flags, prompt: Sequence[int], gamma: int) -> dict[str, Callable[[], list[list[float]]]]:
    """Prefill llama.cpp with each storage of entries. Return functions that run PEER_STEPS plain steps and as many
    verifications, and return the milliseconds of both. Errors: ConfigError."""
    folder = Path(flags.model) if Path(flags.model).is_dir() else Path(flags.model).parent
    if (gguf := next(folder.glob("*.gguf"), None)) is None:
        fix = f"leave out {flag('llama_cpp')}"
        raise ConfigError("llama.cpp reads a GGUF", flag("model"), folder, "a folder with a GGUF", fix)
    try:
        from reproduce.helpers.llama_cpp_steps import LlamaRows
    except ImportError as error:
        what, fix = "llama.cpp does not run", "install it as the top of this file says"
        raise ConfigError(what, flag("llama_cpp"), error, "the package llama-cpp-python", fix) from None

    def turn(rows: LlamaRows) -> list[list[float]]:
        return [rows.steps(n_token, PEER_STEPS) for n_token in (1, 1 + gamma)]

    sizes = flags.B, PEER_ROOM, torch.get_num_threads()
    peers = {entries: LlamaRows(str(gguf), prompt, *sizes, entries) for entries in PEER_ENTRIES}
    kind = gguf.stem.rpartition(".")[2]
    return {f"llama.cpp, {kind}, {entries}": partial(turn, rows) for entries, rows in peers.items()}


def main(flags: Flags) -> None:
    require_at_least("turns", flags.turns, 1)
    draft, sizes = flags.draft.config(), Sizes(flags.B, flags.prefix_len, flags.gen_len)
    sessions: dict[str, bench.Session] = {}
    for name in dict.fromkeys(flags.storages):
        target = Target(model=flags.model, device="cpu", **STORAGES[name])
        sessions[name] = bench.Session.open(RunConfig(target, flags.text, sizes, output=flags.output, draft=draft))
    prompt = next(iter(sessions.values())).prompts[0]
    peers = llama_cpp_turns(flags, prompt, draft.gamma) if flags.llama_cpp else {}
    seconds = {name: bench.prefill(session) for name, session in sessions.items()}
    runs, contenders = dict[str, Callable](peers), {}
    for (name, session), (kind, sampling) in product(sessions.items(), SAMPLINGS.items()):
        plain = Contender(f"{name}, {kind}, plain", session.variant(draft=None, sampling=sampling))
        drafting = session.variant(sampling=sampling)
        options = {"draft_budget": drafting.plan.candidates[0].capacity, "gamma": drafting.plan.gamma}
        contenders[name, kind] = Contender(f"{name}, {kind}", drafting, plain, drafting.drafters(), options)
        runs |= {contender.name: contender.run for contender in (plain, contenders[name, kind])}
    turns = in_turns(runs, flags.turns)
    records = []
    for name, session in sessions.items():
        rows = [contenders[name, kind].row() | {"sampling": kind} for kind in SAMPLINGS]
        measured = {"storage": name, "prefill_seconds": seconds[name], "turns": flags.turns, "rows": rows}
        without = ("verification", "temperature", "seed")
        records.append(bench.record_of("cpu_storages", session, measured, without=without))
    for name in peers:
        plain_ms, verify_ms = (median(chain(*(turn[part] for turn in turns[name]))) for part in (0, 1))
        row = {"baseline_step_ms": plain_ms, "baseline_tokens_per_second": 1e3 * flags.B / plain_ms}
        sizes = {"B": flags.B, "prefix_len": flags.prefix_len, "rows": [row | {"verify_step_ms": verify_ms}]}
        records.append({"benchmark": "cpu_storages", "storage": name, **sizes, **provenance()})
    print(console(rows_of(records), of(COLUMNS)))
    for record in records:
        publish(flags.output.output, bench.rounded(record))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
