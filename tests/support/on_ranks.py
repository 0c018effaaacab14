"""What ranks do that `rank_jobs.forked` starts: benchmarks, sessions of ranks that were started unlike, a failure."""

import json
import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench import agreement
from bench.benchmark_flags import BaselineFlags, LongSpecFlags, SelfSpecFlags
from bench.session import Session
from common import cli
from common.errors import UserError
from common.process import rank
from common.provenance import package_version
from engine.runner import ModelRunner
from serving.scheduler import open_session
from serving.serve import Serve
from tests import baseline_benchmark, longspec_benchmark, selfspec_benchmark

FLAGS = {"baseline": BaselineFlags, "longspec": LongSpecFlags, "selfspec": SelfSpecFlags, "serving": Serve}
MAIN = {
    "baseline": baseline_benchmark.main,
    "longspec": longspec_benchmark.main,
    "selfspec": selfspec_benchmark.main,
}


def run_benchmarks(commands: Sequence[Sequence[str]]) -> None:
    """Run benchmarks one after another: a name and flags each."""
    for name, *flags in commands:
        MAIN[name](cli.read(FLAGS[name], flags))


def run_with_a_bad_prompt(commands: Sequence[Sequence[str]], rank_of_prompt: int) -> None:
    """Run benchmarks; on one rank, the state in the middle of the first prompt is not finite."""
    run_chunk, prompts = ModelRunner.run_chunk, count(-1)  # the first forward measures memory

    def spoiled(self: ModelRunner, *args: Any) -> Tensor:
        hidden = run_chunk(self, *args)
        if next(prompts) == 0 and rank() == rank_of_prompt:
            hidden[5] = torch.nan
        return hidden

    with patch.object(ModelRunner, "run_chunk", spoiled):
        run_benchmarks(commands)


def open_cases(cases: Sequence[tuple[str, Sequence[str], str | None]]) -> None:
    """Write to `said.RANK` what came of each case: an error's text, or nothing.

    A case is a program, its flags on each rank, and the version of all packages on the last rank, or None.
    """
    said = []
    for program, by_rank, version in cases:
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
