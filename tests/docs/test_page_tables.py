"""The tables of the pages are made of records, and published numbers are all there."""

import json
import re
from pathlib import Path

import pytest

from common.errors import DataError
from reproduce import tables
from reproduce.helpers.records import read_records
from tests.support.programs import run


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_what_the_records_say(page: Path):
    text = page.read_text(encoding="utf-8")
    assert tables.filled(page) == text
    outside = tables.PLACE.sub("", text)
    assert not re.search(r"^\|.*\d\.\d", outside, re.MULTILINE), "a table of numbers is made of records"


def test_every_table_is_on_a_page():
    named = [place[1] for page in tables.PAGES for place in tables.PLACE.findall(page.read_text(encoding="utf-8"))]
    assert len(named) == len({*named}) and {*tables.TABLES} == {*named}


def test_records_of_older_versions_and_of_sweeps_are_read(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    lines = [{"judged": 3, "rows": [{"judged": 2}]}, {"status": "ok", "record": {"B": 1}}]
    lines += [{"status": "failed", "record": None}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_records(file) == [{"verified": 3, "rows": [{"verified": 2}]}, {"B": 1}]
    file.write_text("[]\n")
    with pytest.raises(DataError, match="line 1"):
        read_records(file)


def test_a_table_of_other_records_has_the_published_number_beside_them(tmp_path: Path):
    record = {"model": "meta-llama/Meta-Llama-3.1-8B", "B": 32, "prefix_len": 32768, "gamma": 3, "draft_budget": 512}
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(record | {"speedup": 1.3, "draft_model": None}) + "\n")
    (line,) = run("reproduce/tables.py", ["speedups", str(file)]).out.splitlines()[1:]
    assert line.split()[:3] == ["Llama-3.1-8B", "self", "32768"] and line.split()[-1] == "1.22"
    assert "cpu_storages" in run("reproduce/tables.py", ["nothing"]).refusal
