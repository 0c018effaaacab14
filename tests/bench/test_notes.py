"""Sentences without which a record would be misread."""

from typing import Any

import pytest

from bench.table import FEW_ROUNDS, notes

USUAL = {"gen_len": 64, "gamma": "auto", "choices": [{"gamma": 3}], "speedup": 1.2, "contention": {}}


@pytest.mark.parametrize(
    ("changed", "n_notes"),
    [
        ({"wall_speedup": 1.1, "distinct_4gram_fraction": 0.9, "contention": {"baseline": {"contended": None}}}, 0),
        ({"choices": [{"gamma": 0}]}, 1),
        ({"steady_rounds": FEW_ROUNDS - 1}, 1),
        ({"gen_len": 1, "choices": []}, 1),
        ({"measured_costs_seconds": 11.26}, 1),
        ({"contention": {"baseline": {"contended": True}}}, 1),
        ({"wall_speedup": 0.9}, 1),
        ({"distinct_4gram_fraction": 0.2}, 1),
    ],
)
def test_notes_are_made_where_a_record_would_be_misread(changed: dict[str, Any], n_notes: int) -> None:
    assert len(notes(USUAL | changed, ["gamma"])) == n_notes
