"""Generated pages are what their records say, are made of records that are there, and go where a page can be."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from programs import Ended, run
from published_runs import gpu_costs, name_of, write

from reproduce import performance_page, published_page
from reproduce.pages.generated_page import GPU

SCRIPTS = pytest.mark.parametrize("script", [performance_page, published_page], ids=name_of)


@pytest.fixture
def make(tmp_path: Path):
    """Runs a script, by default in a folder without records."""

    def make(script: ModuleType, *flags: str, **places: Path) -> Ended:
        places = {"results": tmp_path, "page": tmp_path / "page.md"} | places
        named = [text for flag, place in places.items() for text in (f"--{flag}", str(place))]
        return run(f"reproduce/{name_of(script)}.py", [*flags, *named])

    return make


@SCRIPTS
def test_the_committed_page_is_what_its_records_say(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), script.__name__


@SCRIPTS
def test_check_fails_on_a_stale_page(script, make, tmp_path):
    stale = make(script, "--check")
    assert stale.code == 1 and f"python reproduce/{name_of(script)}.py" in stale.err
    assert make(script).code == make(script, "--check").code == 0
    before = (tmp_path / "page.md").read_text()
    write(tmp_path / GPU, gpu_costs(prefix_len=16384, draft_budget=256))  # which are on both pages
    assert make(script, "--check").code == 1 and (tmp_path / "page.md").read_text() == before
    assert make(script).code == 0 and (tmp_path / "page.md").read_text() != before


@SCRIPTS
def test_a_place_that_cannot_be_is_refused(script, make, tmp_path):
    page, folder = tmp_path / "page.md", tmp_path / "nowhere"
    page.write_text("as it was")
    refused = {
        r"no such folder\n  where:    --results\n.*\n.*\n  fix:      correct the path": {"results": folder},
        r"no such folder\n  where:    --results\n": {"results": page},
        rf"no folder for the page\n  where:    --page\n.*\n.*\n  fix:      create {folder}": {"page": folder / "x.md"},
        r"a folder is no page\n  where:    --page\n": {"page": tmp_path},
    }
    for what, places in refused.items():
        assert re.search(what, make(script, **places).refusal)
    assert page.read_text() == "as it was" and not folder.exists()


def test_figures_are_in_a_folder(make, tmp_path):
    assert "no such folder\n  where:    --figures\n" in make(published_page, figures=tmp_path / "mistyped").refusal
