"""reproduce/gpu.py: a quick run on the CPU; steps that fail, crash, hang or are skipped; the sizes of full runs."""

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.memory import GIB, require_room
from bench.session import Session
from common import cli
from reproduce import gpu
from reproduce.gpu_parts import checks, rounds
from reproduce.gpu_parts.child import Skip, verdict
from reproduce.gpu_parts.steps import DUMMY, SMALL, STEPS, Step
from serving.serve import Serve
from tests.support.programs import python, run


def read(output: Path) -> dict[str, dict]:
    return {line["cell"]: line for line in map(json.loads, output.read_text().splitlines())}


# Steps of most functions, and steps that need a GPU.
STEPS_TO_RUN = ("gpu", "versions", "launcher", "product", "attention torch", "attention flash")
STEPS_TO_RUN += ("autos", "bandwidth torch", "bandwidth flash", "linears", "noise")


def test_a_quick_run_goes_from_beginning_to_end(tmp_path):
    output = tmp_path / "gpu.jsonl"
    ended = python("-m", "reproduce.gpu", "--device", "cpu", "--quick", "--output", output, "--steps", *STEPS_TO_RUN)
    records = read(output)
    assert ended.code == 0, ended.out + ended.err
    assert {*records} == {*STEPS_TO_RUN}
    skipped = {name for name, record in records.items() if record["status"] == "skipped"}
    assert {"attention flash", "bandwidth flash"} <= skipped <= {"attention flash", "bandwidth flash", "gpu"}
    for step in (step for step in STEPS if step.name in records and step.name not in skipped):
        record = records[step.name]
        assert record["status"] == "done" and record["quick"] and record["torch_version"]
        assert all(name.endswith("_256") for name in {*step.shows} - {*record})  # a size of full runs
    assert ended.out == (tmp_path / "gpu.jsonl.md").read_text() + "\n"


def good(device: str) -> dict:
    return {"ms": 2.0}


def wrong(device: str) -> dict:
    return verdict(False, worst=0.5)


def broken(device: str) -> dict:
    raise ValueError("a shape was wrong")


def crash(device: str) -> dict:
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(device: str) -> dict:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(60)
    return {}


def skipped(device: str) -> dict:
    raise Skip("no sense here")


def of(*runs, **more) -> list[Step]:
    return [Step(run.__name__, f"checks.{run.__name__}", needs=(), **more) for run in runs]


@pytest.fixture
def main(monkeypatch, tmp_path, capsys):
    """Function that runs steps and returns their records and the page."""
    for function in (good, wrong, broken, crash, hang, skipped):
        monkeypatch.setattr(checks, function.__name__, function, raising=False)

    def run_steps(*steps: Step, code: int = 1, **flags) -> tuple[dict[str, dict], str]:
        monkeypatch.setattr(gpu, "STEPS", steps)
        names, output = tuple(step.name for step in steps), str(tmp_path / "gpu.jsonl")
        try:
            gpu.main(gpu.Flags(steps=names, device="cpu", quick=True, output=output, **flags))
            assert not code
        except SystemExit as ending:
            assert ending.code == code
        return read(tmp_path / "gpu.jsonl"), capsys.readouterr().out

    return run_steps


def test_failures_are_recorded_and_the_other_steps_run(main):
    hung = of(hang, seconds=1.0)
    records, page = main(*of(wrong, broken, crash, skipped), *hung, *of(good, shows={"ms": 1.0}))
    bad = dict.fromkeys(("broken", "crash"), "error") | {"wrong": "failed", "hang": "timed out"}
    ends = bad | {"skipped": "skipped", "good": "done"}
    assert {name: record["status"] for name, record in records.items()} == ends
    assert records["broken"]["error"] == "ValueError: a shape was wrong"
    assert "exit code -9" in records["crash"]["error"] and "the last words" in records["crash"]["error"]
    assert records["skipped"]["reason"] == "no sense here" and records["hang"]["seconds"] < 5
    assert records["good"]["above_estimate"] == [["ms", 2.0, 1.0]]
    failures = page.partition("## What failed")[2].partition("##")[0]
    assert all(f"**{name}**" in failures for name in ("wrong", "broken", "crash", "hang")) and "good" not in failures


def test_steps_that_need_a_failed_one_are_skipped_with_a_reason(main):
    steps = [Step("first", "checks.wrong", needs=()), Step("second", "checks.good", needs=("first",))]
    steps += [Step("third", "checks.good", needs=("second",)), Step("fourth", "checks.good", needs=())]
    steps += [Step(f"after {name}", "checks.good", needs=(), after=name) for name in ("first", "fourth")]
    records, _ = main(*steps)
    ends = ["failed", "skipped", "skipped", "done", "done", "skipped"]
    assert [record["status"] for record in records.values()] == ends
    assert [records[name]["reason"] for name in ("second", "third")] == ["first: failed", "second: skipped"]


def test_no_step_begins_after_the_time_limit(main):
    records, _ = main(*of(good), time_limit=0.0, code=0)
    assert records["good"]["reason"] == "the time limit was reached"


@pytest.mark.parametrize("flags", [[], ["--device", "cpu"], ["--steps", "nothing"]])
def test_a_machine_without_a_gpu_is_refused(flags):
    refusal = run("reproduce/gpu.py", flags).refusal
    assert ("nothing" if "nothing" in flags else "--device cpu --quick") in refusal


WORDS = {step.name: step.given["words"] for step in STEPS if step.run in ("rounds.measure", "checks.ranks")}


def test_every_function_takes_the_arguments_of_its_step():
    names = [step.name for step in STEPS]
    assert len({*names}) == len(names)
    for place, step in enumerate(STEPS):
        module, _, name = step.run.partition(".")
        function = getattr(importlib.import_module(f"reproduce.gpu_parts.{module}"), name)
        for given in (step.given, step.given | step.quick):
            inspect.signature(function).bind("cuda", **given)
        assert {*step.needs, *filter(None, [step.after])} <= {*names[:place]}
    server = next(step.given["flags"] for step in STEPS if step.name == "server")
    assert cli.read(Serve, server.split(), "python -m serving").batch.max_batch == 64


class Planned(Exception):
    """A session was planned."""


@pytest.mark.parametrize("name", WORDS)
def test_on_one_card_of_78_gib_the_rows_that_fit_decode(monkeypatch, name):
    plans = []

    def never_opened(plan):
        require_room(plan)
        plans.append(plan)
        raise Planned

    monkeypatch.setattr(Session, "of_plan", never_opened)
    monkeypatch.setattr("bench.memory.available_bytes", lambda device: 78 * GIB)
    monkeypatch.setattr("bench.plan.resolve_device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    words = WORDS[name] if DUMMY in WORDS[name] else f"{SMALL} {WORDS[name]}"
    with pytest.raises(Planned):
        rounds.open_fitting(f"{words} --device cuda")
    wanted = plans[0].config.sizes.B
    assert 0.6 * wanted <= plans[0].n_rows <= wanted and (plans[0].n_rows == wanted or name.startswith("costs"))
