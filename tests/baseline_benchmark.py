"""Plain autoregressive decoding of long prompts: the speed that speculation has to beat."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # isort: split

from bench.config import BaselineFlags
from bench.passes import run_passes
from bench.session import Session
from bench.table import finish
from engine.parallel import end_on_ranks


def main(flags: BaselineFlags) -> None:
    session = Session.open(flags.config())
    finish("baseline", session, run_passes(session))


if __name__ == "__main__":
    cli.run(main, BaselineFlags, end_on_ranks)
