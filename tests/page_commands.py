"""The commands of the documentation: found as bash reads them, and planned by the programs that they call."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from programs import COST_MODEL, ROOT, run
from torch.distributed.run import get_args_parser

from bench.config import DEFAULT_MODEL
from bench.plan import Plan
from common import cli
from common.exit import exit_on_user_error
from models.checkpoints.default_model import DEFAULT_NAME
from models.checkpoints.model_source import ModelSource, find_model
from models.presets import PRESETS
from reproduce.sweeping.cells import Cell

BASH = shutil.which("bash") or "bash"
# The languages of fenced blocks without commands; tests run the Python.
NO_COMMANDS = ("text", "python")
# A command within a sentence.
INLINE = re.compile(r"`((?:python|torchrun|make|pip) [^`]+)`")
# What stands in for a program that a page calls: it notes how it was called.
NOTES = '#!/bin/sh\nprintf "%s\\037" "${0##*/}" "$@" >> "$CALLS"\necho >> "$CALLS"\n'
STUBS = {
    **dict.fromkeys(("python", "torchrun", "make", "pip", "mkdir"), NOTES),
    "srun": '#!/bin/sh\nexec "$@"\n',
    "scontrol": "#!/bin/sh\necho node0\n",
    "head": '#!/bin/sh\nread line\necho "$line"\n',
}
# Programs without a plan of memory and ranks, or whose prompts need a tokenizer: only their flags are read.
UNPLANNED = (
    *("reproduce/plot.py", "reproduce/spec_bench.py", "reproduce/serve_load.py", "reproduce/markov_table.py"),
    *("download.py", "convert_hf_checkpoint.py", "foretoken.py"),
    "tests/round_costs.py",
    *("reproduce/gpu.py", "reproduce/kernel_report.py", "reproduce/cpu_linears.py"),
    *("reproduce/performance_page.py", "reproduce/published_page.py", "reproduce/roofline_error.py"),
)
BUILT_IN = (DEFAULT_NAME, "SmolLM2-draft")
SERVER = "serving"
# What a page's commands call that the reader makes.
MADE_UP = ("yours",)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; or, without a language, all commands within its sentences."""

    language: str
    text: str

    @property
    def n_gpus(self) -> int | None:
        """Those that a Slurm script asks for."""
        nodes, per_node = (re.search(rf"#SBATCH .*--{name}=(\d+)", self.text) for name in ("nodes", "gpus-per-node"))
        return int(nodes[1]) * int(per_node[1]) if nodes and per_node else None

    def calls(self, folder: Path) -> list[list[str]]:
        """The programs that bash calls, with their arguments; by every job of a Slurm array."""
        if self.language in NO_COMMANDS:
            return []
        last = re.search(r"#SBATCH .*--array=0-(\d+)", self.text)
        return [call for job in range(int(last[1]) + 1 if last else 1) for call in calls(self.text, folder, job)]

    def plans(self, planner: Planner) -> list[Plan]:
        return [plan for call in self.calls(planner.folder) for plan in planner.check(call)]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fenced = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "```" not in prose and "~~~" not in prose, f"{page}: a block that is not at the beginning of its lines"
    return [*fenced, Block("", "\n".join(" ".join(span.split()) for span in INLINE.findall(prose)))]


def calls(text: str, folder: Path, job: int = 0) -> list[list[str]]:
    """The programs that bash calls for a text, with their arguments; those of its recipe in the place of make.

    AssertionError if bash cannot, or a program is not known here.
    """
    stubs, noted = folder / "stubs", folder / "calls"
    for path in (stubs, folder / ".venv/bin"):
        if not path.exists():
            path.mkdir(parents=True)
            for name, script in STUBS.items():
                (path / name).write_text(script)
                (path / name).chmod(0o755)
            (path / "activate").touch()
    noted.write_text("")
    environment = {"PATH": str(stubs), "CALLS": str(noted), "SLURM_ARRAY_TASK_ID": str(job), "SLURM_JOB_ID": "7"}
    done = subprocess.run([BASH, "-e", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, f"{text}\n{done.stderr}"
    noted_calls = [line.split("\037")[:-1] for line in noted.read_text().splitlines()]
    return [
        inner for call in noted_calls for inner in (calls(recipe(call[1:]), folder) if call[0] == "make" else [call])
    ]


def is_published(flags: Sequence[str]) -> bool:
    """Whether a published model is meant, by its name or as `checkpoints/ORG/NAME/model.pth`."""
    return any(name in flag for name in PRESETS for flag in flags)


def is_built_in(words: Sequence[str]) -> bool:
    """Whether a command needs nothing but the built-in model and what it writes itself."""
    return not is_published(words) and not set(words) & set(MADE_UP)


def started(words: Sequence[str]) -> tuple[str, list[str], int, int] | None:
    """The program of ours that a command starts, its flags, on how many machines, and in how many processes on each."""
    launcher, *rest = words
    if SERVER in rest:  # whose flags are those of a subcommand
        return "foretoken.py", ["serve", *_given(rest[rest.index(SERVER) + 1 :])], 1, 1
    if launcher == "torchrun":
        job = get_args_parser().parse_args(rest)
        program, flags, n_nodes, n_local = job.training_script, job.training_script_args, job.nnodes, job.nproc_per_node
        return program, _given(flags), int(n_nodes.partition(":")[0]), int(n_local)
    if launcher in ("pip", "mkdir"):
        return None
    assert launcher == "python", words
    if rest[0] == "-m" and f"python -m {rest[1]}" != COST_MODEL:
        assert importlib.util.find_spec(rest[1]), words
        return None
    program, flags = (COST_MODEL, rest[2:]) if rest[0] == "-m" else (rest[0], rest[1:])
    return None if program == "-c" else (program, _given(flags), 1, 1)


def _given(flags: Sequence[str]) -> list[str]:
    return [flag for flag in flags if flag not in MADE_UP]


class Reached(BaseException):
    """A program has come as far as it is followed: to a plan, to cells, or to its flags' values. No handler of errors
    catches it.
    """

    def __init__(self, what: Plan | Sequence[Cell] | dict[str, Any]) -> None:
        self.what = what


def _reach(what: Any, *args: Any, **kwargs: Any) -> None:
    raise Reached(what)


@dataclass
class Planner:
    """Follows commands to their plans, on machines that are made up: GPUs of 80 GB, or a CPU.

    folder: where they run. It gets an empty checkpoint of every published shape, and of the built-in model.
    n_gpus: of each machine; None for one a process.
    """

    folder: Path
    n_gpus: int | None = None
    gpu_bytes: int = 78 * 2**30  # what is free of 80 GB
    cpu_bytes: int = 5 * 10**9  # README.md, "Two commands"
    checked: set[tuple[str, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        shapes = PRESETS | dict.fromkeys(BUILT_IN, PRESETS[f"HuggingFaceTB/{DEFAULT_NAME}"])
        for name, shape in shapes.items():
            checkpoint = self.folder / "checkpoints" / name
            checkpoint.mkdir(parents=True)
            (checkpoint / "config.json").write_text(json.dumps(shape))
            zipfile.ZipFile(checkpoint / "model.pth", "w").close()
        (self.folder / "reproduce").symlink_to(ROOT / "reproduce")

    def check(self, words: Sequence[str]) -> list[Plan]:
        """The plans of a command, and of all that it starts. AssertionError if it cannot run as it is."""
        if tuple(words) in self.checked:
            return []
        self.checked.add(tuple(words))
        if words[0] == "pip":
            assert words[1:3] == ["install", "-r"] and (ROOT / words[3]).is_file(), words
        job = started(words)
        match self.follow(*job) if job else ():
            case Plan() as plan:
                return [plan]
            case dict():
                return []
            case cells:
                return [plan for cell in cells for plan in self.check(["python", *cell.argv()])]

    def follow(
        self, program: str, flags: Sequence[str], n_nodes: int = 1, n_local: int = 1
    ) -> Plan | Sequence[Cell] | dict[str, Any]:
        """A published model runs on GPUs, where there are any; the built-in one on a CPU."""
        n_gpus = (n_local if self.n_gpus is None else self.n_gpus) if is_published(flags) else 0
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": n_nodes * n_local, "LOCAL_WORLD_SIZE": n_local}
        n_bytes = self.gpu_bytes if n_gpus else self.cpu_bytes // n_local
        replaced = {
            "bench.memory.available_bytes": lambda device: n_bytes,
            "bench.session._join_ranks": _reach,
            "reproduce.sweep.run_cells": _reach,
            "reproduce.sweeping.runner.run_cells": _reach,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ranks.items():
                patch.setenv(name, str(value))
            patch.chdir(self.folder)
            use_built_in(self.folder / "checkpoints" / DEFAULT_NAME, patch)
            for name, value in (replaced | ({"common.cli.run": _only_read} if program in UNPLANNED else {})).items():
                patch.setattr(name, value)
            try:
                ended = run(program, flags, n_gpus)
            except Reached as reached:
                return reached.what
        assert ended.code == 0, f"{program} {' '.join(flags)}\n{ended.err}"
        needs_none = {"--list", "--machine"} & {*flags}
        assert needs_none, f"{program} {' '.join(flags)} has no plan, and is not among those that need none"
        return ()


def use_built_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The checkpoint in that folder is the built-in one, and the default of every --model."""

    def find(path: str, *how: Any) -> ModelSource:
        return find_model(str(folder / "model.pth") if path == DEFAULT_MODEL else path, *how)

    patch.setattr("models.checkpoints.model_source.DEFAULT_CHECKPOINT", folder)
    patch.setattr("models.checkpoints.model_source.find_model", find)


def _only_read(main: object, kind: type, *end: object) -> None:
    exit_on_user_error(lambda: _reach(_flat(cli.read(kind))))


def fields_read(program: str, flags: Sequence[str]) -> dict[str, Any]:
    """What a program reads of its flags, by the names of its configuration's fields, however deep they lie."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Reached) as reached:
        patch.setattr("common.cli.run", _only_read)
        ended = run(program, flags)
        raise AssertionError(f"{program} {' '.join(flags)}\n{ended.err}")
    return reached.value.what


def _flat(config: Any) -> dict[str, Any]:
    own = {one.name: getattr(config, one.name) for one in fields(config)}
    return own | {name: value for part in own.values() if is_dataclass(part) for name, value in _flat(part).items()}


def recipe(targets: Sequence[str]) -> str:
    """The commands of make's targets, but for those that install."""
    installed = [word for name in (".installed", ".installed-dev") for word in ("-o", f".venv/{name}")]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", *installed, *targets]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
