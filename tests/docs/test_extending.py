"""docs/extending.md does what it says: in a copy of the checkout, its policy and its drafter run in every program."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.programs import ROOT, Ended, python

FUTURE, TABLE = "from __future__ import annotations\n\n", "POLICIES = {\n"
ROOMS = ("common", "kv_cache", "models", "engine", "bench", "cost_model", "terminal", "serving", "reproduce", "tests")
FILES = "kv_cache/key_norm.py", "kv_cache/value_norm.py", "kv_cache/late_key_norm.py", "engine/drafters/again.py"
NAMED = "again+self=key_norm"
SERVES = """from common import cli
from serving.scheduler import open_session
from serving.serve import Serve
flags = cli.read(Serve)
assert open_session(flags.config(), flags.batch)[1].drafters"""
OPTIONS = ["--draft_options", "norm_order=1", "period=2", "--snapkv_window", "8", "--text_match", "2"]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the page's files, and the policy's row of the test matrix."""
    folder, page = tmp_path_factory.mktemp("extended"), (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    left_out = shutil.ignore_patterns(*map(os.path.basename, FILES), "results")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=left_out)
    for name in ("pyproject.toml", "foretoken.py"):
        shutil.copy(ROOT / name, folder)
    blocks = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    for path in FILES:
        (folder / path).write_text(blocks[path])
    (folder / "kv_cache/broken.py").write_text("import a_module_that_does_not_exist\n")
    imports, row = blocks["tests/support/policies.py"].split("\n\n", 1)
    table = folder / "tests/support/policies.py"
    table.write_text(table.read_text().replace(FUTURE, f"{FUTURE}{imports}\n", 1).replace(TABLE, TABLE + row, 1))
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A folder of three prompts of unlike lengths."""
    texts = ["so long " * 12, "and thanks for " * 9, "all the fish, all the fish, " * 2]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "draft", ["again", "self=key_norm", "self=value_norm", "self=late_key_norm", NAMED, "self=key_norm@auto"]
)
def test_they_draft_from_the_command_line(draft: str, extended: Path, checkpoint: Path, prompts: Path) -> None:
    """In two rows, next to a policy that cannot be imported; all are identical to plain decoding."""
    flags = f"--model {checkpoint}/model.pth --prompts {prompts} --B 2 --gen_len 40 --dtype float64 --draft_dtype same"
    more = ["--auto_drafts", "again"] if draft.endswith("auto") else []
    words = [*flags.split(), "--draft", draft, "--draft_budget", "24", *OPTIONS, *more]
    ended = python("tests/selfspec_benchmark.py", *words, cwd=extended)
    record = ended.record
    assert ended.err.count("kv_cache/broken.py") == 1
    assert record["identical_sequences"] == record["sequences"] == 3
    if not more:
        assert 0 < record["acceptance_rate"] < 1
    if "=key_norm" in draft:
        assert record["draft_policy"] == "key_norm" and record["config"]["draft"]["norm_order"] == 1


def test_they_run_in_every_program(extended: Path, checkpoint: Path, books: Path, prompts: Path) -> None:
    model, sizes = f"{checkpoint}/model.pth", ["--gen_len", "12", "--draft_budget", "24", *OPTIONS]
    text = ["--dataset", str(books)]

    def run(program: str, *words: str) -> Ended:
        ended = python(*program.split(maxsplit=1), *words, cwd=extended)
        assert ended.code == 0, ended.err
        return ended

    drafted = ["--drafters", NAMED, "self=key_norm", "--texts", "greedy", "book", *sizes]
    rows = run("-m reproduce.compare", "--model", model, *text, "--contexts", "60", "--B", "2", *drafted).record["rows"]
    assert [row["drafter"] for row in rows] == [NAMED, "self=key_norm"] * 2
    assert all(row["draft_policy"] == "key_norm" and row["norm_order"] == 1 for row in rows)
    run("foretoken.py latency", model, "--draft", NAMED, *text, "--length", "60", "--nb_prompts", "2", *sizes)
    run("foretoken.py compare", model, NAMED, "--prompts", str(prompts), *sizes)
    run(f"-c {SERVES}", "--model", model, "--draft", NAMED, "--max_length", "200", *sizes[2:], "--gamma", "2")


def test_its_row_of_the_test_matrix_passes(extended: Path) -> None:
    files = "tests/kv_cache/test_policies.py", "tests/engine/test_witness.py"
    ended = python("-m", "pytest", "-q", "-k", "key_norm or reference[0]", *files, cwd=extended)
    assert ended.code == 0 and "passed" in ended.out, ended.out
