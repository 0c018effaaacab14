"""What every command line of the project says of flags that it does not have, and its help."""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from programs import BENCHMARKS, ROOT, TERMINAL, Ended, python, run

from common.cli import read
from common.errors import ConfigError, UserError, flag
from engine.bench.draft_flags import draft_flags


@dataclass(frozen=True)
class Inner:
    """Some flags."""

    gammas: tuple[int, ...] = (3,)
    """how many"""
    compile: bool = False
    """whether"""
    draft: Literal["self", "ngram"] | None = None
    """what"""


@dataclass(frozen=True)
class Flags:
    """A program's flags."""

    model: str
    """where"""
    inner: Inner = field(default_factory=Inner)


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(Flags, argv, "program.py")
    return str(caught.value)


def test_flags_are_the_fields_however_deep():
    assert read(Flags, ["--model", "m"]) == Flags("m")
    given = read(Flags, ["--gammas", "1", "2", "--model=m", "--compile", "--draft", "ngram"])
    assert given == Flags("m", Inner((1, 2), True, "ngram"))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_has_no_frame_whatever_characters_a_terminal_has_for_one(encoding):
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding=encoding)):
        said = refused("--model", "m", "--draft", "ngrm").splitlines()
    assert len(said) == 5 and said[-1] == "  fix:      perhaps you meant ngram; see --help"


def test_values_of_what_is_no_flag_are_not_repeated():
    for argv in (["--zzz=secret"], ["secret"], ["--compile", "secret"], ["--draft=ngram", "secret=1", "sec-ret"]):
        assert "sec" not in refused("--model", "m", *argv)


def test_what_is_required_is_named_and_none_is_no_value():
    assert "seen:     Missing from program.py: --model STR where (required)\n" in refused()
    assert "'None'" in refused("--model", "m", "--draft", "None")


@pytest.mark.parametrize(
    ("flags", "advised"),
    [
        ("--p_min 0.5", "--gamma_schedule confidence"),
        ("--text_match 4", "--text_drafts suffix"),
        ("--p_min 0.5 --text_match 4", "--gamma_schedule confidence and --text_drafts suffix"),
        ("--inner_gamma 2", "--draft_of_draft streaming"),
        ("--draft_of_draft ngram --inner_budget 16", "--draft_of_draft streaming"),
        ("--inner_gamma 2 --draft_budget 32", ""),
        ("--draft_of_draft streaming --text_match 4", ""),
        ("--draft_of_draft streaming --p_min 0.5", ""),
        *((f"{draft} --p_min 0.5", "") for draft in ("--draft ngram", "--draft suffix", "--gamma 0", "--gamma auto")),
    ],
)
def test_what_an_option_needs_is_advised_where_it_helps(flags, advised):
    def accept(words: str) -> None:
        read(draft_flags(), words.split()).config()

    with pytest.raises(ConfigError) as caught:
        accept(flags)
    assert str(caught.value).partition(", or add ")[2] == advised
    if advised:
        accept(f"{flags} {advised.replace(' and ', ' ')}")


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
def test_help_is_printed(program: str):
    ended = run(program, ["--help"])
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err


def test_a_program_outside_of_the_checkout_is_called_by_its_file(monkeypatch, tmp_path):
    """As `python -m pytest` of a virtual environment that lies elsewhere."""
    monkeypatch.setattr("sys.argv", [str(tmp_path / "__main__.py")])
    with pytest.raises(ConfigError, match=r"where:    __main__\.py\n"):
        read(Flags, ["--zzz"])


def test_flags_of_a_command_are_put_behind_it():
    for argv in (["--B", "1", "compare"], ["--B=1", "--zzz", "compare"]):
        assert run("foretoken.py", argv).err.endswith("fix:      put --B behind compare\n")
    near = run("foretoken.py", ["--gama", "2", "compare"]).err
    assert near.endswith("fix:      perhaps you meant --gamma; see --help\n")


def test_a_command_that_is_none_may_be_near_one():
    assert "seen:     compar\n  required: a command: compare, " in (
        said := run("foretoken.py", ["compar", "--B", "1"]).err
    )
    assert said.endswith("fix:      perhaps you meant compare; see --help\n")
