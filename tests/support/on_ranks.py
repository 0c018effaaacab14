"""Programs of torchrun's processes: `on_ranks.py TASK ...`.

run FILE                      benchmarks one after another, a command a line
open FILE                     sessions of ranks that were started unlike, a JSON list of `open_cases`
SCRIPT ARGUMENTS...           a benchmark whose first prompt fails on rank 1
"""

import json
import os
import runpy
import shlex
import sys
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from bench import agreement
from bench.benchmark_flags import LongSpecFlags, SelfSpecFlags
from bench.session import Session
from common import cli
from common.errors import UserError
from common.process import rank
from common.provenance import package_version
from engine.parallel.launch import run_on_ranks
from engine.runner import ModelRunner
from serving.scheduler import open_session
from serving.serve import Serve
from tests import longspec_benchmark, selfspec_benchmark

FLAGS = {"longspec": LongSpecFlags, "selfspec": SelfSpecFlags, "serving": Serve}
MAIN = {"longspec": longspec_benchmark.main, "selfspec": selfspec_benchmark.main}
BROKEN_RANK = 1


def run_commands(path: str) -> None:
    for line in Path(path).read_text().splitlines():
        name, *flags = shlex.split(line)
        MAIN[name](cli.read(FLAGS[name], flags))


def open_cases(path: str) -> None:
    """Write to `said.RANK` what came of each case: an error's text, or nothing.

    A case is a program, its flags on each rank, and the version of all packages on the last rank, or null.
    """
    said = []
    for program, by_rank, version in json.loads(Path(path).read_text()):
        seen = version if rank() else None
        with patch.object(agreement, "package_version", lambda name: seen or package_version(name)):  # noqa: B023
            try:
                run = cli.read(FLAGS[program], shlex.split(by_rank[rank()]))
                if isinstance(run, Serve):
                    open_session(run.config(), run.batch)
                else:
                    Session.open(run.config())
                said.append("")
            except UserError as error:
                said.append(str(error))
    Path(f"said.{rank()}").write_text(json.dumps(said))


def spoil_a_prompt() -> None:
    """Make the state in the middle of the first prompt not finite."""
    run_chunk, prompts = ModelRunner.run_chunk, count(-1)  # the first forward measures memory

    def spoiled(self: ModelRunner, *args: Any) -> Tensor:
        hidden = run_chunk(self, *args)
        if next(prompts) == 0:
            hidden[5] = torch.nan
        return hidden

    ModelRunner.run_chunk = spoiled


if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] in (tasks := {"run": run_commands, "open": open_cases}):
        run_on_ranks(lambda: tasks[sys.argv[0]](sys.argv[1]))
    else:
        if int(os.environ["RANK"]) == BROKEN_RANK:
            spoil_a_prompt()
        runpy.run_path(sys.argv[0], run_name="__main__")
