"""Cache folders in which something else than a file has a file's name: it is skipped, never opened."""

import faulthandler
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.prefix_store import PrefixStore
from models.kernels.build import BuildChoice, remembered
from tests.support.tiny import tiny_runner


@pytest.fixture(params=["FIFO", "device"])
def replace(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """Function that puts a FIFO or a device in a path's place. The process ends if a test waits for a writer."""

    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path) if request.param == "FIFO" else path.symlink_to("/dev/zero")

    faulthandler.dump_traceback_later(60, exit=True)
    yield replace
    faulthandler.cancel_dump_traceback_later()


def test_a_prompt_without_a_file_runs_again(replace: Callable[[Path], None], tmp_path: Path) -> None:
    seen = []
    for _ in "12":
        runner = tiny_runner(1, prefixes=PrefixStore(tmp_path, "a", 1 << 30))
        seen.append(runner.prefill(0, [*range(38)]).logits.tolist())
        (path,) = tmp_path.glob("prefix-*")
        replace(path)
    assert seen[0] == seen[1] and runner.prefixes is not None and runner.prefixes.n_taken_over == 0


def test_the_choice_of_a_build_without_a_file_is_made_again(replace: Callable[[Path], None], tmp_path: Path) -> None:
    choice, memory = BuildChoice("plain", []), tmp_path / "choice.json"
    for suffix in (".json", ".lock", ".partial"):
        replace(memory.with_suffix(suffix))
    assert remembered(memory, "choosing", lambda: choice) == choice
    assert BuildChoice(**json.loads(memory.read_text())) == choice
