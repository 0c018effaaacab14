"""What users see of the programs is what tests/snapshots/ keeps; `python tests/snapshots.py` writes it anew."""

from pathlib import Path

import pytest
import snapshots
from workspace import make_workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots").resolve()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_workspace(folder, snapshots.kept_of("workspace"))
    return folder


@pytest.mark.parametrize("program", snapshots.PROGRAMS)
@pytest.mark.parametrize("kind", snapshots.KINDS)
def test_a_program_is_what_was_kept(kind: str, program: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    see, depth = snapshots.KINDS[kind]
    kept = snapshots.kept_of(kind)[program]
    assert snapshots.dump(see(program, kept), depth) == snapshots.dump(kept, depth)


@pytest.mark.parametrize("kind", snapshots.KINDS)
def test_every_program_is_kept(kind: str) -> None:
    assert list(snapshots.kept_of(kind)) == list(snapshots.PROGRAMS)
