"""docs/performance.md: only numbers that are in a record, and "not measured" for all others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from published_runs import ORIGIN, write

from common.errors import DataError
from reproduce.pages.generated_page import GPU
from reproduce.paper.columns import NONE
from reproduce.performance_page import page

MACHINE = ORIGIN | {"gpu": "NVIDIA X"}


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def page_of(folder: Path, *records: dict[str, Any]) -> str:
    write(folder / GPU, *(MACHINE | record for record in records))
    return page(folder)


def step(cell: str, **other: Any) -> dict[str, Any]:
    """Of gpu.py."""
    record = {"benchmark": f"gpu_{cell.split()[0]}", "cell": cell, "status": "done", "seconds": 12.3}
    return record | {"numbers": {"round_ms": 10.51234, "B": 64}, "above_estimate": []} | other


def test_without_records_everything_is_said_to_be_missing(tmp_path):
    text = page(tmp_path)
    titles = re.findall("^## (.*)$", text, re.MULTILINE)
    assert len(titles) == 8 and all(NONE in section(text, title) for title in titles)
    assert not [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("damage", [b'{"benchmark": gpu}', b"[]", b"\x00", b"\xff{}"])
def test_a_damaged_line_is_named(tmp_path, damage):
    cell = json.dumps(MACHINE | step("noise")).encode()
    (tmp_path / GPU).write_bytes(b"\n".join([cell, b"", damage, cell, b""]))
    with pytest.raises(DataError, match=r"gpu\.jsonl, line 3\n"):
        page(tmp_path)


def test_steps_on_a_gpu_are_rows(tmp_path):
    """Those that have records are in `test_generated_page.py`."""
    text = section(page_of(tmp_path, step("costs 16k"), step("a|step", status="failed", numbers={})), "On a GPU")
    assert "| costs 16k | done | 12 | round_ms 10.51, B 64 |" in text and "`0123456789ab`; NVIDIA X" in text
    assert r"| a\|step | failed | 12 |  |" in text


def test_the_last_record_of_a_step_counts_and_quick_or_skipped_ones_do_not(tmp_path):
    steps = [step("noise", numbers={"noise_ms": ms}) for ms in (11, 88)]
    steps += [step("noise", numbers={"noise_ms": 99}, quick=True), step("noise", numbers={}, status="skipped")]
    broken = step("flash", status="error", error="broken", numbers={})
    text = section(page_of(tmp_path, *steps, broken), "On a GPU")
    assert "noise_ms 88" in text and "| flash | error | 12 |" in text
    assert not [one for one in ("noise_ms 11", "noise_ms 99", "skipped") if one in text]


def test_of_kernels_the_last_report_counts(tmp_path):
    report = {"benchmark": "kernel_report", "variants": 3, "max_registers": 104, "problems": ["one spills"]}
    reports = [report | {"variants": 4}, report | {"max_shared_bytes": {"sm_80": 4096, "sm_90": 8192}}]
    write(tmp_path / "kernel_report.jsonl", *(MACHINE | one for one in reports))
    text = page(tmp_path)
    assert "| 3 | 104 | 4096 on sm_80 and 8192 on sm_90 | 1 |" in text and "| 4 |" not in text
