"""docs/extending.md does what it says: its blocks, as files of a copy of the checkout, are a policy and a drafter."""

import re
import shutil
from pathlib import Path

import pytest
from programs import ROOT, python

ROOMS = ("common", "kv_cache", "models", "engine", "bench", "tests")
# Where a row goes, and what stands before the file's imports.
TABLES = {"tests/policies.py": "POLICIES = {\n", "tests/scenarios.py": "TEXT_DRAFTERS = {\n"}
FUTURE = "from __future__ import annotations\n\n"
IN_RANDOM_BATCHES = """
import scenarios
from test_witness import WitnessWorld


def test_random_batches():
    new = [name for name in scenarios.DRAFTERS if "key_norm" in name or name == "bigram"]
    assert len(new) == 3
    scenarios.DRAFTERS = (*new, scenarios.PACED)
    for seed in range(24):
        scenarios.run_scenario(WitnessWorld(), seed)
"""


def blocks() -> dict[str, str]:
    """The page's Python by the file that its first line names."""
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the page's files and rows in it."""
    folder, tried = tmp_path_factory.mktemp("extended"), (Path(name).name for name in blocks() if name not in TABLES)
    ignored = shutil.ignore_patterns(*tried)  # who follows the page has these files already
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, code in blocks().items():
        path = folder / name
        if name in TABLES:
            imports, row = code.split("\n\n", 1)
            table = path.read_text(encoding="utf-8")
            code = table.replace(FUTURE, f"{FUTURE}{imports}\n", 1).replace(TABLES[name], TABLES[name] + row, 1)
            assert row in code and imports in code
        path.write_text(code, encoding="utf-8")
    (folder / "tests/test_new_rows.py").write_text(IN_RANDOM_BATCHES)
    return folder


def test_a_policy_and_a_drafter_are_one_file_and_one_row_each() -> None:
    files = {name for name in blocks() if name not in TABLES}
    assert files == {"kv_cache/key_norm.py", "engine/drafters/bigram.py"} and len(blocks()) == 4


DRAFTS = {
    "--draft_policy key_norm --norm_order 1 --snapkv_window 8 --draft_budget 24 --draft_dtype same": {"norm_order": 1},
    "--draft bigram": {"min_seen": 1},
    "--text_drafts bigram --text_match 1 --draft_budget 24": {"text_drafts": ["bigram"]},
}


@pytest.mark.parametrize("flags", DRAFTS, ids=["policy", "drafter", "beside a draft model"])
def test_it_drafts_from_the_command_line(flags: str, extended: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Three prompts of unlike lengths in two rows; all are identical to plain decoding."""
    texts = ["so long " * 12, "and thanks for " * 9, "all the fish, all the fish, " * 2]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    sizes = f"--model {checkpoint}/model.pth --prompts {tmp_path} --B 2 --gen_len 40 --dtype float64"
    record = python("tests/selfspec_benchmark.py", *sizes.split(), *flags.split(), cwd=extended).record
    assert record["identical_sequences"] == record["sequences"] == 3
    assert 0 < record["accepted"] < record["verified"]
    draft = record["config"]["draft"]
    texts = [text["name"] for text in draft.get("texts", ())]
    assert DRAFTS[flags].items() <= (draft | draft.get("policy", {}) | {"text_drafts": texts}).items()


def test_an_option_that_makes_no_sense_is_refused(extended: Path) -> None:
    code = "from kv_cache.key_norm import KeyNorm; KeyNorm(norm_order=0).check()"
    assert "ConfigError: --norm_order is too small" in python("-c", code, cwd=extended).err


def test_help_lists_both(extended: Path) -> None:
    listed = python("tests/selfspec_benchmark.py", "--help", cwd=extended).out
    assert all(name in listed for name in ("key_norm", "--norm_order", "bigram", "--min_seen"))


def test_their_rows_of_the_test_matrix_pass(extended: Path) -> None:
    files = ("tests/test_policies.py", "tests/test_new_rows.py")
    ended = python("-m", "pytest", "-q", "-k", "key_norm or random_batches", *files, cwd=extended)
    assert ended.code == 0 and "10 passed" in ended.out, ended.out
