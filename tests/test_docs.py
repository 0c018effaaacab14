"""The pages' own links lead somewhere, and the files that they name are there."""

import re

import pytest
from programs import ROOT

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "reproduce/README.md"]
ROOMS = "common|kv_cache|models|engine|bench|cost_model|terminal|serving|tests|reproduce|docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """But for records that nobody has made yet."""
    named = re.findall(rf"`((?:{ROOMS})/[\w/]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if "/results/" not in name and not (ROOT / name).exists()]
