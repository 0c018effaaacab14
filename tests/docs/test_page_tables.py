"""The tables of the pages are made of records."""

import json
import re
from pathlib import Path

import pytest

from common.errors import DataError
from reproduce import tables
from reproduce.helpers.records import read_records, selected
from serving.schemas import NEUTRAL, ChatCompletion, Completion, Generate, Parameters
from tests.support.programs import ROOT, run


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_what_the_records_say(page: Path):
    text = page.read_text(encoding="utf-8")
    assert tables.filled(page) == text
    outside = tables.PLACE.sub("", text)
    assert not re.search(r"^\|.*\d\.\d", outside, re.MULTILINE), "a table of numbers is made of records"


def test_records_of_sweeps_are_read_and_others_refused(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    lines = [{"config": {"target": {"rope_scaling": "yarn:4"}}, "rows": [{"verified": 2}]}]
    lines += [{"status": "ok", "record": {"B": 1}}, {"status": "failed", "record": None}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_records(file) == [lines[0] | {"rope_scaling": "yarn:4"}, {"B": 1}]
    for text, message in (("[]\n", "line 1"), ("", "no record")):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            read_records(file)
    with pytest.raises(DataError, match="no such file"):
        read_records(tmp_path / "nothing.jsonl")


def test_rows_are_selected_by_conditions():
    rows = [{"text": text, "draft_budget": n} for text, n in (("book", 64), ("sampled", 64), ("book", None))]
    assert selected(rows, ["text=book", "draft_budget=64,none"]) == [rows[0], rows[2]]
    for condition, message in (("text=passkey", "book, sampled"), ("txt=book", "no such column")):
        with pytest.raises(DataError, match=message):
            selected(rows, [condition])


def test_the_page_of_the_server_names_every_field_of_requests():
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    names = {*NEUTRAL}
    for body in (Completion, ChatCompletion, Generate, Parameters):
        for name, field in body.model_fields.items():
            names |= {*getattr(field.validation_alias, "choices", [field.validation_alias or name])}
    assert not [name for name in names if f"`{name}`" not in page]


def test_a_table_of_other_records_has_the_published_number_beside_them(tmp_path: Path):
    record = {"model": "meta-llama/Meta-Llama-3.1-8B", "B": 32, "prefix_len": 32768, "gamma": 3, "draft_budget": 512}
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(record | {"speedup": 1.3, "draft_model": None}) + "\n")
    (line,) = run("reproduce/tables.py", ["speedups", str(file)]).out.splitlines()[1:]
    assert line.split()[:3] == ["Llama-3.1-8B", "self", "32768"] and line.split()[-1] == "1.22"
    assert "cpu_storages" in run("reproduce/tables.py", ["nothing"]).refusal
