"""reproduce/README.md: all published numbers, and what was measured or is predicted beside each."""

from pathlib import Path

from published_runs import gpu_costs, write

from reproduce import published_page
from reproduce.pages.generated_page import GPU
from reproduce.paper import reproduction
from reproduce.paper.columns import NONE
from reproduce.paper.published import published

LLAMA_2, LLAMA_3 = (f"Figure 6: {name}, self-speculation, 8xA100" for name in ("LLaMA-2-7B-32K", "Llama-3.1-8B"))


def page_row(text: str, title: str, start: str) -> str:
    section = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
    found = [line for line in section.splitlines() if line.startswith(f"| {start}")]
    assert len(found) == 1, (title, start)
    return found[0]


def test_the_page_without_records_says_so_of_every_published_number(tmp_path):
    text = published_page.page(tmp_path, tmp_path)
    facts = published()
    rows = [line for line in text.splitlines() if line.startswith(("| Llama", "| LLaMA", "| verif", "| draft step"))]
    assert len(rows) == sum(map(len, (facts.speedups, facts.acceptance, facts.ratios)))
    assert all(NONE in row for row in rows)
    assert "](results/" not in text and "![" not in text
    assert page_row(text, LLAMA_3, "Llama-3.1-8B | self | 4000 | 128 |")
    assert "| not shown | 0.76* |" in text


def page_of(folder: Path, *records: dict) -> str:
    write(folder / GPU, *records)
    return published_page.page(folder, folder)


def test_random_weights_of_a_sweep_measure_costs_and_no_speedup(tmp_path):
    record = gpu_costs(prefix_len=32000) | {"acceptance_rate": None, "sequences": 32}
    rows = {"a": record, "b": record | {"gamma": "auto", "draft_budget": "auto"}}
    failed = {"key": "c", "status": "failed", "error": "no memory", "record": None}
    ok = ({"key": key, "status": "ok", "error": None, "record": kept} for key, kept in rows.items())
    write(tmp_path / reproduction.SPEEDUPS, *ok, failed)
    text = published_page.page(tmp_path, tmp_path)
    row = page_row(text, "Speedups on 8xA100", "Llama-3.1-8B | self | 32000 | 32 |")
    assert row.endswith(f"| 1.22 | 1.25 (+2%) | {NONE} |")
    own = text.partition("## Measured here")[2]
    assert own.count("| Llama-3.1-8B |") == 1 and "| 20.00 | 4.00 | 26.00 | 40.00 | 1.30 | 0.20 |" in own
    assert "| auto |" not in own


def test_ratios_of_the_same_shape_are_measurements(tmp_path):
    other = gpu_costs(draft_step_ms=19.0), gpu_costs(draft_budget=256, draft_step_ms=19.0, draft_weights="int4")
    text = page_of(tmp_path, gpu_costs(draft_budget=256), gpu_costs(prefix_len=4096, B=64, gamma=4), *other)
    draft = page_row(text, "Ratios of costs", "draft step / plain step | Llama-3.1-8B | budget 256 | 16384 | 32 |")
    shown = "0.20 (random weights, NVIDIA X, gamma 3, 16000 tokens)"
    assert f"| 0.245 | 0.19 (-22%) | {shown} |" in draft
    verify = page_row(text, "Ratios of costs", "verification / plain step | Llama-3.1-8B | gamma 4 | 4096 | 64 |")
    assert "| 1.41 | 1.33 (-6%) | 1.30 (random weights" in verify
