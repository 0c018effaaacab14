"""gamma_cell.py's ways of drafting beside each other, and acceptance.py's kinds of text."""

from typing import Any

from bench.auto.costs import Costs
from bench.auto.measure import measure_costs
from common.jsonl import read_lines

GAMMA_CELL = "reproduce/gamma_cell.py"
SIZES = "--B 2 --prefix_len 60 --gen_len 30 --device cpu --dtype float64"


def test_every_way_of_a_gamma_cell_decodes_the_same_tokens(call, monkeypatch):
    """Fixed pairs, `auto` at the largest budget, and `auto budget`, in turn; and what they chose by which costs."""
    measured: list[list[Costs]] = []

    def kept(*args: Any, **kwargs: Any) -> list[Costs]:
        measured.append(measure_costs(*args, **kwargs))
        return measured[-1]

    monkeypatch.setattr("bench.auto.run_costs.measure_costs", kept)
    sizes = SIZES.replace("--prefix_len 60", "--prefix_len 150")
    record = call(GAMMA_CELL, f"{sizes} --gammas 1 3 --budgets 16 40 --repeats 2").record
    rows = {row["way"]: row for row in record["rows"]}
    assert list(rows)[:2] == ["plain", "b=16 g=1"] and list(rows)[-2:] == ["auto", "auto budget"] and len(rows) == 7
    assert all(row["identical_rows"] == 2 and len(row["tokens_per_second"]) == 2 for row in rows.values())
    auto, both = rows["auto"], rows["auto budget"]
    assert (auto["draft_budget"], auto["budgets"], both["draft_budget"]) == (40, None, "auto")
    # Measured anew in both repeats, the second of which runs in reverse, for one drafter and for two.
    assert [len(costs) for costs in measured] == [1, 2, 2, 1]
    plain_ms = [round(measured[run][0].plain_ms, 4) for run in (0, 3)]
    assert [costs["plain_ms"] for (costs,) in auto["measured_costs"]] == plain_ms
    assert {budget for run in both["budgets"] for budget in run} <= {64, 128, None}
    assert [[bool(gamma) for gamma in run] for run in both["gammas"]] == [
        [budget is not None for budget in run] for run in both["budgets"]
    ]


def test_acceptance_on_three_kinds_of_text(call, tmp_path):
    """Every draft decodes the same texts, also where text is sampled."""
    sizes = "--B 2 --prefix_len 80 --gen_len 24 --device cpu --dtype float64 --snapkv_window 8 --gamma 2"
    lists = "--budgets 16 40 --policies streaming snapkv full"
    record = call("reproduce/acceptance.py", f"{sizes} {lists} --output {tmp_path / 'out.jsonl'}").record
    assert [row for _, each in read_lines(tmp_path / "out.jsonl") for row in each["rows"]] == record["rows"]
    rows = {(row["text"], row["draft_policy"], row["draft_budget"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == 3 * (2 * 2 + 1)
    for (text, policy, _), row in rows.items():
        assert row["verified"] > 0 and 0 <= row["distinct_4gram_fraction"] <= 1
        assert row["temperature"] == (0.6 if text == "sampled" else 0)
        assert row["verification"] == ("coupled" if text == "sampled" else "greedy")
        # The draft is the target over the same cache, in the same dtype.
        assert row["acceptance_rate"] == 1 or policy != "full"
    assert min(row["acceptance_rate"] for row in rows.values()) < 1
    assert max(row["acceptance_standard_error"] for row in rows.values()) > 0
    texts = {(text, row["distinct_4gram_fraction"]) for (text, *_), row in rows.items()}
    assert len(texts) == 3
