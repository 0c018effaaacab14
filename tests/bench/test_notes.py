"""Sentences without which a record would be misread."""

from typing import Any

import pytest

from bench.table import FEW_ROUNDS, notes

USUAL = {"gen_len": 64, "gamma": "auto", "choices": [{"gamma": 3}], "speedup": 1.2, "contention": {}}


NOTHING = {"wall_speedup": 1.1, "distinct_4gram_fraction": 0.9, "contention": {"baseline": {"contended": None}}}
NOTED = [{"choices": [{"gamma": 0}]}, {"steady_rounds": FEW_ROUNDS - 1}, {"gen_len": 1, "choices": []}]
NOTED += [{"measured_costs_seconds": 11.26}, {"contention": {"baseline": {"contended": True}}}]
NOTED += [{"wall_speedup": 0.9}, {"distinct_4gram_fraction": 0.2}]


@pytest.mark.parametrize("changed", [NOTHING, *NOTED])
def test_notes_are_made_where_a_record_would_be_misread(changed: dict[str, Any]) -> None:
    assert len(notes(USUAL | changed, ["gamma"])) == (changed in NOTED)
