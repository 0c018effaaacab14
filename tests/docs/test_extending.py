"""docs/extending.md does what it says: in a copy of the checkout, its policies, drafter and wrapper run in every
program, and its rows of the test matrix pass."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.programs import ROOT, Ended, afresh

FUTURE = "from __future__ import annotations\n\n"
TABLES = {"tests/support/policies.py": "POLICIES = {\n", "tests/support/drafters.py": "Drafter]] = {\n"}
ROOMS = ("common", "kv_cache", "models", "engine", "bench", "cost_model", "terminal", "serving", "reproduce", "tests")
FILES = "kv_cache/key_norm.py", "kv_cache/value_norm.py", "kv_cache/late_key_norm.py"
FILES += "engine/drafters/again.py", "engine/drafters/first.py"
NAMED = "again+self=key_norm"
OPTIONS = ["--draft_options", "norm_order=1", "period=2", "first=2", "--snapkv_window", "8", "--text_match", "2"]
MATRIX = ["-q", "-k", "key_norm or reference[0]", "tests/kv_cache/test_policies.py", "tests/engine/test_witness.py"]
# Runs programs one after another in the copy, opens a server's session, and runs tests.
PROGRAMS = """
import json, sys
import pytest
from dataclasses import asdict
from common import cli
from serving.scheduler import open_session
from serving.serve import Serve
from tests.support.programs import run
*commands, serves, tests = json.loads(sys.argv[1])
ended = [asdict(run(program, words)) | {"error": None} for program, words in commands]
flags = cli.read(Serve, serves, "serving")
assert open_session(flags.config(), flags.batch)[1].drafters
assert pytest.main(tests) == 0
print(json.dumps(ended))"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the page's files and rows of the test matrix."""
    folder, page = tmp_path_factory.mktemp("extended"), (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    left_out = shutil.ignore_patterns(*map(os.path.basename, FILES), "results")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=left_out)
    for name in ("pyproject.toml", "foretoken.py"):
        shutil.copy(ROOT / name, folder)
    blocks = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    for path in FILES:
        place = folder / "more" / path if "late" in path else folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(blocks[path])
    (folder / "kv_cache/broken.py").write_text("import a_module_that_does_not_exist\n")
    for path, table in TABLES.items():
        imports, row = blocks[path].split("\n\n", 1)
        text = (folder / path).read_text().replace(FUTURE, f"{FUTURE}{imports}\n", 1)
        (folder / path).write_text(text.replace(table, table + row, 1))
    return folder


def test_they_run_in_every_program(extended: Path, checkpoint: Path, books: Path, tmp_path: Path) -> None:
    """Next to a policy that cannot be imported. Benchmarks run in two rows of three prompts of unlike lengths."""
    texts = ["so long " * 12, "and thanks for " * 9, "all the fish, all the fish, " * 2]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    model, prompts, sizes = f"{checkpoint}/model.pth", ["--prompts", str(tmp_path)], ["--draft_budget", "24", *OPTIONS]
    exact = ["--B", "2", "--gen_len", "10", "--dtype", "float64", "--draft_dtype", "same"]
    drafts = ("again", "self=key_norm", "self=value_norm", "self=late_key_norm", "self=key_norm@auto")
    auto = {drafts[-1]: ["--auto_drafts", "again"]}
    how = ["--model", model, *prompts, *exact]
    commands = [("tests/selfspec_benchmark.py", [*how, "--draft", draft, *auto.get(draft, [])]) for draft in drafts]
    text, drafters = ["--dataset", str(books), "--gen_len", "8"], ["--drafters", NAMED, "self=key_norm"]
    contexts = ["--texts", "greedy", "book", "--contexts", "60", "--B", "2"]
    commands.append(("reproduce/compare.py", ["--model", model, *text, *drafters, *contexts]))
    commands.append(("foretoken.py latency", [model, "--draft", NAMED, *text, "--length", "60", "--nb_prompts", "2"]))
    serves = ["--model", model, "--draft", NAMED, "--max_length", "200", "--gamma", "2", *sizes]
    given = json.dumps([*((program, [*words, *sizes]) for program, words in commands), serves, MATRIX])
    said = afresh(PROGRAMS, given, folder=extended, WITNESS_SCENARIOS="64", FORETOKEN_PLUGINS="more")
    assert said.code == 0, said.out + said.err
    ended = [Ended(**each) for each in json.loads(said.out.splitlines()[-1])]
    assert all(each.code == 0 for each in ended), ended
    noted = "".join(each.err for each in (said, *ended))
    assert noted.count("kv_cache/broken.py, line 1: ModuleNotFoundError") == 1, "once in a process"
    for draft, each in zip(drafts, ended, strict=False):
        record = each.record
        assert record["identical_sequences"] == record["sequences"] == 3
        assert draft in auto or 0 < record["acceptance_rate"] < 1
        if "=key_norm" in draft:
            assert record["draft_policy"] == "key_norm" and record["config"]["draft"]["norm_order"] == 1
            assert ", norm_order 1" in each.out
    rows = ended[len(drafts)].record["rows"]
    assert [row["drafter"] for row in rows] == [NAMED, "self=key_norm"] * 2
    assert all(row["draft_policy"] == "key_norm" and row["norm_order"] == 1 for row in rows)


RUN = "import sys; from tests.support.programs import run; print(run(sys.argv[1], sys.argv[2:]).err)"
BEGIN = "from engine.drafters.self_speculation import *\nfrom kv_cache.snapkv import *\n"
MINE = "@dataclass(frozen=True)\nclass Mine"
WRONG = {
    r"wrong/kv_cache/wrong\.py, Mine\n.*name: ClassVar": f"{MINE}(SnapKV): ...",
    r"wrong\.py, Mine\n.*@dataclass": 'class Mine(SnapKV): name = "mine"',
    r"wrong\.py, Mine\n.*no score": f'{MINE}(ScoredPolicy):\n name = "mine"',
    r"no such value.*wrong/kv_cache/wrong\.py, line 3: ModuleNotFoundError": "import a_module_that_does_not_exist",
    r"wrong\.py, line 5\n.*Zero": f'{MINE}(SnapKV):\n name, room = "mine", property(lambda _: 1 / 0)',
    r"wrong\.py, line 5\n.*Index": f'{MINE}(SelfConfig):\n name, plan = "mine", lambda *_: [][0]',
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_file_is_named_before_a_run(message: str, extended: Path, checkpoint: Path) -> None:
    (extended / "wrong/kv_cache").mkdir(parents=True, exist_ok=True)
    (extended / "wrong/kv_cache/wrong.py").write_text(BEGIN + WRONG[message])
    flag = "--draft" if "SelfConfig" in WRONG[message] else "--draft_policy"
    words = "tests/selfspec_benchmark.py", "--model", f"{checkpoint}/model.pth", flag, "mine"
    said = afresh(RUN, *words, folder=extended, FORETOKEN_PLUGINS="wrong")
    assert re.search(message, said.out, re.DOTALL), said
