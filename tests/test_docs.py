"""The pages' own links lead somewhere, and their commands name scripts and flags that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "reproduce/README.md"]
SOURCES = ("engine", "reproduce", "tests")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_commands_name_scripts_and_flags_that_there_are():
    """Every `python path.py` of a page, and every flag of its lines that begin with such a command."""
    code = "\n".join(path.read_text() for name in SOURCES for path in (ROOT / name).rglob("*.py"))
    code += "".join((ROOT / name).read_text() for name in ("download.py", "convert_hf_checkpoint.py"))
    known = set(re.findall(r'"--(\w+)"', code)) | {"benchmark"}
    checked = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:\S+=\S+ )*(?:python|torchrun|srun)[^\n]*", text, flags=re.MULTILINE):
            scripts = re.findall(r"(?<![\w/.-])((?:tests|reproduce)/\S+\.py)", line)
            assert all((ROOT / script).is_file() for script in scripts), line
            if scripts:
                flags = re.findall(r" --(\w+)", line.partition("#")[0].partition(".py")[2])
                assert set(flags) <= known, (page.name, line)
                checked += len(flags)
    assert checked > 30
