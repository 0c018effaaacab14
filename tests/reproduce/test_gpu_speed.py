"""The GPU scripts: small sizes run on the CPU, failed steps leave the others, and what is planned fits and exists."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from bench.memory import GIB, require_room
from bench.session import Session
from common.checkout import ROOT
from reproduce import gpu_calls, gpu_speed
from tests.support.programs import run

SMALL = "--load_format dummy --model_name JackFram/llama-68m --B 2 --prefix_len 40 --gen_len 8 --draft_budget 24"
SAMPLED = f"{SMALL} --benchmark --temperature 0.6 --verification coupled"
QUICK = {
    "torch": {"measure": "attention", "backend": "torch", "shapes": [[9, 3, 64, 2, 200]]},
    "failing": {"measure": "linears", "shapes": [[0]], "rows": [16]},
    "noise": {"measure": "noise", "rows": 2, "tokens": 4, "n_ids": 501},
    "rounds": {"measure": "rounds", "words": SAMPLED},
    "auto": {"measure": "rounds", "words": f"{SAMPLED} --gamma auto"},
}


def test_small_sizes_run_on_the_cpu(tmp_path, monkeypatch):
    """A cell that fails is recorded, and leaves the others."""
    monkeypatch.setattr(gpu_speed, "ROUNDS", "")
    cells, output = {name: gpu_speed.cell_of(**table) for name, table in QUICK.items()}, tmp_path / "gpu.jsonl"
    assert gpu_speed.measure(cells, "cpu", str(output)) == 1
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


@pytest.mark.parametrize("name", [name for name, table in gpu_speed.FILE["cells"].items() if "words" in table])
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
    words += " --load_format dummy --model_name HuggingFaceTB/SmolLM2-135M-Instruct" * name.startswith("book")
    with pytest.raises(Planned):
        gpu_speed.open_fitting(f"{words} --device cuda")
    wanted = plans[0].config.sizes.B
    assert 0.3 * wanted <= plans[0].n_rows <= wanted and (plans[0].n_rows == wanted or name.startswith("8B"))


def test_a_step_that_fails_or_takes_too_long_leaves_the_others(tmp_path: Path) -> None:
    commands = {"fails": "echo why; exit 3", "hangs": "echo begun; sleep 60 & sleep 60", "writes": "echo x > $OUT/made"}
    steps = [{"name": name, "seconds": 2, "command": command} for name, command in commands.items()]
    assert gpu_calls.run_steps(steps, tmp_path / "new") == 2
    records = [json.loads(line) for line in (tmp_path / "new" / "steps.jsonl").read_text().splitlines()]
    assert [(record["name"], record["code"], record["tail"]) for record in records] == [
        ("fails", 3, "why\n"),
        ("hangs", None, "begun\n"),
        ("writes", 0, ""),
    ]
    assert records[1]["took"] < 20 and (tmp_path / "new" / "made").read_text() == "x\n"
    assert (tmp_path / "new" / "hangs.txt").read_text() == "begun\n"


@pytest.mark.parametrize(("call", "seconds"), [("a", 330), ("b", 300)])
def test_planned_steps_fit_and_name_what_exists(call: str, seconds: int) -> None:
    steps = gpu_calls.PLAN[call]
    assert sum(step["seconds"] for step in steps) <= seconds
    for step in steps:
        words = shlex.split(step["command"])
        assert all((ROOT / word).exists() for word in words if re.search(r"/\w+\.py$", word.rstrip(";")))
        if "reproduce.gpu_speed" in words:
            first = words.index("--cells") + 1
            cells = [word for word in words[first:] if not word.startswith(("--", "$"))]
            assert cells and {*cells} <= {*gpu_speed.CELLS}


def test_a_call_has_to_be_named_and_needs_a_gpu() -> None:
    assert "--call a" in run("reproduce/gpu_calls.py", []).refusal
    assert "CUDA" in run("reproduce/gpu_calls.py", ["--call", "a"]).refusal
