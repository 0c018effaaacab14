"""docs/extending.md works: its blocks, as files of a copy of the checkout, are a policy and a drafter."""

import re
import shutil
from pathlib import Path

from programs import ROOT, python

ROOMS = ("common", "kv_cache", "models", "engine", "bench", "tests")
FLAGS = "--draft_policy key_norm --norm_order 1 --snapkv_window 8 --draft_budget 24 --draft_dtype same"
FLAGS += " --text_drafts bigram --text_match 1 --B 2 --gen_len 40 --dtype float64"
TEXTS = ["so long " * 12, "and thanks for " * 9, "all the fish, all the fish, " * 2]


def blocks() -> dict[str, str]:
    """Return the page's new files, by the path in the first line of each block."""
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {name: code for name, code in found if not name.startswith("tests/")}


def test_the_policy_and_the_drafter_of_the_page_draft_losslessly(checkpoint: Path, tmp_path: Path) -> None:
    """Three prompts of unlike lengths in two rows."""
    folder, prompts = tmp_path / "checkout", tmp_path / "prompts"
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, code in blocks().items():
        (folder / name).write_text(code, encoding="utf-8")
    prompts.mkdir()
    for number, text in enumerate(TEXTS):
        (prompts / f"{number}.txt").write_text(text)
    flags = f"--model {checkpoint}/model.pth --prompts {prompts} {FLAGS}".split()
    record = python("tests/selfspec_benchmark.py", *flags, cwd=folder).record
    assert record["identical_sequences"] == record["sequences"] == 3 and record["accepted"] > 0
    assert record["draft_policy"] == "key_norm"
