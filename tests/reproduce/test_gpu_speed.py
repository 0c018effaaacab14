"""gpu_speed.py: small sizes run on the CPU, a failed cell leaves the others, and full sizes fit on a card."""

import json

import pytest
import torch

from bench.memory import GIB, require_room
from bench.session import Session
from reproduce import gpu_speed
from tests.support.programs import run

ROUNDS = gpu_speed.FILE["rounds"]["words"]


def test_small_sizes_run_on_the_cpu(tmp_path, monkeypatch):
    """A cell that fails is recorded; the exit code says so."""
    monkeypatch.setitem(gpu_speed.QUICK_CELLS, "linears", lambda device: 1 / 0)
    output = tmp_path / "gpu.jsonl"
    with pytest.raises(SystemExit):
        gpu_speed.main(gpu_speed.Flags(str(output), quick=True))
    records = {line["cell"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert list(records) == list(gpu_speed.QUICK_CELLS)
    failed = records.pop("linears")
    assert failed["status"] == "error" and "ZeroDivisionError" in failed["error"]
    for name, record in records.items():
        assert record["status"] == "done" and record["quick"] and record["torch_version"]
        if name in ROUNDS:
            assert record["identical_sequences"] == record["sequences"] == 2 and record["kernel_ms"] > 0
            assert len(record["largest"]) == 10 and min(record["baseline_step_ms"], record["verify_step_ms"]) > 0


def test_layers_are_timed_in_each_storage():
    assert {*gpu_speed.linears("cpu", [(128, 64)], (16,))} == {"plain_ms_16", "int8_ms_16", "int4_ms_16"}


def test_a_machine_without_a_gpu_is_refused():
    assert "--quick" in run("reproduce/gpu_speed.py", []).refusal
    assert "nothing" in run("reproduce/gpu_speed.py", ["--cells", "nothing"]).refusal


class Planned(Exception):
    """A session was planned."""


@pytest.mark.parametrize("name", ROUNDS)
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
    words = gpu_speed.CELLS[name].keywords["words"]
    words += f" --load_format dummy --model_name {gpu_speed.SHAPES['SMALL']}" * name.startswith("book")
    with pytest.raises(Planned):
        gpu_speed.open_fitting(f"{words} --device cuda")
    wanted = plans[0].config.sizes.B
    assert 0.3 * wanted <= plans[0].n_rows <= wanted and (plans[0].n_rows == wanted or name.startswith("8B"))
