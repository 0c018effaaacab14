"""The commands of the documentation: found as bash reads them, and planned by the programs that they call."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.bench.arguments import Parser
from torch.distributed.run import get_args_parser

from engine.bench.plan import Plan
from models.checkpoints.default_model import DEFAULT_NAME
from models.presets import PRESETS
from reproduce.sweeping.cells import Cell

ROOT = Path(__file__).resolve().parents[1]
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
# Programs without a plan of memory and ranks: only their flags are read.
UNPLANNED = (
    *("reproduce/plot.py", "reproduce/corruptions.py"),
    *("download.py", "convert_hf_checkpoint.py", "tests/mutants.py"),
    *("reproduce/gpu.py", "reproduce/kernel_report.py", "reproduce/two_ranks.py", "reproduce/rank_death.py"),
    *("reproduce/performance_page.py", "reproduce/published_page.py"),
)
BUILT_IN = (DEFAULT_NAME, "SmolLM2-draft")
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


class Reached(BaseException):
    """A program has come as far as it is followed, and nothing has started. No handler of errors catches it."""

    def __init__(self, plan: Plan | None = None, cells: Sequence[Cell] = ()) -> None:
        self.plan, self.cells = plan, cells


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
        program, *rest = words
        if program == "pip":
            assert rest[:2] == ["install", "-r"] and (ROOT / rest[2]).is_file(), words
            return []
        if program == "mkdir":
            return []
        if program == "torchrun":
            job = get_args_parser().parse_args(rest)
            n_nodes = int(job.nnodes.partition(":")[0])
            return self.plans(job.training_script, job.training_script_args, n_nodes, int(job.nproc_per_node))
        assert program == "python", words
        if rest[0] == "-c":
            return []
        if rest[0] != "-m":
            return self.plans(rest[0], rest[1:])
        script = f"{rest[1].replace('.', '/')}.py"
        if (ROOT / script).is_file():
            return self.plans(script, rest[2:])
        assert importlib.util.find_spec(rest[1]), words
        return []

    def plans(self, program: str, flags: Sequence[str], n_nodes: int = 1, n_local: int = 1) -> list[Plan]:
        flags = [flag for flag in flags if flag not in MADE_UP]
        reached = self.follow(program, flags, n_nodes, n_local)
        started = [plan for cell in reached.cells for plan in self.check(["python", *cell.argv()])]
        return started + ([reached.plan] if reached.plan else [])

    def follow(self, program: str, flags: Sequence[str], n_nodes: int = 1, n_local: int = 1) -> Reached:
        """A published model runs on GPUs, where there are any; the built-in one on a CPU."""
        n_gpus = (n_local if self.n_gpus is None else self.n_gpus) if is_published(flags) else 0
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": n_nodes * n_local, "LOCAL_WORLD_SIZE": n_local}
        built_in = self.folder / "checkpoints" / DEFAULT_NAME

        def reach(plan: Plan) -> None:
            raise Reached(plan)

        def reach_cells(cells: Sequence[Cell], *args: Any, **kwargs: Any) -> None:
            raise Reached(cells=cells)

        parse_args = Parser.parse_args

        def read(parser: Parser, *args: Any) -> None:
            parse_args(parser, *args)
            raise Reached

        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
            for name, value in ranks.items():
                patch.setenv(name, str(value))
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [program, *flags])
            patch.setattr(sys, "path", list(sys.path))
            patch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
            patch.setattr(torch.cuda, "device_count", lambda: n_gpus)
            patch.setattr("engine.bench.plan.check_compiler", lambda device: None)
            patch.setattr(
                "engine.bench.plan.available_bytes", lambda device: self.gpu_bytes if n_gpus else self.cpu_bytes
            )
            patch.setattr("engine.bench.arguments.DEFAULT_CHECKPOINT", built_in)
            patch.setattr("engine.bench.model_source.DEFAULT_CHECKPOINT", built_in)
            patch.setattr("engine.bench.setup._join_ranks", reach)
            patch.setattr("reproduce.paper.reproduction.DEFAULT_DRAFT", built_in.parent / "SmolLM2-draft/model.pth")
            patch.setattr("reproduce.paper.reproduction.run_cells", reach_cells)
            patch.setattr("reproduce.sweeping.runner.run_cells", reach_cells)
            if program in UNPLANNED:
                patch.setattr(Parser, "parse_args", read)
            try:
                runpy.run_path(str(ROOT / program), run_name="__main__")
            except Reached as reached:
                return reached
            except SystemExit:
                raise AssertionError(f"{program} {' '.join(flags)}\n{said.getvalue()}") from None
        assert "--list" in flags, f"{program} {' '.join(flags)} has no plan, and is not among those that need none"
        return Reached()


def recipe(targets: Sequence[str]) -> str:
    """The commands of make's targets, but for those that install."""
    installed = [word for name in (".installed", ".installed-dev") for word in ("-o", f".venv/{name}")]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", *installed, *targets]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
