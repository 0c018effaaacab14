"""The seeded bugs still fit the source, and the program that tries them can tell a kill from a survivor."""

import json
from dataclasses import replace

import mutants
import pytest
from mutant_table import MUTANTS
from programs import ROOT, python

TOP_P = next(mutant for mutant in MUTANTS if "top-p" in mutant.bug)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_the_bug_fits_the_source(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new and mutant.tests
    assert all((ROOT / "tests" / name).exists() for name in mutant.tests)


def test_bugs_are_many_and_distinct():
    assert len({mutant.bug for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_the_page_says_what_the_last_whole_run_caught():
    with open(ROOT / "reproduce/results/mutants.jsonl", encoding="utf-8") as file:
        runs = [json.loads(line) for line in file]
    last = max(runs, key=lambda run: run["of"])
    page = " ".join((ROOT / "docs" / "lossless.md").read_text(encoding="utf-8").split())
    assert f"{last['killed']} of {last['of']} were caught" in page


def test_a_kill_a_survivor_and_a_misfit_are_told_apart():
    killed = mutants.try_mutant(TOP_P, TOP_P.tests)
    assert killed.killed_by and killed.killed_by.startswith("test_sampling.py::")
    harmless = replace(TOP_P, new=TOP_P.old + " ")
    assert mutants.try_mutant(harmless, TOP_P.tests)[:2] == (None, None)
    with pytest.raises(ValueError, match="0 places like"):
        mutants.try_mutant(replace(TOP_P, old="no such line"), TOP_P.tests)


def test_tests_that_are_skipped_let_no_bug_survive(monkeypatch):
    """They need a browser, which is not on an empty path."""
    monkeypatch.setenv("PATH", "")
    tried = mutants.try_mutant(TOP_P, ["test_serving_page.py"])
    assert tried.killed_by is None and "skipped" in tried.broken


def test_a_filter_that_matches_nothing_is_not_a_success(tmp_path):
    assert "no such bug" in python(ROOT / "tests/mutants.py", "--only", "no such bug", cwd=tmp_path).refusal
