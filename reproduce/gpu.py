"""Everything that a GPU has to show, in one command: correctness, bandwidth, speculation, costs, launch gaps.

    python reproduce/gpu.py --output reproduce/results/gpu.jsonl

Parts: (a) every attention backend against float64, random numbers, quantised layers, what a prompt's chunk attends
in, replayed rounds; (b) how fast backends read a KV cache, and linear layers their weights; (c) speculation beside
plain decoding on the default model and book; (d) costs of 8B and 7B shapes with random weights; (e) what of a round
is no kernel. Rows that do not fit into memory are left out, and the record says so. Every finished cell is appended
at once, one that breaks as a record of its error. Each part runs in a process of its own, which is started again
behind a cell that broke the device; what it says goes to `<output>.logs/`. Exit code 1 if a check failed or a cell
broke.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import torch
from engine.bench.arguments import Parser

from common.errors import ConfigError, UserError
from common.exit import exit_on_user_error
from common.jsonl import append_or_put_off, require_appendable
from reproduce.gpu_parts.cells import DONE, SKIPPED, Options
from reproduce.gpu_parts.supervisor import run_parts
from reproduce.gpu_parts.worker import PARTS
from reproduce.sweeping.runner import make_logs


def resolve_options(device: str, quick: bool) -> Options:
    """Errors: ConfigError on a machine without a GPU, unless a quick run on the CPU is asked for."""
    if torch.cuda.is_available() if device.startswith("cuda") else device == "cpu" and quick:
        return Options(device, quick)
    raise ConfigError(
        "the measurements need a GPU",
        where="reproduce/gpu.py: --device",
        seen=f"{device}{' --quick' if quick else ''}, "
        f"{'a' if torch.cuda.is_available() else 'no'} CUDA device that PyTorch {torch.__version__} sees",
        required="a CUDA device, or --device cpu --quick",
        fix="run it on a machine with a GPU and a CUDA build of PyTorch; --device cpu --quick shows that it runs",
    )


def measure(parts: Sequence[str], options: Options, time_limit: float, output: str | None) -> bool:
    """Run the parts, append and print each record as it comes; whether every check held and nothing broke."""
    run, started, lock, put_off = f"{time.time():.0f}-{os.getpid()}", time.time(), threading.Lock(), list[UserError]()
    ends = Counter[str]()

    def keep(record: dict) -> None:
        with lock:
            append_or_put_off(output, record | {"gpu_run": run, "quick": options.quick}, put_off)
            ends[record["status"]] += 1
            why = (record.get("error") or record.get("reason") or "").partition("\n")[0]
            print(f"{record['status']:>8}  {record['part']}  {record['cell']}  {why}".rstrip(), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run_parts(parts, options, time_limit, keep, make_logs(output or Path(folder) / "gpu"))
    counted = ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))
    print(f"{counted or 'no cells'} in {time.time() - started:.0f} s")
    if put_off:
        raise put_off[0]
    return not set(ends) - {DONE, SKIPPED}


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=sorted(PARTS), help="what to run")
    parser.add_argument("--device", default="cuda", help="cuda, or with --quick also cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--time_limit", type=float, default=570, help="seconds after which cells are skipped")
    parser.add_argument("--output", help="append the JSON records to this file")
    args: argparse.Namespace = parser.parse_args()
    options = resolve_options(args.device, args.quick)
    require_appendable(args.output)
    if args.time_limit < 0:
        what, seen = "there is no time to measure anything", args.time_limit
        raise ConfigError(what, where="--time_limit", seen=seen, required=">= 0 seconds", fix="leave it out")
    if not measure(args.parts, options, args.time_limit, args.output):
        sys.exit(1)


if __name__ == "__main__":
    exit_on_user_error(main)
