"""Read a command line into a frozen dataclass, whose fields are the program's flags.

Only programs import this module. From then on Ctrl-C ends them with a line, also while they import the others.
"""

import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, OmitArgPrefixes, Positional, UseAppendAction

from common.errors import ConfigError
from common.exit import exit_on_user_error, report_uncaught

Config = TypeVar("Config")
End = Callable[[Callable[[], None], Mapping[str, str]], None]
# Flags are the names of fields, also of nested dataclasses; switches have no `--no_` form.
MARKERS = (OmitArgPrefixes, FlagCreatePairsOff, DisallowNone)
# Names that other programs have for choices.
SYNONYMS = {"fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32"}
SYNONYMS |= {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}

sys.excepthook = report_uncaught


def run(main: Callable[[Config], None], kind: type[Config], end: End = exit_on_user_error) -> None:
    """Read a `kind` from the command line and run `main` with it.

    kind: a dataclass, or a union of dataclasses, each of which is a subcommand. Its `FLAGS` maps fields of a run to the
    names of this program's flags. end: runs a program and turns a user's errors into exit codes.
    """
    flags = dict(getattr(kind, "FLAGS", {}))

    def read_and_run() -> None:
        config = read(kind)
        flags.update(getattr(config, "FLAGS", {}))
        main(config)

    end(read_and_run, flags)


def read(kind: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Return the configuration that a command line describes. Ends the process for `--help`. Errors: ConfigError."""
    prog, about = prog or _program(), (sys.modules["__main__"].__doc__ or "").strip()
    words, messages = sys.argv[1:] if argv is None else argv, io.StringIO()
    try:
        with redirect_stderr(messages):
            how: Any = {"config": MARKERS, "use_underscores": True, "return_unknown_args": True}
            config, unknown = tyro.cli(kind, prog=prog, description=about, args=words, **how)
    except SystemExit as ending:
        if ending.code:
            raise _refusal(prog, _plain(messages.getvalue()), words) from None
        raise
    flags, given = [*_flags(config)], _given(words)
    if unknown:
        raise _unknown(prog, _given(unknown), [name for names, *_ in flags for name in names])
    for names, is_empty, may_repeat in flags:
        if is_empty:
            raise _unreadable(prog, f"{names[0]} without a value")
        again = [name for name in given if name in names]
        if len(again) > 1 and not may_repeat:
            required = "every flag once, by one of its names"
            raise ConfigError("a flag is given twice", prog, ", ".join(again), required, "leave out all but one")
    return config


def _given(words: Sequence[str]) -> list[str]:
    """Return the flags among words, as they are written here, without their values."""
    found = (re.match(r"--?[a-zA-Z][-\w]*", word) for word in words)
    return [re.sub(r"(?<=\w)-", "_", flag[0]) for flag in found if flag]


def _plain(message: str) -> str:
    """Return tyro's message without its frame, title and help, and without unknown values, which may be secrets."""
    text = re.sub(r"([\s│╭╮╰╯─]|-{3,})+", " ", message.partition("\n")[2])
    return re.sub(r" (Argument helptext|For full helptext|Unrecognized options).*", "", text).strip()


def _refusal(prog: str, message: str, words: Sequence[str]) -> ConfigError:
    """Return the error for a command line that tyro refused with a message."""
    chosen = r"(?:invalid choice '(.*)' for argument '(.*)'\. )?Expected one of [({](.*?)[)}]"
    number = r"(invalid literal for int\(\) with base 10|could not convert string to float): (['\"])(.*?)\2"
    if (flag := re.match(r"Error parsing (\S+):", message)) and (parsed := re.search(number, message)):
        reason, _, value = parsed.groups()
        required = "an integer" if "int" in reason else "a number"
        kinds = re.search(r"no type matching (\S+)", message)
        others = [name for name in re.split(r"[|{}]+", kinds[1] if kinds else "") if name not in ("", "INT", "FLOAT")]
        what, fix = "a flag has no such value", f"give {required}"
        return ConfigError(what, flag[1], value, " or ".join([required, *others]), fix)
    if (listed := re.search(chosen, message)) is None:
        return _unreadable(prog, message)
    value, where, names = listed.groups()
    what = "a flag has no such value" if where else "there is no such subcommand"
    if not (where or words):
        what = "a subcommand is missing"
    value = value or next((word for word in words[:1] if word[:1] != "-"), "none")
    choices = sorted({*re.findall(r"[^', ]+", names)} - {"None"})
    likely = [*get_close_matches(SYNONYMS.get(value, value), choices, 1), "one of these"]
    return ConfigError(what, where or prog, value, ", ".join(choices), f"use {likely[0]}")


def _unknown(prog: str, seen: Sequence[str], known: Sequence[str]) -> ConfigError:
    """Return the error for flags that the program does not have, or for a value that belongs to none."""
    if not seen:
        return _unreadable(prog, "a value without a flag")
    if misplaced := [name for name in seen if name in known]:
        what, fix = "a flag of the subcommand stands before it", "begin with the subcommand"
        return ConfigError(what, prog, ", ".join(misplaced), "flags after the subcommand", fix)
    if switches := [flag for flag in seen if flag.startswith("--no_") and f"--{flag[5:]}" in known]:
        return ConfigError("a switch has no such form", prog, switches[0], "the switch alone", "leave it out")
    near = [
        max(sorted(close), key=lambda name: SequenceMatcher(None, name, flag).ratio())  # the first by name of equals
        for flag in seen
        if (close := get_close_matches(flag, known))
    ]
    fix = f"use {', '.join(near)}, or see --help" if near else "see --help"
    return ConfigError("there is no such flag", prog, ", ".join(seen), "flags of this program", fix)


def _flags(config: Any) -> Iterator[tuple[list[str], bool, bool]]:
    """Yield the names of every flag, whether it is a list without a value, and whether it may be given repeatedly."""
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        value, markers = getattr(config, field.name), getattr(hints[field.name], "__metadata__", ())
        if is_dataclass(value):
            yield from _flags(value)
        else:
            named = [marker for marker in markers if hasattr(marker, "aliases")]
            names = [marker.name for marker in named if marker.name] or [field.name]
            aliases = [alias for marker in named for alias in marker.aliases or ()]
            first = names[0] if Positional in markers else f"--{names[0]}"
            yield [first, *aliases], value == () != field.default, UseAppendAction in markers


def _program() -> str:
    path = Path(sys.argv[0])
    return f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name


def _unreadable(prog: str, seen: str) -> ConfigError:
    return ConfigError("the command line cannot be read", prog, seen, "flags and values of this program", "see --help")
