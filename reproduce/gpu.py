"""The first hour on a GPU, in one command of ten minutes: what is wrong, what is slow, and the numbers that matter.

    python reproduce/gpu.py --output reproduce/results/gpu.jsonl

Every step runs in a process of its own with a deadline, and is appended as it ends; one that an earlier failure makes
pointless is skipped. What a step prints goes to `<output>.logs/`, and a page of what to look at is printed and written
to `<output>.md`. `--steps NAME ...` runs some of them. Exit code 1 if a step failed, broke or was late.
"""

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from bench.config import Output
from common import cli
from common.errors import ConfigError, flag
from common.jsonl import append_record, require_appendable
from common.tables import markdown
from reproduce.gpu_parts.child import DONE, ERROR, FAILED, SKIPPED, TIMED_OUT, Record, Running, start
from reproduce.gpu_parts.steps import STEPS, Step
from reproduce.paper.columns import COMPUTED, of
from reproduce.sweeping.runner import make_logs

BAD, NAMES = (FAILED, ERROR, TIMED_OUT), tuple(step.name for step in STEPS)
Name: Any = Literal[NAMES]


@dataclass(frozen=True)
class Flags(Output):
    steps: tuple[Name, ...] = NAMES  # what to run
    device: str = "cuda"  # cuda, or with --quick also cpu
    quick: bool = False  # small sizes, to see that everything runs
    time_limit: float = 600  # seconds after which steps are skipped

    def check(self) -> None:
        """Errors: ConfigError on a machine without a GPU, unless a quick run on the CPU is asked for."""
        import torch

        has_gpu = torch.cuda.is_available()
        if not (has_gpu if self.device.startswith("cuda") else self.device == "cpu" and self.quick):
            required = "a CUDA device, or --device cpu --quick"
            found = f"{self.device}, {'a' if has_gpu else 'no'} CUDA device that PyTorch {torch.__version__} sees"
            fix = "run it on a machine with a GPU and a CUDA build of PyTorch; --device cpu --quick shows that it runs"
            raise ConfigError("the measurements need a GPU", flag("device"), found, required, fix)
        require_appendable(self.output)


def hour(steps: Sequence[Step], flags: Flags, logs: Path) -> Iterator[tuple[Step, Record]]:
    """Run the steps in order, those that begin beside another together, and yield each with its record as it ends."""
    end, ends, going = time.monotonic() + flags.time_limit, dict[str, Record](), list[Running]()
    try:
        for step in (*steps, None):
            while going and not (step and step.beside):
                late = max(0.0, min(one.deadline for one in going) - time.monotonic())
                ended = wait([one.process.sentinel for one in going], late)
                for one in [one for one in going if one.process.sentinel in ended or time.monotonic() >= one.deadline]:
                    going.remove(one)
                    ends[one.step.name] = one.end()
                    yield one.step, ends[one.step.name]
            if step is None:
                return
            left = end - time.monotonic()
            if why := "the time limit was reached" if left <= 0 else why_not(step, ends):
                ends[step.name] = {"status": SKIPPED, "seconds": 0.0, "reason": why}
                yield step, ends[step.name]
            else:
                log = logs / f"{step.name.replace(' ', '_')}.log"
                going.append(start(step, flags.device, flags.quick, log, min(step.seconds, left)))
    finally:
        for one in going:
            one.kill()


def why_not(step: Step, ends: dict[str, Record]) -> str | None:
    """Return why a step is pointless after what has ended; None if it is not."""
    for need in step.needs:
        if need in ends and ends[need]["status"] != DONE:
            return f"{need}: {ends[need]['status']}"
    if step.after and ends.get(step.after, {}).get("status") not in BAD:
        return f"only where {step.after} fails"
    return None


def in_short(step: Step, record: Record) -> Record:
    """Return a step's numbers that matter, and the ones above their estimates."""
    numbers = {name: record[name] for name in step.shows if record.get(name) not in (None, [])}
    limits = {name: most for name, most in step.shows.items() if most is not None and name in numbers}
    above = [(name, numbers[name], most) for name, most in limits.items() if numbers[name] > most]
    return {"numbers": numbers, "above_estimate": above}


def page(records: Sequence[Record]) -> str:
    """Return the page of what to look at, in Markdown."""

    def why(one: Record) -> str:
        return " ".join((one.get("error") or COMPUTED["numbers"](one) or "see its log").split())[:400]

    above = [(one["cell"], *over) for one in records if not one["quick"] for over in one["above_estimate"]]
    sections = {
        "What failed": [f"**{one['cell']}**, {one['status']}: {why(one)}" for one in records if one["status"] in BAD],
        "What is above its estimate": [f"**{cell}**: {key} {seen:.3g}, not {most}" for cell, key, seen, most in above],
        "What was skipped": [f"{one['cell']}: {one['reason']}" for one in records if one["status"] == SKIPPED],
    }
    quick = "Of a quick run: they mean nothing.\n\n" * any(one["quick"] for one in records)
    text = "# What to look at\n\n"
    for title, lines in sections.items():
        text += f"## {title}\n\n" + ("".join(f"- {line}\n" for line in lines) or "Nothing.\n") + "\n"
    return f"{text}## The numbers\n\n{quick}{markdown(records, of('gpu'))}\n"


def main(flags: Flags) -> None:
    flags.check()
    records, steps = list[Record](), [step for step in STEPS if step.name in flags.steps]
    run = {"gpu_run": f"{time.time():.0f}-{os.getpid()}", "quick": flags.quick}
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.abspath(flags.output or f"{folder}/gpu.jsonl")
        for module in {step.run.partition(".")[0] for step in steps if flags.device == "cpu"}:
            importlib.import_module(f"reproduce.gpu_parts.{module}")  # so that forks need not
        try:
            with closing(hour(steps, flags, make_logs(output))) as ends:
                for step, record in ends:
                    named = {"benchmark": f"gpu_{step.name.split()[0]}", "cell": step.name}
                    records.append(record | named | in_short(step, record) | run)
                    append_record(output, records[-1])
                    said = f"{record['status']:>9} in {record['seconds']:5.1f} s: {step.name}"
                    print(said, file=sys.stderr, flush=True)
        finally:
            Path(f"{output}.md").write_text(text := page(records), encoding="utf-8")
            print(text, flush=True)
    if any(record["status"] in BAD for record in records):
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
