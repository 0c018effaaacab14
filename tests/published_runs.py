"""The scripts of published tables, run over cells that are measured in no time."""

import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import Ended, run

from reproduce import acceptance_tables
from reproduce.paper import figures, reproduction
from reproduce.sweeping import runner
from reproduce.sweeping.cells import Cell

BUILT_IN, LLAMA = "SmolLM2-135M-Instruct", "Llama-3.1-8B"
SELFSPEC, ACCEPT = "tests/selfspec_benchmark.py", "reproduce/acceptance.py"
ORIGIN = {"git_commit": "0123456789abcdef", "machine": "a CPU, 2 cores", "gpu": None, "torch_version": "2.13"}
STORAGE = {"dtype": "float32", "kv_dtype": "float32", "draft_dtype": "bfloat16", "draft_weights": None}
TIMES = {"baseline_step_ms": 100.0, "draft_step_ms": 25.0, "verify_step_ms": 150.0, "round_ms": 240.0}
THIRTEEN = 13  # rows that no machine can hold


def name_of(script: ModuleType) -> str:
    return script.__name__.rpartition(".")[2]


def speculation(flags: dict[str, Any], is_self: bool) -> dict[str, Any]:
    """A run whose speedup is 0.8 where one row decodes, else 1.3."""
    B = flags["B"]
    accepted = {"acceptance_rate": 0.8, "mean_accepted_length": 2.952, "distinct_4gram_fraction": 0.8}
    tokens = {"baseline_tokens_per_second": 10.0 * B, "decode_tokens_per_second": 12.3 * B}
    who = {"draft_model": None if is_self else "SmolLM2-draft", "draft_budget": flags["streamingllm_budget"]}
    speedups = {"speedup": 0.8 if B == 1 else 1.3, "wall_speedup": 0.7, "identical_sequences": B, "sequences": B}
    return who | accepted | tokens | speedups | TIMES


def acceptance(flags: dict[str, Any]) -> dict[str, Any]:
    same = {"judged": 300, "acceptance_per_position": [0.9, 0.8], "mean_accepted_length": 3.1}
    same |= {"distinct_4gram_fraction": 0.75}
    drafts = itertools.product(flags["texts"], flags["policies"], flags["budgets"])
    rows = [{"text": text, "draft_policy": policy, "draft_budget": budget} for text, policy, budget in drafts]
    return {"rows": [same | row | {"acceptance_rate": 0.5 + row["draft_budget"] / 2000} for row in rows]}


def gpu_costs(**other: Any) -> dict[str, Any]:
    """A cell of gpu.py: what random weights of a published shape cost."""
    record = {"benchmark": "gpu_costs", "status": "done", "model": "meta-llama/Meta-Llama-3.1-8B", "draft_model": None}
    record |= {"load_format": "dummy", "B": 32, "prefix_len": 16000, "gamma": 3, "draft_budget": 512, "speedup": None}
    record |= STORAGE | {"dtype": "bfloat16", "kv_dtype": "bfloat16", "baseline_step_ms": 20.0, "round_ms": 40.0}
    record |= ORIGIN | {"gpu": "NVIDIA X", "draft_step_ms": 4.0, "verify_step_ms": 26.0} | other
    return record | {"cell": json.dumps(record)}


def write(file: Path, *records: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


class Runs:
    """Runs scripts; `ended` is how the last one ended, `measured` all cells that were measured."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.model, self.ended, self.measured, self.save = BUILT_IN, Ended(0, "", ""), [], figures.save
        patch.setattr(runner, "_run", self.measure)

    def measure(self, cell: Cell, *_: object) -> dict[str, Any]:
        self.measured.append(cell)
        row = {"key": cell.key, "script": cell.script, "flags": cell.given, "seconds": 1.0}
        if cell.given["B"] == THIRTEEN:
            return row | {"status": "failed", "error": "thirteen rows", "record": None}
        is_acceptance = cell.script == ACCEPT
        own = acceptance(cell.given) if is_acceptance else speculation(cell.given, cell.script == SELFSPEC)
        size = {name: cell.given[name] for name in ("B", "prefix_len", "gamma")}
        record = ORIGIN | STORAGE | {"model": self.model, "dataset": "default", "load_format": "pth"} | size | own
        return row | {"status": "ok", "error": None, "record": record}

    def __call__(self, script: ModuleType, *flags: str, draws: bool = False) -> str:
        """What the script printed, given these flags, and folders of its own."""
        self.patch.setattr(figures, "save", self.save if draws else lambda figure, name, folder: [])
        file = reproduction.ACCEPTANCE if script is acceptance_tables else reproduction.SPEEDUPS
        own = ["--output", str(self.folder / file), "--figures", str(self.folder / "figures")]
        self.ended = run(f"reproduce/{name_of(script)}.py", [*own, *flags])
        return self.ended.out + self.ended.err


def words(text: str, *starts: str) -> list[list[str]]:
    """The words of every line that starts with these."""
    return [line.split() for line in text.splitlines() if line.split()[: len(starts)] == list(starts)]
