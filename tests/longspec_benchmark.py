"""A smaller model or a trained head drafts over a cache of its own, and the target verifies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # isort: split

from bench.config import LongSpecFlags
from bench.passes import run_passes
from bench.session import Session
from bench.table import finish
from engine.parallel import end_on_ranks


def main(flags: LongSpecFlags) -> None:
    session = Session.open(flags.config())
    finish("longspec", session, run_passes(session))


if __name__ == "__main__":
    cli.run(main, LongSpecFlags, end_on_ranks)
