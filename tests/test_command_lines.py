"""Command lines: unknown flags and values, flags without effect, and help."""

import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from programs import BENCHMARKS, COST_MODEL, ROOT, TERMINAL, Ended, python, run

from bench.draft_flags import draft_flags
from common.cli import read
from common.errors import ConfigError, UserError, flag
from common.flags import Common


@dataclass(frozen=True)
class Inner:
    """Some flags."""

    gammas: Common[tuple[int, ...]] = (3,)
    """how many"""
    compile: bool = False
    """whether"""
    draft: Literal["self", "ngram"] | None = None
    """what"""
    dtype: Literal["auto"] | Literal["z", "b", "y", "a", "x", "c", "w"] = "auto"
    """stored how"""
    budget: int | Literal["auto"] = 8
    """entries"""


@dataclass(frozen=True)
class Flags:
    """A program's flags."""

    model: str
    """where"""
    rows: int = 1  # together
    inner: Inner = field(default_factory=Inner)


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(Flags, argv, "program.py")
    return str(caught.value)


def test_flags_are_the_fields_however_deep():
    assert read(Flags, ["--model", "m"]) == Flags("m")
    given = read(Flags, ["--gammas", "1", "2", "--model=m", "--compile", "--draft", "ngram"])
    assert given == Flags("m", inner=Inner((1, 2), True, "ngram"))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_has_no_frame_whatever_characters_a_terminal_has_for_one(encoding):
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding=encoding)):
        said = refused("--model", "m", "--draft", "ngrm").splitlines()
    assert len(said) == 5 and said[3:] == ["  required: self, ngram", "  fix:      see --help_all"]


def test_choices_and_kinds_of_values_are_listed_as_they_are_declared():
    assert "required: auto, z, b, y, a, x, c, w\n" in refused("--model", "m", "--dtype", "d")
    assert "--budget: '0.1'\n  required: a whole number or auto\n" in refused("--model", "m", "--budget", "0.1")


def test_help_shows_what_is_common_and_help_all_everything(capsys):
    """A program's flags outside its groups are all common."""
    said = []
    for word in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as ending:
            read(Flags, [word], "program.py")
        assert not ending.value.code
        said.append(capsys.readouterr().out)
    short, whole = said
    every = ["--model", "--rows", "--gammas", "--compile", "--draft", "--dtype", "--budget"]
    flags_of = re.compile(r"^. (--(?!help)\w+)", re.MULTILINE)
    assert flags_of.findall(whole) == every and flags_of.findall(short) == every[:3] and "--help_all" in short
    for text in ("together (default: 1)", "how many (default: 3)"):
        assert text in short and text in whole


def test_values_of_what_is_no_flag_are_not_repeated():
    for argv in (["--zzz=secret"], ["secret"], ["--compile", "secret"], ["--draft=ngram", "secret=1", "sec-ret"]):
        assert "sec" not in refused("--model", "m", *argv)


def test_what_is_required_is_named_and_none_is_no_value():
    assert "seen:     Missing from program.py: --model STR where (required)\n" in refused()
    assert "'None'" in refused("--model", "m", "--draft", "None")


@pytest.mark.parametrize(
    ("flags", "useless"),
    [
        ("--p_min 0.5", ["--p_min"]),
        ("--p_min 0.5 --text_match 4", ["--p_min", "--text_match"]),
        ("--draft_of_draft ngram --inner_budget 16", ["--inner_budget"]),
        ("--inner_gamma 2 --draft_budget 32", ["--inner_gamma"]),
        ("--draft ngram --draft_budget 32 --max_ngram 2", ["--draft_budget"]),
        ("--draft_policy full --draft_budget 32 --gamma 2", ["--draft_budget"]),
        ("--gamma 0 --draft_policy snapkv --draft_budget 64", ["--draft_policy", "--draft_budget"]),
        ("--gamma_schedule confidence --p_min 0.5 --draft_budget 32", []),
    ],
)
def test_a_draft_flag_without_effect_is_a_note(flags: str, useless: list[str], capsys):
    read(draft_flags(), flags.split()).config()
    said = capsys.readouterr().err
    assert said.startswith("note: ") == bool(useless) and len(said.splitlines()) <= 1
    assert sorted(re.findall(r"--\w+", said)) == sorted(useless)


def test_errors_call_fields_as_the_program_does():
    error = UserError(f"{flag('target')}, (--model)", where=flag("model"), seen=1, required=2, fix=flag("gamma"))
    lines = error.told({"target": "--model", "model": "--draft_model"}).splitlines()
    assert lines == ["--model, (--model)", *lines[1:]] and "where:    --draft_model" in lines[1]
    assert lines[-1].endswith(" --gamma") and str(error).startswith("--target, ")


def test_a_token_is_not_repeated():
    for flags in (["--hf_tok", "hf_secret"], ["--hf_token", "hf_secret", "--no_such_flag"], ["hf_secret"]):
        assert "hf_secret" not in run("download.py", flags).refusal


def test_ctrl_c_while_a_program_imports_is_no_traceback(tmp_path: Path):
    """It is pressed by a stand-in for torch."""
    # A shell's background jobs ignore it, and so would what they start.
    heeded = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "torch.py").write_text(heeded + "os.kill(os.getpid(), signal.SIGINT)\n")
    for program in ("convert_hf_checkpoint.py", "tests/selfspec_benchmark.py"):
        assert python(ROOT / program, PYTHONPATH=str(tmp_path)) == Ended(130, "", "interrupted\n")


@pytest.mark.parametrize("program", [*BENCHMARKS, "foretoken.py", *TERMINAL])
def test_help_is_short(program: str):
    short, whole = (run(program, [word]) for word in ("--help", "--help_all"))
    shown, every = (set(re.findall(r"(?<!\S)--\w+", ended.out)) - {"--help_all"} for ended in (short, whole))
    assert short.code == whole.code == 0 and short.out.startswith("usage:"), short.err
    assert shown <= every and len(shown) <= 20
    if program != "foretoken.py":
        assert "--model_name" in every - shown


# With what has to be given beside it.
WITH_BATCH = {"tests/longspec_benchmark.py": ["--model", "m"]}


@pytest.mark.parametrize(
    "program",
    [
        *BENCHMARKS,
        *TERMINAL[:3],
        COST_MODEL,
        *(f"reproduce/{name}.py" for name in ("acceptance", "certify", "spec_bench")),
    ],
)
def test_the_batch_size_has_its_usual_name_too(program: str):
    said = run(program, ["--batch_size", "many", *WITH_BATCH.get(program, [])]).refusal
    assert "--B" in said and "many" in said and "unrecognized" not in said


def test_a_draft_of_another_program_is_said_to_be_there():
    assert "tests/longspec_benchmark.py" in run("tests/selfspec_benchmark.py", ["--draft", "standalone"]).refusal
    assert "tests/selfspec_benchmark.py" in run("tests/longspec_benchmark.py", ["--draft", "ngram"]).refusal
    for words in (["--draft", "standalone"], ["target", "standalone"]):
        assert "standalone:FOLDER" in run("foretoken.py compare", words).refusal


def test_a_python_without_the_packages_is_told_which_one_to_use():
    ended = python("-S", ROOT / "tests/selfspec_benchmark.py")
    assert ended.code == 2 and "Traceback" not in ended.err and "tyro" in ended.err


def test_a_program_outside_of_the_checkout_is_called_by_its_file(monkeypatch, tmp_path):
    """As `python -m pytest` of a virtual environment that lies elsewhere."""
    monkeypatch.setattr("sys.argv", [str(tmp_path / "__main__.py")])
    with pytest.raises(ConfigError, match=r"where:    __main__\.py\n"):
        read(Flags, ["--zzz"])


def test_flags_of_a_command_are_put_behind_it():
    for argv in (["--B", "1", "compare"], ["--B=1", "--zzz", "compare"]):
        assert run("foretoken.py", argv).err.endswith("fix:      put flags behind compare\n")
    assert "put flags" not in run("foretoken.py", ["compare", "--gama", "2"]).err


def test_what_is_no_command_is_told_which_there_are():
    assert "seen:     compar\n  required: a command: compare, " in run("foretoken.py", ["compar", "--B", "1"]).err
