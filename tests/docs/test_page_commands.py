"""The pages: links lead somewhere, programs take the flags of commands, and Python runs without optional packages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench.config import DEFAULT_MODEL
from common import cli
from common.exit import exit_on_user_error
from models.checkpoints import model_source
from tests.support.programs import COST_MODEL, ROOT, afresh, run

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "reproduce/README.md"]
OF_PAGES = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
ROOMS = "common|kv_cache|models|engine|bench|cost_model|terminal|serving|tests|reproduce|docs"
OWN_MODULES = ("cost_model", "reproduce", "serving")
MADE_BY_READERS = {"key_norm": "streaming"}  # a policy that is in its place here
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A command within a sentence.
INLINE = re.compile(r"`((?:python|torchrun) [^`]+)`")


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command of a page that starts Python, with 1 in the place of a shell's variables."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for language, block in FENCED.findall(text) if language in ("", "bash")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += [" ".join(command.split()) for command in INLINE.findall(FENCED.sub("", text))]
    found = []
    for line in lines:
        words = [re.sub(r"\$\{?\w+\}?", "1", word) for word in shlex.split(line, comments=True)]
        starts = [i for i, word in enumerate(words) if Path(word).name in ("python", "torchrun")]
        found += [[Path(words[starts[0]]).name, *words[starts[0] + 1 :]]] if starts else []
    return found


@OF_PAGES
def test_links_lead_to_files_and_files_that_are_named_exist(page: Path) -> None:
    """Records under results/ may not have been made yet."""
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    named = [name for name in re.findall(rf"`((?:{ROOMS})/[\w/]+\.\w+)`", text) if "/results/" not in name]
    paths = [*(page.parent / link for link in links), *map(ROOT.joinpath, named)]
    assert not [path for path in paths if not path.exists()]


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the program of ours that a command starts, and its flags; None for others, such as pytest."""
    launcher, *rest = words
    if launcher == "torchrun":
        at = next(i for i, word in enumerate(rest) if word == "-m" or word.endswith(".py"))
        rest = rest[at:]
    if rest[0] == "-m":
        name, flags = rest[1], rest[2:]
        if name.partition(".")[0] not in OWN_MODULES:
            return None
        special = {"cost_model": (COST_MODEL, flags), "serving": ("foretoken.py", ["serve", *flags])}
        return special.get(name, (f"{name.replace('.', '/')}.py", flags))
    return None if rest[0] == "-c" else (rest[0], rest[1:])


def read_flags(program: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the configuration that a program reads from its flags. AssertionError if it refuses them."""
    read = []
    monkeypatch.setattr(cli, "run", lambda main, kind, *_: exit_on_user_error(lambda: read.append(cli.read(kind)), {}))
    ended = run(program, flags)
    assert ended.code == 0 and (read or "--help" in flags), f"{program} {' '.join(flags)}\n{ended.err}"
    return read


@OF_PAGES
def test_programs_take_the_flags_of_a_pages_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in commands(page):
        if found := program_of(words):
            program, flags = found
            read_flags(program, [MADE_BY_READERS.get(word, word) for word in flags], monkeypatch)


@pytest.mark.parametrize("page", ["README.md", "docs/speculation.md"])
def test_a_pages_python_runs(page: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """With a tiny model in the place of the built-in one; `test_extending.py` runs the code of another page."""
    find = model_source.find_model

    def find_tiny(path: str, *how: Any) -> model_source.ModelSource:
        return find(str(checkpoint / "model.pth") if path == DEFAULT_MODEL else path, *how)

    monkeypatch.setattr("bench.config.find_model", find_tiny)
    blocks = [code for language, code in FENCED.findall((ROOT / page).read_text()) if language == "python"]
    exec("\n".join(blocks), {})
    shares = re.findall(r"[01]\.\d+(?: \[.*\])?$", capsys.readouterr().out, re.MULTILINE)
    assert shares and all(0 <= float(share.split()[0]) <= 1 for share in shares)


# Optional packages, as in an environment of requirements.txt alone on a machine without a GPU.
PROGRAM = """
import runpy, sys
sys.modules.update(dict.fromkeys(("triton", "flash_attn", "llguidance", "matplotlib", "transformers")))
sys.argv = [sys.argv[1], "--draft_policy", "verify_topk", "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    assert not ended.code
import cost_model.report, serving.serve, terminal
from models import load_model, ModelConfig
from kv_cache import FullKVCache, StreamingKVCache
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, SamplingParams, generate
"""


def test_programs_run_from_another_directory_without_optional_packages(tmp_path):
    ended = afresh(PROGRAM, ROOT / "tests/selfspec_benchmark.py", folder=tmp_path)
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err
