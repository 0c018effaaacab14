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


def page_of(folder: Path, *records: dict[str, Any], file: str = GPU) -> str:
    write(folder / file, *(MACHINE | record for record in records))
    return page(folder)


def bandwidth(backend: str, share: float, **other: Any) -> dict[str, Any]:
    cell = {"benchmark": "gpu_attention_bandwidth", "status": "done", "backend": backend, "cell": backend}
    cell |= {"model": "M", "B": 4, "S": 8000, "T": 2, "kv_dtype": "int8", "kv_bytes": 3 * 10**8, "is_large": True}
    return cell | {"share_of_copy": share} | other


def test_without_records_everything_is_said_to_be_missing(tmp_path):
    text = page(tmp_path)
    titles = re.findall("^## (.*)$", text, re.MULTILINE)
    assert len(titles) == 10 and all(NONE in section(text, title) for title in titles)
    assert not [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("damage", [b'{"benchmark": gpu}', b"[]", b"\x00", b"\xff{}"])
def test_a_damaged_line_is_named(tmp_path, damage):
    cell = json.dumps(MACHINE | bandwidth("triton", 0.91)).encode()
    (tmp_path / GPU).write_bytes(b"\n".join([cell, b"", damage, cell, b""]))
    with pytest.raises(DataError, match=r"gpu\.jsonl, line 3\n"):
        page(tmp_path)


def test_bandwidth_names_backends_record_commit_and_machine(tmp_path):
    copy = {"benchmark": "gpu_copy_bandwidth", "cell": "copy", "bytes_per_second": 4.31e12}
    cells = bandwidth("triton", 0.913), bandwidth("flash: FA", 0.704), bandwidth("triton", 0.5, T=4, cell="T 4")
    text = section(page_of(tmp_path, copy, *cells), "Attention bandwidth on a GPU")
    for row in (
        "2 | int8 | 300 * | triton | 91% |",
        "2 | int8 | 300 * | flash: FA | 70% |",
        "4 | int8 | 300 * | triton | 50%",
    ):
        assert f"| M | 4 | 8000 | {row}" in text
    assert all(shown in text for shown in ("4.31 TB/s", "gpu.jsonl", "`0123456789ab`", "NVIDIA X"))


def test_the_last_record_of_a_cell_counts_and_quick_or_broken_ones_do_not(tmp_path):
    cells = [bandwidth("triton", share) for share in (0.11, 0.88)]
    cells += [bandwidth("triton", 0.99, quick=True), bandwidth("triton", 0.77, status="skipped")]
    broken = {"benchmark": "gpu_attention_bandwidth", "cell": "flash", "status": "error", "error": "broken"}
    text = page_of(tmp_path, *cells, broken)
    assert "88%" in text and not [share for share in ("11%", "99%", "77%", "broken") if share in text]


def test_speculation_and_its_missing_figures(tmp_path):
    record = {"benchmark": "gpu_selfspec", "cell": "c", "status": "done", "B": 64, "prefix_len": 7500, "gamma": 3}
    record |= {"draft_budget": 512, "draft_weights": "int4", "verification": "coupled", "temperature": 0.6}
    record |= {"speedup": 1.874, "baseline_step_ms": 9.87, "round_ms": 15.31, "acceptance_rate": 0.8125}
    record |= {"draft_step_ms": None, "identical_sequences": 63, "sequences": 64}
    text = section(page_of(tmp_path, record), "End to end on a GPU")
    assert f"| 7500 | 64 | coupled | 0.6 | 3 | 512 | int4 | 1.87 | {NONE} | 9.87 | {NONE} | {NONE} | 15.31 |" in text
    assert "| 0.812 |" in text and "63 of 64" in text


def test_costs_of_shapes_and_their_missing_figures(tmp_path):
    text = page_of(
        tmp_path, gpu_costs(baseline_share_of_copy=0.876), gpu_costs(draft_step_ms=None, verify_step_ms=None)
    )
    text = section(text, "Costs of 8B and 7B shapes on a GPU")
    assert "| 88% |" in text and f"| {NONE} | {NONE} | 40.00 |" in text


def test_failed_checks_are_shown_as_failed(tmp_path):
    error = {"benchmark": "gpu_attention_error", "worst_error": 0.5, "tolerance": 0.016}
    noise = {"benchmark": "gpu_noise", "cell": "noise", "status": "done"}
    text = page_of(tmp_path, error | {"cell": "triton, ring", "status": "failed"}, noise)
    assert "| triton, ring | FAILED | 0.5 | 0.016 |" in text and "| noise | passed | - | - |" in text


def test_launch_gaps(tmp_path):
    record = {"benchmark": "gpu_launch_gaps", "cell": "x", "status": "done", "model": "M", "B": 64, "prefix_len": 7500}
    record |= {"gamma": 3, "round_ms": 10.5, "kernel_ms_per_round": 9.25, "gap_percent": 11.9}
    text = page_of(tmp_path, record | {"largest": [{"kernel": "a|kernel", "ms_per_round": 3.25}]})
    assert r"| 10.50 | 9.25 | 11.9% | `a\|kernel` | 3.25 |" in text


def test_cpu_summaries_and_peers(tmp_path):
    summary = {"benchmark": "cpu_selfspec_summary", "B": 8, "prefix_len": 7500, "gamma": 3, "draft_dtype": "bfloat16"}
    summary |= {"verification": "greedy", "draft_budget": 512, "pairs": 5, "gpu": None}
    summary |= {"median": {"speedup": 1.456, "round_ms": 474.4, "draft_step_ms": None}}
    rows = [{"way": "plain", "speedup": 9.99}, {"way": "b=64 g=1", "draft_budget": 64, "gamma": 1, "speedup": 1.234}]
    cell = {"benchmark": "gamma_cell", "B": 8, "prefix_len": 2000, "repeats": 7, "rows": rows}
    page_of(tmp_path, summary, {"benchmark": "cpu_selfspec", "speedup": 9.99}, cell, file="cpu_fast_path.jsonl")
    peers = {"benchmark": "cpu_peers", "B": 1, "prefix_len": 2000, "step_ms: ours": 38.51}
    text = section(page_of(tmp_path, peers, file="cpu_peers.jsonl"), "CPU")
    assert all(
        shown in text for shown in ("1.46", "474.40", "| 2000 | 1 | 38.5 |", "1.23 |", " | 7 |", "a CPU, 2 cores", NONE)
    )
    assert "9.99" not in text
