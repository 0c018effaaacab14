"""A policy or a drafter is one file: its options are on every benchmark's command line, and it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT

POLICY = '''"""The oldest tokens and the recent ones, half of the budget each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv_cache.policy import BudgetedPolicy
from kv_cache.streaming import StreamingKVCache


@dataclass(frozen=True)
class Halves(BudgetedPolicy):
    """The oldest tokens and the recent ones."""

    name: ClassVar[str] = "halves"
    recent_share: float = 0.5
    """of the budget, what is for recent tokens"""

    @property
    def reserved(self):
        return self.budget - round(self.recent_share * self.budget)

    @property
    def room(self):
        return self.budget - self.reserved

    def new_cache(self, config, max_batch, length, device, dtype):
        return StreamingKVCache(config, max_batch, self.budget, self.reserved, device, dtype)
'''
DRAFTER = '''"""Drafts the last token again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.drafters.config import DrafterConfig
from engine.drafters.ngram import NGram


@dataclass(frozen=True, kw_only=True)
class Echo(DrafterConfig):
    """The token that followed the last occurrence of this one."""

    name: ClassVar[str] = "echo"
    echo_length: int = 1
    """tokens that have to match"""

    def build(self, parts):
        return NGram(parts.runner, parts.gamma, self.echo_length)
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with two more files."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("common", "kv_cache", "models", "engine"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    for name in ("baseline", "longspec", "selfspec"):
        shutil.copy(ROOT / f"tests/{name}_benchmark.py", folder / "tests")
    (folder / "kv_cache/halves.py").write_text(POLICY)
    (folder / "engine/drafters/echo.py").write_text(DRAFTER)
    return folder


def run(checkout: Path, name: str, flags: str) -> str:
    """What a benchmark of that checkout prints."""
    command = [sys.executable, str(checkout / f"tests/{name}_benchmark.py"), *flags.split()]
    environment = os.environ | {"COLUMNS": "500", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def help_of(checkout: Path, name: str) -> str:
    """Without the frame that a terminal shows it in."""
    return " ".join(run(checkout, name, "--help").replace("│", " ").split())


@pytest.mark.parametrize("name", ["selfspec", "longspec"])
def test_a_file_is_all_that_a_policy_takes(name: str, checkout: Path) -> None:
    told = help_of(checkout, name)
    assert "{full,halves,snapkv,streaming}" in told and "halves: the oldest tokens and the recent ones" in told
    assert "--recent_share FLOAT halves: of the budget, what is for recent tokens (default: 0.5)" in told


def test_a_file_is_all_that_a_drafter_takes(checkout: Path) -> None:
    told = help_of(checkout, "selfspec")
    assert "--draft {echo,ngram,oracle,self}" in told and "--echo_length INT echo: tokens that have to match" in told
    assert "--draft" not in help_of(checkout, "baseline")


@pytest.mark.parametrize(
    "flags,asked",
    [
        (
            "--draft_policy halves --draft_budget 24 --recent_share 0.25",
            {"draft": "self", "draft_policy": "halves", "draft_budget": 24, "recent_share": 0.25, "n_sink": None},
        ),
        ("--draft echo --echo_length 2", {"draft": "echo", "draft_policy": None, "echo_length": 2, "max_ngram": None}),
    ],
)
def test_they_run_and_their_options_are_in_the_record(
    flags: str, asked: dict, checkout: Path, checkpoint: Path, books: Path
) -> None:
    sizes = "--B 2 --prefix_len 60 --gen_len 12 --dtype float64 --device cpu"
    record = json.loads(
        run(checkout, "selfspec", f"--model {checkpoint} --dataset {books} {sizes} {flags}").splitlines()[-1]
    )
    assert {name: record[name] for name in asked} == asked and record["identical_sequences"] == 2
