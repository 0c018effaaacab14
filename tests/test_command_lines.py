"""What every command line of the project says of flags that it does not have."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from engine.bench.arguments import Parser

from common.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
# They call a command line that is elsewhere.
CALLERS = {"engine/cost_model/__main__.py", "reproduce/cost_grid.py"}
# They measure by running others, and give them only the flags that they were given.
HAND_ON = {
    f"reproduce/{name}.py"
    for name in ("acceptance_by_budget", "acceptance_by_context", "cost_model_error", "cost_ratios")
} | {"reproduce/speedup_tables.py", "reproduce/throughput_latency.py"}
REQUIRED = {"tests/longspec_benchmark.py": ["--model", "model.pth"], "reproduce/plot.py": ["results.jsonl"]}


def command_lines() -> list[str]:
    """The programs that read flags, by their path in the project."""
    inside = (file for name in ("engine", "reproduce", "tests") for file in (ROOT / name).rglob("*.py"))
    texts = {
        file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in (*ROOT.glob("*.py"), *inside)
    }
    programs = {name: text for name, text in texts.items() if '\nif __name__ == "__main__":\n' in text}
    reading = {name for name, text in programs.items() if re.search(r"\bparse(_args)?\(", text)}
    return sorted(reading | CALLERS)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a program in this process that has to refuse its flags; what it says."""

    def refusal(program: str, *flags: str) -> str:
        monkeypatch.setattr(sys, "argv", [program, *flags])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ending:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        printed = capsys.readouterr()
        assert (ending.value.code, printed.out) == (2, "")
        return printed.err

    return refusal


def test_all_command_lines_are_found():
    found = command_lines()
    assert {"download.py", "reproduce/sweep.py", "reproduce/performance_page.py", "tests/mutants.py"} <= set(found)
    assert len(found) >= 28


def test_what_lies_in_reproduce_can_be_run():
    """What its commands share is in folders, where nobody takes it for a command."""
    assert {file.name for file in (ROOT / "reproduce").glob("*.py")} == {
        Path(name).name for name in command_lines() if Path(name).parent == Path("reproduce")
    }


@pytest.mark.parametrize("program", command_lines())
def test_an_unknown_flag_is_one_error(program, refusal):
    says = refusal(program, *REQUIRED.get(program, []), "--no_such_flag")
    assert says.startswith("error: the command line cannot be read\n") and says.count("error:") == 1
    assert re.findall(r"^  (\w+): +\S", says, re.MULTILINE) == ["where", "seen", "required", "fix"]
    assert "--no_such_flag" in says and "Traceback" not in says


def test_ctrl_c_while_a_program_imports_is_no_traceback(tmp_path: Path):
    """It is pressed by a stand-in for torch; all programs have the line, three of them are run."""
    lacking = [one for one in command_lines() if "\nimport common.startup\n" not in (ROOT / one).read_text()]
    assert lacking == ["engine/cost_model/__main__.py"], "a module of a package, which is imported first"
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    programs = ("download.py", "tests/selfspec_benchmark.py", "reproduce/gpu.py")
    started = [subprocess.Popen([sys.executable, ROOT / one, "--help"], env=environment, **pipes) for one in programs]
    ends = {one: (*process.communicate(), process.returncode) for one, process in zip(programs, started, strict=True)}
    assert ends == dict.fromkeys(programs, (b"", b"interrupted\n", 130))


class Read(BaseException):
    """A program has read its flags; no handler of errors catches it."""


def test_what_text_is_read_follows_the_model_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto`, or none of its own in a program that hands flags on to others."""
    defaults = {}
    for program in command_lines():

        def read(parser: Parser, *args: object, of: str = program, **kwargs: object) -> None:
            if any(action.dest == "dataset" for action in parser._actions):
                defaults[of] = parser.get_default("dataset")
            raise Read

        monkeypatch.setattr(Parser, "parse_args", read)
        monkeypatch.setattr(sys, "argv", [program, *REQUIRED.get(program, [])])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(Read):
            runpy.run_path(str(ROOT / program), run_name="__main__")
    assert {program for program, default in defaults.items() if default is None} == HAND_ON
    assert {default for program, default in defaults.items() if program not in HAND_ON} == {"auto"}
    assert {"tests/longspec_benchmark.py", "engine/cost_model/__main__.py", "reproduce/certify.py"} <= defaults.keys()


def test_a_flag_is_not_taken_for_a_longer_one():
    parser = Parser(prog="p")
    parser.add_argument("--gammas", type=int, nargs="+")
    assert parser.parse_args(["--gammas", "3"]).gammas == [3]
    with pytest.raises(ConfigError, match="unrecognized arguments: --gamma\n"):
        parser.parse_args(["--gamma", "3"])


@pytest.mark.parametrize(
    "flags,seen",
    [
        (["--hf_tok", "hf_secret"], "unrecognized arguments: --hf_tok"),
        (["--hf_tok=hf_secret"], "unrecognized arguments: --hf_tok"),
        (["--hf_token", "hf_secret", "--no_such_flag"], "unrecognized arguments: --no_such_flag"),
        (["hf_secret"], "unrecognized arguments without a flag"),
    ],
)
def test_a_token_is_not_repeated(flags, seen, refusal):
    says = refusal("download.py", *flags)
    assert f"  seen:     {seen}\n" in says and "hf_secret" not in says
