"""Command lines: which words are read as what, what is refused, which flags are only remarked upon, and help."""

import re
from dataclasses import dataclass, field
from typing import Literal

import pytest
from programs import BENCHMARKS, TERMINAL, run

from bench.draft_flags import draft_flags
from common.cli import read
from common.errors import ConfigError
from common.flags import Common


@dataclass(frozen=True)
class Inner:
    """Some flags."""

    gammas: Common[tuple[int, ...]] = (3,)
    """how many"""
    compile: bool = False
    """whether"""
    draft: Literal["self", "ngram"] | None = None
    """kind of draft"""
    budget: int | Literal["auto"] = 8
    """entries"""


@dataclass(frozen=True)
class Flags:
    """A program's flags."""

    model: str
    """path"""
    rows: int = 1  # together
    inner: Inner = field(default_factory=Inner)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(Flags, argv, "program.py")
    return str(caught.value)


def test_flags_are_fields_at_any_depth():
    assert read(Flags, ["--model", "m"]) == Flags("m")
    given = read(Flags, ["--gammas", "1", "2", "--model=m", "--compile", "--draft", "ngram"])
    assert given == Flags("m", inner=Inner((1, 2), True, "ngram"))


@pytest.mark.parametrize(
    "argv,named",
    [
        ([], "--model"),
        (["--model", "m", "--draft", "ngrm"], "self, ngram"),
        (["--model", "m", "--draft", "None"], "None"),
        (["--model", "m", "--budget", "0.1"], "--budget"),
        (["--model", "m", "--gammas"], "--gammas"),
        (["--model", "m", "--zzz"], "--zzz"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(argv, named):
    said = refusal(*argv)
    assert named in said and "program.py" in said


def test_help_shows_common_flags_and_help_all_every_flag(capsys):
    said = []
    for word in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as ending:
            read(Flags, [word], "program.py")
        assert not ending.value.code
        said.append(re.findall(r"^. (--(?!help)\w+)", capsys.readouterr().out, re.MULTILINE))
    every = ["--model", "--rows", "--gammas", "--compile", "--draft", "--budget"]
    assert said == [every[:3], every]


def test_values_of_unknown_flags_are_not_repeated():
    """A value behind a mistyped flag may be a secret."""
    for argv in (["--zzz=secret"], ["secret"], ["--compile", "secret"], ["--draft=ngram", "secret=1", "sec-ret"]):
        assert "sec" not in refusal("--model", "m", *argv)
    assert "hf_secret" not in run("download.py", ["--hf_tok", "hf_secret"]).refusal


@pytest.mark.parametrize(
    ("flags", "useless"),
    [
        ("--p_min 0.5 --text_match 4", ["--p_min", "--text_match"]),
        ("--draft ngram --draft_budget 32 --max_ngram 2", ["--draft_budget"]),
        ("--gamma 0 --draft_policy snapkv --draft_budget 64", ["--draft_policy", "--draft_budget"]),
        ("--gamma_schedule confidence --p_min 0.5 --draft_budget 32", []),
    ],
)
def test_a_draft_flag_without_effect_is_a_note(flags: str, useless: list[str], capsys):
    read(draft_flags(), flags.split()).config()
    assert sorted(re.findall(r"--\w+", capsys.readouterr().err)) == sorted(useless)


@pytest.mark.parametrize("program", [*BENCHMARKS, "foretoken.py", *TERMINAL])
def test_help_is_short(program: str):
    ended = run(program, ["--help"])
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err
    assert len({*re.findall(r"(?<!\S)--\w+", ended.out)}) <= 21


def test_the_batch_size_has_a_long_name():
    assert "--B" in run("tests/selfspec_benchmark.py", ["--batch_size", "many"]).refusal
