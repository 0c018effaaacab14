"""The program that tries seeded bugs can tell a kill from a survivor and from tests that never ran."""

from dataclasses import replace

import mutants
import pytest
from programs import ROOT, python

from common.errors import ConfigError

TOP_P = mutants.Mutant(
    "top-p stops one token early",
    "engine/sampling.py",
    "mass.cumsum(dim=-1) - mass <",
    "mass.cumsum(dim=-1) <",
    "test_sampling.py::test_one_row_has_the_law_of_the_reference",
)


@pytest.mark.slow
def test_a_kill_and_a_survivor_are_told_apart():
    assert mutants.try_mutant(TOP_P, [TOP_P.test]).killed_by == TOP_P.test
    harmless = replace(TOP_P, new=TOP_P.old + " ")
    assert mutants.try_mutant(harmless, [TOP_P.test])[:2] == (None, None)


@pytest.mark.slow
def test_tests_that_are_skipped_let_no_bug_survive(monkeypatch):
    """They need a browser, which is not on an empty path."""
    monkeypatch.setenv("PATH", "")
    tried = mutants.try_mutant(TOP_P, ["test_serving_page.py"])
    assert tried.killed_by is None and "skipped" in tried.broken


def test_a_bug_that_does_not_fit_and_a_filter_that_matches_nothing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="0 places like"):
        mutants.require_fit(replace(TOP_P, old="no such line"))
    assert "no such bug" in python(ROOT / "tests/mutants.py", "--only", "no such bug", cwd=tmp_path).refusal
