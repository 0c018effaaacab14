"""The pages' own links lead somewhere, and their commands can be read."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.bench.arguments import Parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "reproduce/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    rooms = "common|kv_cache|models|engine|tests|reproduce|docs"
    named = re.findall(rf"`((?:{rooms})/[\w/]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if "/results/" not in name and not (ROOT / name).exists()]


def commands(page: Path) -> list[str]:
    """The page's lines and code spans that begin with python or torchrun; `\\` joins lines."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^(?:\w+=\S+ )*(?:srun )?(?:\S+/)?((?:python|torchrun) .*)$", fenced, re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return lines + [" ".join(span.split()) for span in re.findall(r"`((?:python|torchrun)\s[^`]+)`", prose)]


class Read(Exception):
    """A command line was read, as the arguments that it carries."""


# What a page's commands call that the reader makes.
MADE_UP = {"yours"}


@pytest.fixture
def arguments_of(monkeypatch: pytest.MonkeyPatch):
    """Starts a command's program up to where it has read its flags; what it read, None of programs not ours."""
    read = Parser.parse_args

    def read_only(self: Parser, args: Any = None, namespace: Any = None) -> Any:
        raise Read(read(self, args, namespace))

    def arguments_of(command: str) -> argparse.Namespace | None:
        words = [word for word in shlex.split(command, comments=True) if word not in MADE_UP]
        at = next((index for index, word in enumerate(words) if word == "-m" or word.endswith(".py")), None)
        if at is None:
            return None
        program, *flags = words[at:]
        if program == "-m":
            program, *flags = words[at + 1].replace(".", "/") + "/__main__.py", *flags[1:]
            if not (ROOT / Path(program).parts[0]).exists():
                return None  # a module of another package
        monkeypatch.setattr(sys, "argv", [program, *flags])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(Read) as reading:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        return reading.value.args[0]

    monkeypatch.setattr(Parser, "parse_args", read_only)
    return arguments_of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_commands_can_be_read_by_their_programs(page, arguments_of):
    """With the flags and values that are on the page, by the program that is."""
    for command in commands(page):
        arguments_of(command)


def test_commands_write_where_git_does_not_look(arguments_of):
    """Those that users are told of, and every command of reproduce/; what is committed is made as CONTRIBUTING says."""
    told = [command for page in PAGES if page.name != "CONTRIBUTING.md" for command in commands(page)]
    told += [f"python reproduce/{file.name}" for file in (ROOT / "reproduce").glob("*.py") if file.name != "plot.py"]
    written = set()
    for args in filter(None, map(arguments_of, told)):
        if "page" not in args:  # made of records, by maintainers
            written |= {getattr(args, flag, None) for flag in ("output", "save_rows", "figures")}
    paths = {os.path.abspath(ROOT / path) for path in written - {None}}
    asked = "\n".join(paths)
    ignored = subprocess.run(["git", "check-ignore", "--stdin"], cwd=ROOT, input=asked, capture_output=True, text=True)
    assert len(paths) > 5 and paths - set(ignored.stdout.splitlines()) == set()


def test_commands_are_found():
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 40 and any("-m engine.cost_model" in command for command in found)
    assert any(command.startswith("torchrun --nnodes=2") for command in found)
