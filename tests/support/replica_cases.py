"""Runs benchmarks one after another in the same processes of torchrun: `replica_cases.py FILE`, a command a line."""

import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.benchmark_flags import LongSpecFlags, SelfSpecFlags
from common import cli
from engine.parallel.launch import run_on_ranks
from tests import longspec_benchmark, selfspec_benchmark

PROGRAMS = {
    "longspec": (longspec_benchmark.main, LongSpecFlags),
    "selfspec": (selfspec_benchmark.main, SelfSpecFlags),
}


def main() -> None:
    for line in Path(sys.argv[1]).read_text().splitlines():
        name, *flags = shlex.split(line)
        run, kind = PROGRAMS[name]
        run(cli.read(kind, flags))


if __name__ == "__main__":
    run_on_ranks(main)
