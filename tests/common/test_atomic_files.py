"""Files are written whole or not at all, also by two writers at once and by writers that are killed."""

import os
import signal
from pathlib import Path

import pytest
from safetensors import SafetensorError

from common.errors import CheckpointError
from models.checkpoints.manifest import DAY, atomic_path, write_text


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
