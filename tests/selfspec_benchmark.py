"""Self-speculation: the target drafts over a small KV cache and verifies over the full one.

Other drafters that need no second model run here too (--draft).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # isort: split

from bench.config import SelfSpecFlags
from bench.passes import run_passes
from bench.session import Session
from bench.table import finish
from engine.parallel import end_on_ranks


def main(flags: SelfSpecFlags) -> None:
    session = Session.open(flags.config())
    finish("selfspec", session, run_passes(session))


if __name__ == "__main__":
    cli.run(main, SelfSpecFlags, end_on_ranks)
