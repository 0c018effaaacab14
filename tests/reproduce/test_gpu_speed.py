"""gpu_speed.py: small sizes run on the CPU, a failed cell leaves the others, and full sizes fit on a card. Steps of
gpu_calls.sh name programs, tests and cells that exist."""

import json
import re
import shlex
import subprocess

import pytest
import torch

from bench.memory import GIB, require_room
from bench.session import Session
from common.checkout import ROOT
from reproduce import gpu_speed
from tests.support.programs import run

SAMPLED = "--B 2 --prefix_len 40 --gen_len 40 --draft_budget 24 --benchmark --temperature 0.6 --verification coupled"
QUICK = {
    "torch": {"measure": "attention", "backend": "torch", "shapes": [[9, 3, 64, 2, 200]]},
    "failing": {"measure": "linears", "shapes": [[0]], "rows": [16]},
    "noise": {"measure": "noise", "rows": 2, "tokens": 4, "n_ids": 501},
    "rounds": {"measure": "rounds", "words": SAMPLED},
    "auto": {"measure": "rounds", "words": f"{SAMPLED} --gamma auto"},
}


def test_small_sizes_run_on_the_cpu(checkpoint, tmp_path, monkeypatch):
    """A cell that fails is recorded, and leaves the others."""
    monkeypatch.setattr(gpu_speed, "ROUNDS", f"--load_format dummy --model {checkpoint}")
    output = tmp_path / "gpu.jsonl"
    assert gpu_speed.measure(QUICK, "cpu", str(output)) == 1
    records = {line["cell"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert list(records) == list(QUICK)
    failed = records.pop("failing")
    assert failed["status"] == "error" and "ValueError" in failed["error"]
    for name, record in records.items():
        assert record["status"] == "done" and record["torch_version"]
        if QUICK[name]["measure"] == "rounds":
            assert record["identical_sequences"] == record["sequences"] == 2 and record["kernel_ms"] > 0
            assert len(record["largest"]) == 10 and min(record["baseline_step_ms"], record["verify_step_ms"]) > 0


def test_a_machine_without_a_gpu_is_refused():
    assert "CUDA" in run("reproduce/gpu_speed.py", []).refusal
    assert "nothing" in run("reproduce/gpu_speed.py", ["--cells", "nothing"]).refusal


class Planned(Exception):
    """A session was planned."""


@pytest.mark.parametrize("name", [name for name, table in gpu_speed.CELLS.items() if "words" in table])
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
    words = gpu_speed.CELLS[name]["words"]
    words += " --load_format dummy --model_name HuggingFaceTB/SmolLM2-135M-Instruct" * name.startswith("book")
    with pytest.raises(Planned):
        gpu_speed.open_fitting(f"{words} --device cuda")
    wanted, n_rows = plans[0].config.sizes.B, plans[0].target.n_rows
    assert 0.3 * wanted <= n_rows <= wanted and (n_rows == wanted or name.startswith("8B"))


SCRIPT = ROOT / "reproduce" / "gpu_calls.sh"


def test_planned_steps_name_what_exists() -> None:
    text = SCRIPT.read_text().replace("\\\n", " ")
    cells = [cell for line in re.findall(r"^ +speed (\d.*)", text, re.MULTILINE) for cell in shlex.split(line)[2:]]
    assert cells and {*cells} <= {*gpu_speed.CELLS}
    programs = [*re.findall(r"tests/\w\S*\.py", text), *re.findall(r"-m (reproduce\.\w+)", text)]
    assert len(programs) > 4
    assert all((ROOT / f"{name.removesuffix('.py').replace('.', '/')}.py").is_file() for name in programs)


def test_a_call_has_to_be_named(tmp_path) -> None:
    ended = subprocess.run(["bash", SCRIPT, "c", tmp_path], capture_output=True, text=True)
    assert ended.returncode == 2 and "a, b or wheels" in ended.stderr and not [*tmp_path.iterdir()]
