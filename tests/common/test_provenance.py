"""Records and files survive kill -9 and failing outputs, and nothing that was there before them is changed."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from common.errors import CheckpointError, ConfigError
from common.jsonl import append_record, read_lines, require_appendable
from common.provenance import git_commit
from models.checkpoints.manifest import DAY, atomic_path, write_text
from tests.support.programs import FORK

N_RECORDS = 400

TOO_DEEP, IS_DEEP = "[" * 100_000 + "]" * 100_000, "nested too deeply"
TOO_LONG, IS_LONG = '{"a": ' + "9" * 5000 + "}", "an integer of more than 4300 digits"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def records(path: Path) -> list[dict]:
    return [record for _, record in (read_lines(path) if os.path.exists(path) else ())]


def write_the_rest(path: Path) -> None:
    for number in range(len(records(path)), N_RECORDS):
        append_record(str(path), {"number": number, "text": "x" * 2000})


def test_resuming_after_kill_9_loses_no_record_and_repeats_none(path):
    rng, kills = random.Random(0), 0
    while len(records(path)) < N_RECORDS:
        writer = FORK.Process(target=write_the_rest, args=(path,))
        writer.start()
        if kills < 4:
            time.sleep(rng.uniform(0.0, 0.02))
            writer.kill()
            kills += 1
        writer.join()
    assert kills and [record["number"] for record in records(path)] == list(range(N_RECORDS))


@pytest.mark.parametrize("cut", [1, 5, 14, 16])
def test_behind_a_torn_line_a_new_one_begins(path, cut):
    """A whole line without its newline is kept."""
    append_record(str(path), {"a": 1})
    torn = b'{"b": 2, "c": 3}'[:cut]
    path.write_bytes(path.read_bytes() + torn)
    append_record(str(path), {"d": 4})
    assert path.read_bytes() == b'{"a": 1}\n' + torn + b'\n{"d": 4}\n'
    whole = [(2, {"b": 2, "c": 3})] if cut == 16 else []
    assert list(read_lines(path)) == [(1, {"a": 1}), *whole, (3, {"d": 4})]


def test_a_damaged_line_is_named(path):
    damaged = ['{"a": 1,, "b": "{"}', '{"a": 1}}']
    path.write_text("\n".join([*damaged, TOO_DEEP, TOO_LONG]))
    assert list(read_lines(path)) == [*enumerate(damaged, 1), (3, IS_DEEP), (4, IS_LONG)]
    path.write_bytes(b"\x00\xff a table of numbers")
    with pytest.raises(ConfigError, match="--save_rows"):
        require_appendable(str(path), "save_rows")


def test_a_record_may_be_the_first_of_its_folder_but_not_of_two(tmp_path):
    new, deep = tmp_path / "new" / "file.jsonl", tmp_path / "a" / "b" / "file.jsonl"
    require_appendable(str(new))
    append_record(str(new), {"a": 1})
    assert records(new) == [{"a": 1}]
    with pytest.raises(ConfigError):
        require_appendable(str(deep))
    assert not (tmp_path / "a").exists()


def test_a_commit_is_named_alone_only_where_all_python_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr("common.provenance.ROOT", tmp_path)
    assert git_commit() is None
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "kept.py").write_text("")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "notes.txt").write_text("not Python")
    assert (clean := git_commit()) and len(clean) == 40
    (tmp_path / "policy.py").write_text("")
    assert git_commit() == f"{clean}-dirty"
    (tmp_path / "kept.py").write_text("changed = 1")
    assert git_commit() == f"{clean}-dirty"


def test_a_killed_writer_leaves_the_old_file_and_a_folder_that_goes_after_a_day(tmp_path: Path):
    path = tmp_path / "a [b].txt"
    write_text(path, "before")
    if not (writer := os.fork()):
        with atomic_path(path) as partial:
            partial.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(writer, 0)[1] == signal.SIGKILL and path.read_text() == "before"
    (left,) = (folder for folder in tmp_path.iterdir() if folder.is_dir())
    write_text(path, "after")
    assert left.is_dir(), "its writer may be at work"
    os.utime(left, (left.stat().st_mtime - 2 * DAY,) * 2)
    write_text(path, "last")
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "last"


def test_two_writers_at_once_both_write_a_whole_file(tmp_path: Path):
    path = tmp_path / "file.txt"
    with atomic_path(path) as slow:
        slow.write_text("slow")
        write_text(path, "quick")
        assert path.read_text() == "quick"
    assert path.read_text() == "slow" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", [OSError, RuntimeError, SafetensorError])
def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, kind: type[Exception]):
    path = tmp_path / "file"
    write_text(path, "before")
    with pytest.raises(CheckpointError, match="No space left"), atomic_path(path) as partial:
        partial.write_text("half")
        raise kind("No space left on device")
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "before"
