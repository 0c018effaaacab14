"""Everything that a GPU has to show, in one command: correctness, bandwidth, speculation, costs, launch gaps.

    python reproduce/gpu.py --output reproduce/results/gpu.jsonl

Parts: (a) every attention backend against float64, random numbers, quantised layers, what a prompt's chunk attends
in, replayed rounds; (b) how fast backends read a KV cache; (c) speculation beside
plain decoding on the default model and book; (d) costs of 8B and 7B shapes with random weights; (e) what of a round
is no kernel. Rows that do not fit into memory are left out, and the record says so. Every finished cell is appended
at once, one that breaks as a record of its error. Each part runs in a process of its own, which is started again
behind a cell that broke the device; what it says goes to `<output>.logs/`. Exit code 1 if a check failed or a cell
broke.
"""

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.errors import ConfigError, UserError, flag
from common.jsonl import append_or_put_off, require_appendable
from engine.bench.config import Output
from reproduce.gpu_parts.cells import DONE, SKIPPED, Options
from reproduce.gpu_parts.supervisor import PARTS, run_parts
from reproduce.sweeping.runner import make_logs

Part: Any = Literal[tuple(sorted(PARTS))]


@dataclass(frozen=True)
class Flags(Output):
    parts: tuple[Part, ...] = tuple(sorted(PARTS))  # what to run
    device: str = "cuda"  # cuda, or with --quick also cpu
    quick: bool = False  # small sizes, to see that everything runs
    time_limit: float = 570  # seconds after which cells are skipped

    @property
    def options(self) -> Options:
        """Errors: ConfigError on a machine without a GPU, unless a quick run on the CPU is asked for."""
        import torch

        has_gpu = torch.cuda.is_available()
        if not (has_gpu if self.device.startswith("cuda") else self.device == "cpu" and self.quick):
            required = "a CUDA device, or --device cpu --quick"
            found = f"{self.device}, {'a' if has_gpu else 'no'} CUDA device that PyTorch {torch.__version__} sees"
            fix = "run it on a machine with a GPU and a CUDA build of PyTorch; --device cpu --quick shows that it runs"
            raise ConfigError("the measurements need a GPU", flag("device"), found, required, fix)
        return Options(self.device, self.quick)


def measure(parts: Sequence[str], options: Options, time_limit: float, output: str | None) -> bool:
    """Run the parts, append and print each record as it comes; whether every check held and nothing broke."""
    started, lock, ends, put_off = time.time(), threading.Lock(), Counter[str](), list[UserError]()
    run = f"{started:.0f}-{os.getpid()}"

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


def main(flags: Flags) -> None:
    options = flags.options
    require_appendable(flags.output)
    if not measure(flags.parts, options, flags.time_limit, flags.output):
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
