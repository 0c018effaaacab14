"""Read a command line into a frozen dataclass, whose fields are the program's flags."""

import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, OmitArgPrefixes

from common.errors import ConfigError, flag
from common.exit import exit_on_user_error

Config = TypeVar("Config")
Main = Callable[[], None]
# Flags are the names of fields, also of nested dataclasses; switches have no `--no_` form.
MARKERS = (OmitArgPrefixes, FlagCreatePairsOff, DisallowNone)


def run(main: Callable[[Config], None], kind: type[Config], end: Callable[[Main, Mapping[str, str]], None]) -> None:
    """Read a `kind` from the command line and run `main` with it.

    kind: a dataclass, or a union of dataclasses, each of which is a subcommand. Its `FLAGS` maps fields of a run to the
    names of this program's flags. end: runs a program and turns a user's errors into exit codes, such as
    `exit_on_user_error`.
    """
    flags = dict(getattr(kind, "FLAGS", {}))

    def read_and_run() -> None:
        config = read(kind)
        flags.update(getattr(config, "FLAGS", {}))
        main(config)

    end(read_and_run, flags)


def run_alone(main: Callable[[Config], None], kind: type[Config]) -> None:
    """Read a `kind` from the command line and run `main` with it, in a program of a single process."""
    run(main, kind, exit_on_user_error)


def read(kind: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Return the configuration that a command line describes. Ends the process for `--help`. Errors: ConfigError."""
    prog, about = prog or _program(), (sys.modules["__main__"].__doc__ or "").strip()
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            config: Any = tyro.cli(kind, prog=prog, description=about, args=argv, config=MARKERS, use_underscores=True)
    except SystemExit as ending:
        if ending.code:
            raise _unreadable(prog, _plain(messages.getvalue())) from None
        raise
    if empty := list(_empty_lists(config)):
        raise _unreadable(prog, f"{' '.join(empty)} without a value")
    return config


def _plain(message: str) -> str:
    """Return tyro's message without its frame, and without unknown values, which may be secrets."""
    text = re.sub(r"([\s│╭╮╰╯─]|-{3,})+", " ", message).strip()
    unknown = re.compile(r"(Unrecognized (?:or misplaced )?options: )(.*?)(?= Arguments| Perhaps| For full|$)")
    return unknown.sub(lambda found: found[1] + " ".join(re.findall(r"--?[a-zA-Z]\w*", found[2])), text)


def _empty_lists(config: Any) -> Iterator[str]:
    """Yield the flags that need values and have none."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _empty_lists(value)
        elif value == () != field.default:
            yield flag(field.name)


def _program() -> str:
    path = Path(sys.argv[0])
    return f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name


def _unreadable(prog: str, seen: str) -> ConfigError:
    return ConfigError("the command line cannot be read", prog, seen, "flags and values of this program", "see --help")
