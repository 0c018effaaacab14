"""The one place that reads a command line: a frozen dataclass of configuration in, its flags and help out."""

from common.startup import import_from_now_on

import io
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, OmitArgPrefixes

from common.checkout import ROOT
from common.errors import ConfigError, flag
from common.exit import exit_on_user_error

SEE = "see --help"
Config = TypeVar("Config")
Main = Callable[[], None]
# Flags are the fields' own names, however deep these lie; switches have no `--no_` of their own.
STYLE: Any = {"config": (OmitArgPrefixes, FlagCreatePairsOff, DisallowNone), "use_underscores": True}


def run(main: Callable[[Config], None], kind: type[Config], end: Callable[[Main, Mapping[str, str]], None]) -> None:
    """Read a `kind`, or of a union a subcommand, and run `main` with it. Its `FLAGS`: what it calls fields of a run
    that have another name elsewhere. `end`: what turns a user's errors into exit codes, as `exit_on_user_error`."""
    flags = dict(getattr(kind, "FLAGS", {}))

    def read_and_run() -> None:
        config = read(kind)
        flags.update(getattr(config, "FLAGS", {}))
        main(config)

    end(read_and_run, flags)


def run_alone(main: Callable[[Config], None], kind: type[Config]) -> None:
    """The same, for a program that runs on one process."""
    run(main, kind, exit_on_user_error)


def read(kind: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """What the command line says. Ends the process for `--help`. Errors: ConfigError."""
    import_from_now_on()
    prog, about = prog or _program(), (sys.modules["__main__"].__doc__ or "").strip()
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            config, unknown = tyro.cli(kind, prog=prog, description=about, args=argv, return_unknown_args=True, **STYLE)
    except SystemExit as ending:
        if not ending.code:
            raise
        seen = _first_paragraph(said.getvalue())
        if commands := re.search(r"Expected one of \{(.*)\}", seen):
            word = next(iter(sys.argv[1:] if argv is None else argv), "no command").partition("=")[0]
            fix = _perhaps([word], commands[1].split(", "))
            raise _unreadable(prog, word, f"a command: {commands[1]}", fix) from None
        choice, _, choices = seen.partition("' for argument ")
        fix = _perhaps([choice.partition("'")[2]], re.findall(r"(?<=[(\s])'(.*?)'", choices))
        raise _unreadable(prog, seen, "values as --help lists them", fix) from None
    if unknown:
        raise _unknown(type(config), prog, unknown, sys.argv[1:] if argv is None else argv)
    if empty := list(_emptied(config)):
        raise _unreadable(prog, f"{' '.join(empty)} without a value", "at least one value")
    return config


def _emptied(config: Any) -> Iterator[str]:
    """Lists that were given without a value, though none is not what they are by default."""
    for one in fields(config):
        value = getattr(config, one.name)
        if is_dataclass(value):
            yield from _emptied(value)
        elif value == () != one.default:
            yield flag(one.name)


def _program() -> str:
    path = Path(sys.argv[0]).resolve()
    if path.name == "__main__.py" and path.is_relative_to(ROOT):
        return f"python -m {'.'.join(path.parent.relative_to(ROOT).parts)}"
    return path.name


def _unknown(kind: type, prog: str, words: Sequence[str], argv: Sequence[str]) -> ConfigError:
    """Words that are no flags are not repeated: a value that follows a mistyped flag may be a secret."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not flags:
        before = [*dropwhile(lambda word: word != words[0], reversed(argv))][1:]
        is_once = list(argv).count(words[0]) == 1
        last = next((word for word in before if is_once and re.match(r"--\w", word)), "")
        n_values = "no" if before[:1] == [last] and "=" not in last else "one"
        required = f"{n_values} value behind {last.partition('=')[0]}" if last else "flags of this program"
        seen, fix = "unrecognized arguments without a flag", "quote what has spaces, or name a folder of files"
        return _unreadable(prog, seen, required, f"{fix}; {SEE}")
    seen = f"unrecognized arguments: {' '.join(flags)}"
    told = io.StringIO()
    with redirect_stdout(told), suppress(SystemExit):
        tyro.cli(kind, args=["--help"], **STYLE)
    known = re.findall(r"(?<!\S)--\w+", told.getvalue())
    command, early = kind.__name__.lower(), " ".join(name for name in flags if name in known)
    fix = f"put {early} behind {command}" if early and command in argv[1:] else _perhaps(flags, known)
    return _unreadable(prog, seen, "flags of this program", fix)


def _perhaps(words: Sequence[str], known: Sequence[str]) -> str:
    near = " and ".join(match for word in words for match in get_close_matches(word, known, 1))
    return f"perhaps you meant {near}; {SEE}" if near else SEE


def _first_paragraph(boxed: str) -> str:
    """Of a message below a title, in a frame or, where a terminal has no characters for that, between ruled lines."""
    lines = [line.strip("│ ") for line in boxed.splitlines()[1:]]
    text = [line if line.strip("╰╯─-") else "" for line in lines]
    paragraph = " ".join(takewhile(bool, dropwhile(operator.not_, text)))
    return paragraph.replace("'None', ", "").replace(", 'None')", ")")  # a default, which cannot be given


def _unreadable(prog: str, seen: str, required: str, fix: str = SEE) -> ConfigError:
    return ConfigError("the command line cannot be read", prog, seen, required, fix)
