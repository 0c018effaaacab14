"""The pages: links lead somewhere, programs take the flags of commands, tables are made of records, and Python runs
without optional packages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench.config import DEFAULT_MODEL
from common import cli
from common.errors import DataError
from common.exit import exit_on_user_error
from models.checkpoints.model_source import find_model
from reproduce import tables
from reproduce.helpers.records import read_records, selected
from serving.schemas import NEUTRAL, ChatCompletion, Completion, Generate, Parameters
from tests.support.programs import COST_MODEL, ROOT, afresh, run

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "reproduce/README.md"]
OF_PAGES = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
ROOMS = "common|kv_cache|models|engine|bench|cost_model|terminal|serving|tests|reproduce|docs"
OWN_MODULES = ("cost_model", "reproduce", "serving")
MADE_BY_READERS = {"key_norm": "streaming"}  # a policy that is in its place here
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A command within a sentence.
INLINE = re.compile(r"`((?:python|torchrun) [^`]+)`")


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command of a page that starts Python, with 1 in the place of a shell's variables."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for language, block in FENCED.findall(text) if language in ("", "bash")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += [" ".join(command.split()) for command in INLINE.findall(FENCED.sub("", text))]
    found = []
    for line in lines:
        words = [re.sub(r"\$\{?\w+\}?", "1", word) for word in shlex.split(line, comments=True)]
        starts = [i for i, word in enumerate(words) if Path(word).name in ("python", "torchrun")]
        found += [[Path(words[starts[0]]).name, *words[starts[0] + 1 :]]] if starts else []
    return found


@OF_PAGES
def test_links_lead_to_files_and_files_that_are_named_exist(page: Path) -> None:
    """Records under results/ may not have been made yet."""
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    named = [name for name in re.findall(rf"`((?:{ROOMS})/[\w/]+\.\w+)`", text) if "/results/" not in name]
    paths = [*(page.parent / link for link in links), *map(ROOT.joinpath, named)]
    assert not [path for path in paths if not path.exists()]


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the program of ours that a command starts, and its flags; None for others, such as pytest."""
    launcher, *rest = words
    if launcher == "torchrun":
        at = next(i for i, word in enumerate(rest) if word == "-m" or word.endswith(".py"))
        rest = rest[at:]
    if rest[0] == "-m":
        name, flags = rest[1], rest[2:]
        if name.partition(".")[0] not in OWN_MODULES:
            return None
        special = {"cost_model": (COST_MODEL, flags), "serving": ("foretoken.py", ["serve", *flags])}
        return special.get(name, (f"{name.replace('.', '/')}.py", flags))
    return None if rest[0] == "-c" else (rest[0], rest[1:])


@OF_PAGES
def test_programs_take_the_flags_of_a_pages_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[Any]()
    monkeypatch.setattr(cli, "run", lambda main, kind, *_: exit_on_user_error(lambda: read.append(cli.read(kind)), {}))
    for program, flags in filter(None, map(program_of, commands(page))):
        read.clear()
        ended = run(program, [MADE_BY_READERS.get(word, word) for word in flags])
        assert ended.code == 0 and (read or "--help" in flags), f"{program} {' '.join(flags)}\n{ended.err}"


@pytest.mark.parametrize("page", ["README.md", "docs/speculation.md"])
def test_a_pages_python_runs(page: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """With a tiny model in the place of the built-in one; `test_extending.py` runs the code of another page."""
    tiny = {DEFAULT_MODEL: str(checkpoint / "model.pth")}
    monkeypatch.setattr("bench.config.find_model", lambda path, *how: find_model(tiny.get(path, path), *how))
    blocks = [code for language, code in FENCED.findall((ROOT / page).read_text()) if language == "python"]
    exec("\n".join(blocks), {})
    shares = re.findall(r"[01]\.\d+(?: \[.*\])?$", capsys.readouterr().out, re.MULTILINE)
    assert shares and all(0 <= float(share.split()[0]) <= 1 for share in shares)


# Optional packages, as in an environment of requirements.txt alone on a machine without a GPU.
PROGRAM = """
import runpy, sys
sys.modules.update(dict.fromkeys(("triton", "flash_attn", "llguidance", "matplotlib", "transformers")))
sys.argv = [sys.argv[1], "--draft_policy", "verify_topk", "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    assert not ended.code
import cost_model.report, serving.serve, terminal
from models import load_model, ModelConfig
from kv_cache import FullKVCache, StreamingKVCache
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, SamplingParams, generate
"""


def test_programs_run_from_another_directory_without_optional_packages(tmp_path):
    ended = afresh(PROGRAM, ROOT / "tests/selfspec_benchmark.py", folder=tmp_path)
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_what_the_records_say(page: Path):
    text = page.read_text(encoding="utf-8")
    assert tables.filled(page) == text
    assert not re.search(r"^\|.*\d\.\d", tables.PLACE.sub("", text), re.MULTILINE), (
        "a table of numbers is made of records"
    )


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
    for path, message in ((tmp_path / "nothing.jsonl", "No such file"), (tmp_path, "directory")):
        with pytest.raises(DataError, match=message):
            read_records(path)
    assert "No such file" in run(COST_MODEL, ["--records", str(tmp_path / "nothing.jsonl")]).refusal


def test_rows_are_selected_by_conditions():
    rows = [{"text": text, "draft_budget": n} for text, n in (("book", 64), ("sampled", 64), ("book", None))]
    assert selected(rows, ["text=book", "draft_budget=64,none"]) == [rows[0], rows[2]]
    for condition, message in (("text=boko", "use text=book"), ("txt=book", "use text=VALUE")):
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
    (file := tmp_path / "own.jsonl").write_text(json.dumps(record | {"speedup": 1.3, "draft_model": None}) + "\n")
    (line,) = run("reproduce/tables.py", ["speedups", str(file)]).out.splitlines()[1:]
    assert line.split()[:3] == ["Llama-3.1-8B", "self", "32768"] and line.split()[-1] == "1.22"
    assert "use cpu_storages" in run("reproduce/tables.py", ["cpu_storage"]).refusal
    for name, records, head in (("gpu_linears", "gpu", "tokens"), ("ablation", "budgets", "policy")):
        out = run("reproduce/tables.py", [name, str(tables.RESULTS / f"{records}.jsonl")]).out
        assert out.split()[0] == head and ("±: one standard error" in out) == ("±" in out), "rows are told apart"


@pytest.mark.parametrize(
    ("table", "records", "message"),
    [
        ("serving_peers", "budgets", "no clients, no mode"),
        ("lengths", "kept_answers", "no speedup_and_length"),
        ("cpu_storages", "certify", "no rows"),
        ("policies", "contexts_book", "give --where"),
    ],
)
def test_a_table_of_records_of_another_kind_is_refused(table: str, records: str, message: str):
    assert message in run("reproduce/tables.py", [table, str(tables.RESULTS / f"{records}.jsonl")]).refusal


def test_a_page_that_names_an_unknown_table_is_named(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table budget -->\n<!-- end -->")
    with pytest.raises(DataError, match=r"no such table\n.*page.md\n.*\n.*\n.*use budgets"):
        tables.filled(page)
