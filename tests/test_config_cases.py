"""No configuration is accepted as another model than transformers loads, and the manual lists the keys."""

import re
from collections import Counter
from pathlib import Path

import pytest
from config_cases import PLAIN, VALUES, WRONG, Checkpoints, all_cases
from programs import ROOT

from models.hf_config import ARCHITECTURES, RULES


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_changed_configurations_have_the_logits_of_transformers_or_are_refused(tmp_path: Path, every: int) -> None:
    cases, checkpoints = list(all_cases()), Checkpoints(tmp_path)
    assert len(cases) > 800
    outcomes = [(case, checkpoints.outcome(case)) for case in cases[::every]]
    assert [case.name for case, outcome in outcomes if outcome == WRONG] == []
    counts = Counter((case.base, outcome) for case, outcome in outcomes)
    assert all(counts[base, what] > 12 for base in PLAIN for what in ("equal logits", "both refuse"))


def test_the_manual_has_every_key_that_is_read_or_tried() -> None:
    text = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    section = text.partition("## The keys of config.json")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    documented = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(VALUES)
    assert {*RULES, *(key for one in ARCHITECTURES.values() for key in (*one.rules, *one.defaults))} <= {*VALUES}
