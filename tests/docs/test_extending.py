"""docs/extending.md does what it says: in a copy of the checkout, its policy runs and passes the test matrix."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.programs import ROOT, python

FUTURE, TABLE = "from __future__ import annotations\n\n", "POLICIES = {\n"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the page's policy and its row of the test matrix."""
    folder, page = tmp_path_factory.mktemp("extended"), (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    for room in ("common", "kv_cache", "models", "engine", "bench", "tests"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("key_norm.py"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    blocks = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    (folder / "kv_cache/key_norm.py").write_text(blocks["kv_cache/key_norm.py"])
    imports, row = blocks["tests/support/policies.py"].split("\n\n", 1)
    table = folder / "tests/support/policies.py"
    table.write_text(table.read_text().replace(FUTURE, f"{FUTURE}{imports}\n", 1).replace(TABLE, TABLE + row, 1))
    return folder


def test_it_drafts_from_the_command_line(extended: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Three prompts of unlike lengths in two rows; all are identical to plain decoding."""
    texts = ["so long " * 12, "and thanks for " * 9, "all the fish, all the fish, " * 2]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    flags = f"--model {checkpoint}/model.pth --prompts {tmp_path} --B 2 --gen_len 40 --dtype float64 --draft_dtype same"
    policy = "--draft_policy key_norm --norm_order 1 --snapkv_window 8 --draft_budget 24"
    record = python("tests/selfspec_benchmark.py", *flags.split(), *policy.split(), cwd=extended).record
    assert record["identical_sequences"] == record["sequences"] == 3 and record["draft_policy"] == "key_norm"
    assert 0 < record["acceptance_rate"] < 1


def test_its_row_of_the_test_matrix_passes(extended: Path) -> None:
    files = "tests/kv_cache/test_policies.py", "tests/engine/test_witness.py"
    ended = python("-m", "pytest", "-q", "-k", "key_norm or reference[0]", *files, cwd=extended)
    assert ended.code == 0 and "passed" in ended.out, ended.out
