"""The steps of reproduce/gpu.py at full sizes, as far as a machine without a GPU can tell."""

import importlib
import inspect

import pytest
import torch

from bench.memory import GIB, require_room
from bench.session import Session
from common import cli
from reproduce.gpu_parts import rounds
from reproduce.gpu_parts.steps import DUMMY, SMALL, STEPS
from serving.serve import Serve

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
