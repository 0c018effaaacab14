"""Opens sessions on ranks that were started unlike: `agreement_cases.py FILE`, a JSON list of cases.

A case is a list of a program, and for each rank its flags and the version that it takes all packages to have, if any.
Each rank writes what came of each case to `said.RANK`: an error's text, or nothing.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import agreement
from bench.benchmark_flags import LongSpecFlags, SelfSpecFlags
from bench.session import Session
from common import cli
from common.errors import UserError
from common.process import rank
from common.provenance import package_version
from engine.parallel.launch import run_on_ranks
from serving.scheduler import open_session
from serving.serve import Serve


def open_case(program: str, flags: list[str]) -> None:
    kind = {"selfspec": SelfSpecFlags, "longspec": LongSpecFlags, "serving": Serve}[program]
    run = cli.read(kind, flags)
    if isinstance(run, Serve):
        open_session(run.config(), run.batch)
    else:
        Session.open(run.config())


def main() -> None:
    said = []
    for program, by_rank in json.loads(Path(sys.argv[1]).read_text()):
        flags, version = by_rank[rank()]
        try:
            with patch.object(agreement, "package_version", lambda name: version or package_version(name)):  # noqa: B023
                open_case(program, flags)
            said.append("")
        except UserError as error:
            said.append(str(error))
    Path(f"said.{rank()}").write_text(json.dumps(said))


if __name__ == "__main__":
    run_on_ranks(main)
