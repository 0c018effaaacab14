"""Everything that a GPU has to show, in one command: correctness, bandwidth, speculation, costs, launch gaps.

    python reproduce/gpu.py --output reproduce/results/gpu.jsonl

Parts: (a) backends against float64, random numbers, quantised layers, prompts' chunks, replayed rounds; (b) how fast
backends read a KV cache; (c) speculation beside plain decoding on the default model and book; (d) costs of 8B and 7B
shapes with random weights, as many rows as fit; (e) what of a round is no kernel. Every cell is appended as it ends,
one that breaks as its error, and its part goes on behind it in a new process; what that says goes to `<output>.logs/`.
Exit code 1 if a check failed or a cell broke.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from common import cli
from common.errors import ConfigError, flag
from common.jsonl import require_appendable
from engine.bench.config import Output
from reproduce.gpu_parts.cells import DONE, SKIPPED, Options
from reproduce.gpu_parts.supervisor import PARTS, records_of, run_parts
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


def main(flags: Flags) -> None:
    options, started = flags.options, time.time()
    require_appendable(flags.output)
    with tempfile.TemporaryDirectory() as folder:
        run, output = f"{started:.0f}-{os.getpid()}", os.path.abspath(flags.output or f"{folder}/gpu.jsonl")
        run_parts(flags.parts, options, flags.time_limit, run, output, make_logs(output))
        ends = Counter(record["status"] for record in records_of(output, run))
    counted = ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))
    print(f"{counted or 'no cells'} in {time.time() - started:.0f} s")
    if ends.keys() - {DONE, SKIPPED}:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
