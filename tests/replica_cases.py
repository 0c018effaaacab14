"""Runs benchmarks one after another in the same processes of torchrun: `replica_cases.py FILE`, a command a line."""

import shlex
import sys
from pathlib import Path

import longspec_benchmark
import selfspec_benchmark

from bench.benchmark_flags import LongSpecFlags, SelfSpecFlags
from common import cli
from engine.parallel.launch import run_on_ranks

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
