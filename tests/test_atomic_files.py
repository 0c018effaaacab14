"""Files that are written whole or not at all, whoever writes and whoever is killed meanwhile."""

import signal
import subprocess
import sys
from pathlib import Path

from programs import ROOT

from models.checkpoints.manifest import atomic_path, write_text

KILLED = """
import os, signal, sys
from pathlib import Path
from models.checkpoints.manifest import atomic_path
with atomic_path(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_what_was_there_and_the_next_one_its_file_alone(tmp_path: Path):
    path = tmp_path / "a [b].txt"
    write_text(path, "before")
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)
        assert ended.returncode == -signal.SIGKILL and path.read_text() == "before"
        assert len([*tmp_path.iterdir()]) == 2
    write_text(path, "after")
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and path.read_text() == "after"


def test_what_another_process_writes_is_left_alone(tmp_path: Path):
    """Of one that lives: this test's parent stands for it."""
    path = tmp_path / "file.txt"
    with atomic_path(path) as partial:
        partial.write_text("whole")
        own = partial.parent
        other = own.with_suffix(".1")
        other.mkdir()
        write_text(tmp_path / "another.txt", "x")
        assert partial.is_file()
    write_text(path, "again")
    assert other.is_dir() and not own.exists() and path.read_text() == "again"
