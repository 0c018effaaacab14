"""A page is not made from records that are not there, nor where none can be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from reproduce import performance_page, published_page

SCRIPTS = pytest.mark.parametrize("script", [performance_page, published_page], ids=lambda module: module.__name__)


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a script that has to refuse one of its places, and to leave the committed pages alone."""

    def refuse(script, what: str, **places: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("as it was")
        places = {"results": tmp_path, "page": page} | places
        flags = [text for flag, place in places.items() for text in (f"--{flag}", str(place))]
        monkeypatch.setattr(sys, "argv", ["page", *flags])
        with pytest.raises(ConfigError, match=what):
            script.main()
        assert page.read_text() == "as it was"

    return refuse


@SCRIPTS
def test_records_are_in_a_folder(script, refuse, tmp_path):
    for place in (tmp_path / "mistyped", tmp_path / "page.md"):
        seen = f"no such folder\n  where:    --results\n  seen:     {place}\n"
        refuse(script, f"{seen}.*\n  fix:      correct the path, or leave out --results$", results=place)


@SCRIPTS
def test_a_page_is_a_file_in_a_folder(script, refuse, tmp_path):
    folder = tmp_path / "nowhere"
    seen = f"no folder for the page\n  where:    --page\n  seen:     {folder / 'x.md'}\n"
    refuse(script, f"{seen}.*\n  fix:      create {folder}, or leave out --page$", page=folder / "x.md")
    refuse(script, "a folder is no page\n  where:    --page\n", page=tmp_path)


def test_figures_are_in_a_folder(refuse, tmp_path):
    refuse(published_page, "no such folder\n  where:    --figures\n", figures=tmp_path / "mistyped")
