"""gpu_calls.py: steps end at their deadlines, each is recorded, and the planned steps name what exists."""

import json
import re
import shlex
from pathlib import Path

import pytest

from common.checkout import ROOT
from reproduce import gpu_calls, gpu_speed
from tests.support.programs import run


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
