"""Measure storages of weights and entries on a CPU: plain decoding, speculation, and other libraries, in turns.

    python -m reproduce.cpu_storages --output reproduction/cpu_storages.jsonl
    python -m reproduce.cpu_storages --storages float32 --transformers
    python -m venv scratch && CMAKE_ARGS=-DGGML_NATIVE=ON scratch/bin/pip install llama-cpp-python==0.3.36
    python -m reproduce.cpu_storages --llama_cpp scratch/bin/python

The built-in model is prefilled in every storage; then short passes of all storages alternate, so that a busy machine
slows all of them. The libraries run the same GGUF and hold the same prompts: llama.cpp in a process with as many
threads, where neither sampling nor the host counts; transformers (requirements-dev.txt) in float32, greedily, over the
keys and values of the float32 storage. Needs about 12 GB of memory at 8 rows of 7500 tokens.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import bench
from bench.config import DEFAULT_MODEL, BatchSize, Output, RunConfig, Sampling, Sizes, Target, Text
from bench.draft_flags import draft_flags
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
# The storages of llama.cpp's entries, its steps in a turn, and room in a row for the tokens of these steps.
PEER, PEER_ENTRIES = Path(__file__).parent / "helpers" / "llama_cpp_steps.py", ("f16", "q8_0")
PEER_STEPS, PEER_ROOM = 16, 256
COLUMNS = "storage sampling draft_weights plain_ms verify_ratio draft_ratio mean_accepted_length plain_rate rate "
COLUMNS += "speedup wall_speedup identical"
SelfDraft: Any = draft_flags(["self"])
Request = Callable[[Mapping[str, Any]], dict[str, Any]]


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
    transformers: bool = False  # time Hugging Face transformers too


@contextmanager
def llama_cpp(python: str, setup: Mapping[str, Any]) -> Iterator[Request]:
    """Start llama.cpp, prefill, and yield a function that requests steps. Errors: ConfigError if the process ends."""

    def request(block: Mapping[str, Any]) -> dict[str, Any]:
        try:
            process.stdin.write(json.dumps(block) + "\n")
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
        request(setup)
        yield request


def no_peer(python: str, seen: object) -> ConfigError:
    required, fix = "an interpreter that has llama-cpp-python", "make one as the top of this file says, or leave it out"
    return ConfigError("llama.cpp does not run", f"{flag('llama_cpp')} {python}", seen, required, fix)


def gguf_beside(model: str) -> Path:
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    if (found := next(folder.glob("*.gguf"), None)) is None:
        raise ConfigError("llama.cpp reads a GGUF", flag("model"), folder, "a folder with one", "leave out llama_cpp")
    return found


class StepTimes(list[float]):
    """A stopping criterion of transformers that never stops and records the time of each token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def transformers_turns(session: bench.Session, model: str, n_turns: int) -> dict[str, Callable[[], list[float]]]:
    """Return for each kind of cache of transformers a function that generates PEER_STEPS tokens behind the session's
    prefilled rows, and returns the milliseconds between tokens. Every turn goes on behind the last."""
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

    gguf, length, entries = gguf_beside(model), session.plan.prefix_len, session.runner.cache
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    peer = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **how)
    static = StaticCache(config=peer.config, max_cache_len=length + n_turns * PEER_STEPS + 1)

    def turns(cache: Any) -> Iterator[list[float]]:
        tokens = torch.tensor(session.prompts)
        for layer, each in enumerate(zip(entries.keys, entries.values, strict=True)):
            cache.update(*(x[:, :, : length - 1].contiguous() for x in each), layer)
        while True:
            times, mask = StepTimes(), torch.ones_like(tokens)
            how = {"max_new_tokens": PEER_STEPS, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
            tokens = peer.generate(tokens, past_key_values=cache, stopping_criteria=[times], **how)
            yield [1e3 * (after - before) for before, after in pairwise(times)]

    caches = {
        "transformers, static cache, sdpa": static,
        "transformers, default cache": DynamicCache(config=peer.config),
    }
    return {name: partial(next, turns(cache)) for name, cache in caches.items()}


def peer_record(name: str, plain: Sequence[float], verified: Sequence[float], flags: Flags) -> dict[str, Any]:
    """Return the record of a library from its milliseconds of plain steps and of verifications, if there are any."""
    plain_ms, verify_ms = median(plain), median(verified) if verified else None
    rates = {"baseline_step_ms": plain_ms, "baseline_tokens_per_second": 1e3 * flags.B / plain_ms}
    sizes = {"B": flags.B, "prefix_len": flags.prefix_len, "rows": [rates | {"verify_step_ms": verify_ms}]}
    return {"benchmark": "cpu_storages", "storage": name, **sizes, **provenance()}


def main(flags: Flags) -> None:
    require_at_least("turns", flags.turns, 1)
    draft, sizes = flags.draft.config(), Sizes(flags.B, flags.prefix_len, flags.gen_len)
    sessions: dict[str, bench.Session] = {}
    for name in dict.fromkeys(flags.storages):
        target = Target(model=flags.model, device="cpu", **STORAGES[name])
        sessions[name] = bench.Session.open(RunConfig(target, flags.text, sizes, output=flags.output, draft=draft))
    if flags.transformers and "float32" not in sessions:
        what, fix = "transformers takes the keys and values of float32", "add float32"
        raise ConfigError(what, flag("storages"), " ".join(sessions), "float32 among them", fix)
    runs, peers, contenders = {}, list[str](), {}
    with ExitStack() as running:
        for entries in PEER_ENTRIES if flags.llama_cpp else ():
            gguf, prompt = gguf_beside(flags.model), next(iter(sessions.values())).prompts[0]
            setup = {"model": str(gguf), "prompt": prompt, "rows": flags.B, "room": PEER_ROOM, "entries": entries}
            setup["threads"] = torch.get_num_threads()
            name = f"llama.cpp, {gguf.stem.rpartition('.')[2]}, {entries}"
            request = running.enter_context(llama_cpp(flags.llama_cpp, setup))
            blocks = [{"tokens": n, "steps": PEER_STEPS} for n in (1, 1 + draft.gamma)]
            runs[name] = partial(lambda request, blocks: [request(block)["ms"] for block in blocks], request, blocks)
            peers.append(name)
        seconds = {name: bench.prefill(session) for name, session in sessions.items()}
        for (name, session), (kind, sampling) in product(sessions.items(), SAMPLINGS.items()):
            plain = Contender(f"{name}, {kind}, plain", session.variant(draft=None, sampling=sampling))
            drafting = session.variant(sampling=sampling)
            options = {"draft_budget": drafting.plan.draft.policy.budget, "gamma": drafting.plan.draft.gamma}
            contenders[name, kind] = Contender(f"{name}, {kind}", drafting, plain, drafting.drafters(), options)
            runs |= {contender.name: contender.run for contender in (plain, contenders[name, kind])}
        others = transformers_turns(sessions["float32"], flags.model, flags.turns) if flags.transformers else {}
        turns = in_turns(runs | others, flags.turns)
    records = []
    for name, session in sessions.items():
        rows = [contenders[name, kind].row() | {"sampling": kind} for kind in SAMPLINGS]
        measured = {"storage": name, "prefill_seconds": seconds[name], "turns": flags.turns, "rows": rows}
        without = ("verification", "temperature", "seed")
        records.append(bench.record_of("cpu_storages", session, measured, without=without))
    for name in peers:
        plain, verified = ([ms for turn in turns[name] for ms in turn[part]] for part in (0, 1))
        records.append(peer_record(name, plain, verified, flags))
    records += [peer_record(name, [*chain.from_iterable(turns[name])], [], flags) for name in others]
    print(console(rows_of(records), of(COLUMNS)))
    for record in records:
        publish(flags.output.output, bench.rounded(record))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
