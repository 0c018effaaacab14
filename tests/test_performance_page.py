"""docs/performance.md: only numbers that are in a record, and "not measured" for all others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from published_runs import ORIGIN, gpu_costs, write

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


def bandwidth(backend: str, share: float, **other: Any) -> dict[str, Any]:
    cell = {"benchmark": "gpu_attention_bandwidth", "status": "done", "backend": backend, "cell": backend}
    cell |= {"model": "M", "B": 4, "S": 8000, "T": 2, "kv_dtype": "int8", "kv_bytes": 3 * 10**8, "is_large": True}
    return cell | {"share_of_copy": share} | other


def test_without_records_everything_is_said_to_be_missing(tmp_path):
    text = page(tmp_path)
    titles = re.findall("^## (.*)$", text, re.MULTILINE)
    assert len(titles) == 11 and all(NONE in section(text, title) for title in titles)
    assert not [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("damage", [b'{"benchmark": gpu}', b"[]", b"\x00", b"\xff{}"])
def test_a_damaged_line_is_named(tmp_path, damage):
    cell = json.dumps(MACHINE | bandwidth("triton", 0.91)).encode()
    (tmp_path / GPU).write_bytes(b"\n".join([cell, b"", damage, cell, b""]))
    with pytest.raises(DataError, match=r"gpu\.jsonl, line 3\n"):
        page(tmp_path)


COPY = {"benchmark": "gpu_copy_bandwidth", "cell": "copy", "bytes_per_second": 4.31e12}
SELFSPEC = {"benchmark": "gpu_selfspec", "cell": "c", "status": "done", "B": 64, "prefix_len": 7500, "gamma": 3}
SELFSPEC |= {"draft_budget": 512, "draft_weights": "int4", "verification": "coupled", "temperature": 0.6}
SELFSPEC |= {"speedup": 1.874, "baseline_step_ms": 9.87, "round_ms": 15.31, "draft_step_ms": None}
WRONG = {"benchmark": "gpu_attention_error", "cell": "ring", "status": "failed", "worst_error": 0.5, "tolerance": 0.016}
GAPS = {"benchmark": "gpu_launch_gaps", "cell": "x", "status": "done", "model": "M", "B": 64, "prefix_len": 7500}
GAPS |= {"gamma": 3, "round_ms": 10.5, "kernel_ms_per_round": 9.25, "gap_percent": 11.9}
GAPS |= {"largest": [{"kernel": "a|kernel", "ms_per_round": 3.25}]}


@pytest.mark.parametrize(
    "title,row,records",
    [
        ("Attention bandwidth on a GPU", "| M | 4 | 8000 | 2 | int8 | 300 * | fa | 91% |", [bandwidth("fa", 0.913)]),
        ("Attention bandwidth on a GPU", "(4.31 TB/s)", [COPY]),
        (
            "End to end on a GPU",
            f"| 7500 | 64 | coupled | 0.6 | 3 | 512 | int4 | 1.87 | {NONE} | 9.87 | {NONE} | {NONE} | 15.31 |",
            [SELFSPEC],
        ),
        (
            "Costs of 8B and 7B shapes on a GPU",
            f"| 20.00 | 88% | {NONE} | 26.00 | 40.00 |",
            [gpu_costs(baseline_share_of_copy=0.876, draft_step_ms=None)],
        ),
        ("Correctness on a GPU", "| ring | FAILED | 0.5 | 0.016 |", [WRONG]),
        ("Launch gaps on a GPU", r"| 10.50 | 9.25 | 11.9% | `a\|kernel` | 3.25 |", [GAPS]),
    ],
)
def test_a_row_of_each_table_without_records_yet(tmp_path, title, row, records):
    """Those that have some are in `test_generated_page.py`."""
    text = section(page_of(tmp_path, *records), title)
    assert row in text and (records == [COPY] or "`0123456789ab`; NVIDIA X" in text)


def test_the_last_record_of_a_cell_counts_and_quick_or_broken_ones_do_not(tmp_path):
    cells = [bandwidth("triton", share) for share in (0.11, 0.88)]
    cells += [bandwidth("triton", 0.99, quick=True), bandwidth("triton", 0.77, status="skipped")]
    broken = {"benchmark": "gpu_attention_bandwidth", "cell": "flash", "status": "error", "error": "broken"}
    text = page_of(tmp_path, *cells, broken)
    assert "88%" in text and not [share for share in ("11%", "99%", "77%", "broken") if share in text]


def test_of_kernels_the_last_report_counts(tmp_path):
    report = {"benchmark": "kernel_report", "variants": 3, "max_registers": 104, "problems": ["one spills"]}
    reports = [report | {"variants": 4}, report | {"max_shared_bytes": {"sm_80": 4096, "sm_90": 8192}}]
    write(tmp_path / "kernel_report.jsonl", *(MACHINE | one for one in reports))
    text = page(tmp_path)
    assert "| 3 | 104 | 4096 on sm_80 and 8192 on sm_90 | 1 |" in text and "| 4 |" not in text
