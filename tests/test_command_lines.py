"""Command lines: unknown flags and values, flags without effect, and help."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from programs import BENCHMARKS, COST_MODEL, ROOT, TERMINAL, Ended, python, run

from bench.draft_flags import draft_flags
from common.cli import read
from common.errors import ConfigError, UserError, flag


@dataclass(frozen=True)
class Inner:
    """Some flags."""

    gammas: tuple[int, ...] = (3,)
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


def test_an_unknown_choice_is_refused():
    assert "ngrm" in refused("--model", "m", "--draft", "ngrm")


def test_values_of_what_is_no_flag_are_not_repeated():
    for argv in (["--zzz=secret"], ["secret"], ["--compile", "secret"]):
        assert "sec" not in refused("--model", "m", *argv)


def test_what_is_required_is_named_and_none_is_no_value():
    assert "--model" in refused()
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
    for program in ("convert_hf_checkpoint.py", "tests/selfspec_benchmark.py", "reproduce/gpu.py"):
        assert python(ROOT / program, PYTHONPATH=str(tmp_path)) == Ended(130, "", "interrupted\n")


@pytest.mark.parametrize("program", [*BENCHMARKS, "foretoken.py", *TERMINAL])
def test_help_ends_well(program: str):
    ended = run(program, ["--help"])
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err


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
