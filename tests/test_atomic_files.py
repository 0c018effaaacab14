"""Files that are written whole or not at all, whoever writes and whoever is killed meanwhile."""

import errno
import fcntl
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from programs import ROOT

from models.checkpoints.manifest import atomic_path, write_text

START = """
import os, signal, sys
from pathlib import Path
from models.checkpoints.manifest import atomic_path
with atomic_path(Path(sys.argv[1])) as partial:
    partial.write_text("half")
"""
KILLED = START + "    os.kill(os.getpid(), signal.SIGKILL)"
WRITING = (
    START
    + """    print("writing", flush=True)
    sys.stdin.read()
    partial.write_text(partial.read_text() + ", whole")
"""
)
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def test_a_killed_writer_leaves_what_was_there_and_the_next_one_its_file_alone(tmp_path: Path):
    path = tmp_path / "a [b].txt"
    write_text(path, "before")
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)
        assert ended.returncode == -signal.SIGKILL and path.read_text() == "before"
        assert len([*tmp_path.iterdir()]) == 2
    write_text(path, "after")
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and path.read_text() == "after"


def test_two_writers_at_once_both_write_a_whole_file(tmp_path: Path):
    """Neither finds the other by its process id or host name, which in two containers are often the same."""
    path = tmp_path / "file.txt"
    with atomic_path(path) as slow:
        slow.write_text("half")
        with subprocess.Popen([sys.executable, "-c", WRITING, str(path)], cwd=ROOT, **PIPES) as other:
            assert other.stdout.readline() == "writing\n"
            write_text(path, "a third one")
            assert path.read_text() == "a third one"
            other.communicate("go on")
        assert other.returncode == 0 and path.read_text() == "half, whole"
        with atomic_path(path) as quick:
            quick.write_text("quick")
        assert path.read_text() == "quick" and slow.read_text() == "half"
    assert path.read_text() == "half" and [*tmp_path.iterdir()] == [path]


def test_without_locks_files_are_written_and_nothing_is_taken_for_left_over(tmp_path: Path, monkeypatch):
    def flock(file: BinaryIO, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with atomic_path(tmp_path / "file.txt") as partial:
        partial.write_text("slow")
        write_text(tmp_path / "file.txt", "quick")
    assert (tmp_path / "file.txt").read_text() == "slow" and len([*tmp_path.iterdir()]) == 1
