"""What ranks do that `rank_jobs.forked` starts: benchmarks, sessions of ranks that were started unlike, a failure."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from bench import agreement
from bench.config import BaselineFlags, LongSpecFlags, SelfSpecFlags
from bench.session import Session
from common import cli
from common.errors import UserError
from common.process import rank
from common.provenance import package_version
from serving.scheduler import open_session
from serving.serve import Serve
from tests import baseline_benchmark, longspec_benchmark, selfspec_benchmark

FLAGS = {"baseline": BaselineFlags, "longspec": LongSpecFlags, "selfspec": SelfSpecFlags, "serving": Serve}
MAIN = {"baseline": baseline_benchmark.main, "longspec": longspec_benchmark.main, "selfspec": selfspec_benchmark.main}


def run_benchmarks(commands: Sequence[Sequence[str]]) -> None:
    """Run benchmarks one after another: a name and flags each."""
    for name, *flags in commands:
        MAIN[name](cli.read(FLAGS[name], flags))


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
