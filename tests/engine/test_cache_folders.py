"""Cache folders in which something else than a file has a file's name: it is skipped, never opened."""

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import ModelRunner
from engine.prefix_store import PrefixStore
from models.kernels.build import BuildChoice, remembered
from tests.support.tiny import full_cache, random_prompts, tiny_model

PROMPTS = random_prompts([5, 38, 17])


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """End the process instead of waiting for a writer of a FIFO."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def in_place_of(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


KINDS = pytest.mark.parametrize("kind", ["FIFO", "device"])


@KINDS
def test_a_prompt_without_a_file_runs_again(kind: str, tmp_path: Path) -> None:
    model, rows = tiny_model(), []
    for _ in range(2):
        runner = ModelRunner(model, full_cache(model, 3), prefixes=PrefixStore(tmp_path, "a", 1 << 30))
        rows.append([runner.prefill(row, prompt).logits.tolist() for row, prompt in enumerate(PROMPTS)])
        for path in tmp_path.glob("prefix-*"):
            in_place_of(path, kind)
    assert rows[0] == rows[1] and runner.prefixes is not None and runner.prefixes.n_taken_over == 0


@KINDS
def test_the_choice_of_a_build_without_a_file_is_made_again(kind: str, tmp_path: Path) -> None:
    choice, memory = BuildChoice("plain", []), tmp_path / "choice.json"
    for suffix in (".json", ".lock", ".partial"):
        in_place_of(memory.with_suffix(suffix), kind)
    assert remembered(memory, "choosing", lambda: choice) == choice
    assert BuildChoice(**json.loads(memory.read_text())) == choice
