"""The first hour on a GPU in one command of twenty minutes: faults, times above their estimates, and the main numbers.

    python -m reproduce.gpu --output reproduction/gpu.jsonl

Every step runs in a separate process with a deadline, and is appended as it ends. Steps that an earlier failure makes
pointless are skipped. Messages of a step go to `<output>.logs/`. A page that lists faults and numbers is printed, and
written to `<output>.md`. Exit code 1 if a step failed.
"""

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench.config import Output
from common import cli
from common.errors import ConfigError, flag
from common.jsonl import append_record, require_appendable
from common.tables import Column, markdown
from reproduce.gpu_parts.child import DONE, ERROR, FAILED, SKIPPED, TIMED_OUT, start
from reproduce.gpu_parts.steps import STEPS, Step
from reproduce.helpers.records import Record

BAD, NAMES = (FAILED, ERROR, TIMED_OUT), tuple(step.name for step in STEPS)
Name: Any = Literal[NAMES]


@dataclass(frozen=True)
class Flags(Output):
    steps: tuple[Name, ...] = NAMES  # steps to run
    device: str = "cuda"  # cuda, or with --quick also cpu
    quick: bool = False  # small sizes, to see that everything runs
    time_limit: float = 1200  # seconds after which steps are skipped

    def check(self) -> None:
        """Raise ConfigError without a GPU, unless it is a quick run on the CPU."""
        if not (torch.cuda.is_available() if self.device.startswith("cuda") else self.device == "cpu" and self.quick):
            required, fix = "a CUDA device that PyTorch sees", "--device cpu --quick shows that all steps run"
            raise ConfigError("the measurements need a GPU", flag("device"), self.device, required, fix)
        require_appendable(self.output)


def groups_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the steps in groups that run at the same time."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and step.beside:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def run_steps(steps: Sequence[Step], flags: Flags, logs: Path) -> Iterator[tuple[Step, Record]]:
    """Run the groups of steps in order, and yield each step with its record as it ends."""
    end, ends = time.monotonic() + flags.time_limit, dict[str, Record]()
    for group in groups_of(steps):
        running = []
        try:
            for step in group:
                left = end - time.monotonic()
                if reason := "the time limit was reached" if left <= 0 else reason_to_skip(step, ends):
                    ends[step.name] = {"status": SKIPPED, "seconds": 0.0, "reason": reason}
                    yield step, ends[step.name]
                else:
                    log = logs / f"{step.name.replace(' ', '_')}.log"
                    running.append(start(step, flags.device, flags.quick, log, min(step.seconds, left)))
            while running:
                ends[running[0].step.name] = running[0].end()
                step = running.pop(0).step
                yield step, ends[step.name]
        finally:
            for process in running:
                process.kill()


def reason_to_skip(step: Step, ends: dict[str, Record]) -> str | None:
    """Return why a step is pointless after the steps that have ended; None if it is not."""
    for need in step.needs:
        if need in ends and ends[need]["status"] != DONE:
            return f"{need}: {ends[need]['status']}"
    if step.after and ends.get(step.after, {}).get("status") not in BAD:
        return f"only where {step.after} fails"
    return None


def main_numbers(step: Step, record: Record) -> Record:
    """Return a step's main numbers, and those that are above their estimates."""
    numbers = {name: record[name] for name in step.shows if record.get(name) not in (None, [])}
    limits = {name: most for name, most in step.shows.items() if most is not None and name in numbers}
    above = [(name, numbers[name], most) for name, most in limits.items() if numbers[name] > most]
    return {"numbers": numbers, "above_estimate": above}


def numbers_text(record: Record) -> str:
    values = {key: f"{x:.4g}" if isinstance(x, float) else str(x) for key, x in record["numbers"].items()}
    return ", ".join(f"{key} {text}" for key, text in values.items())


def page(records: Sequence[Record]) -> str:
    """Return a page that lists what failed, what is slow, and the main numbers, in Markdown."""
    failed, slow, skipped = list[str](), list[str](), list[str]()
    for record in records:
        name, status = record["cell"], record["status"]
        if status in BAD:
            why = record.get("error") or numbers_text(record) or "see its log"
            failed.append(f"**{name}**, {status}: {' '.join(why.split())[:400]}")
        if not record["quick"]:
            slow += [f"**{name}**: {key} {value:.3g}, not {most}" for key, value, most in record["above_estimate"]]
        if status == SKIPPED:
            skipped.append(f"{name}: {record['reason']}")
    text, sections = "# What to look at\n\n", {"failed": failed, "is above its estimate": slow, "was skipped": skipped}
    for title, lines in sections.items():
        text += f"## What {title}\n\n" + ("".join(f"- {line}\n" for line in lines) or "Nothing.\n") + "\n"
    quick = "A quick run: the numbers mean nothing.\n\n" * any(record["quick"] for record in records)
    columns = [Column("cell", "step", align="<"), Column("status", "outcome", align="<"), Column("seconds", "s", ".0f")]
    table = markdown(records, [*columns, Column(numbers_text, "numbers", align="<")])
    return f"{text}## The numbers\n\n{quick}{table}\n"


def main(flags: Flags) -> None:
    flags.check()
    records, steps = list[Record](), [step for step in STEPS if step.name in flags.steps]
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.abspath(flags.output or f"{folder}/gpu.jsonl")
        (logs := Path(f"{output}.logs")).mkdir(exist_ok=True)
        for module in {step.run.partition(".")[0] for step in steps if flags.device == "cpu"}:
            importlib.import_module(f"reproduce.gpu_parts.{module}")  # so that forks need not
        try:
            with closing(run_steps(steps, flags, logs)) as ends:
                for step, record in ends:
                    named = {"benchmark": f"gpu_{step.name.split()[0]}", "cell": step.name, "quick": flags.quick}
                    records.append(record | named | main_numbers(step, record))
                    append_record(output, records[-1])
                    text = f"{record['status']:>9} in {record['seconds']:5.1f} s: {step.name}"
                    print(text, file=sys.stderr, flush=True)
        finally:
            Path(f"{output}.md").write_text(text := page(records), encoding="utf-8")
            print(text, flush=True)
    if any(record["status"] in BAD for record in records):
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
