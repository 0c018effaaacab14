"""The one place that reads a command line: a frozen dataclass of configuration in, its flags and help out."""

import io
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from copy import copy
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from functools import reduce
from itertools import chain, dropwhile, takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, OmitArgPrefixes, Suppress
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from common.checkout import ROOT
from common.errors import ConfigError, flag
from common.exit import exit_on_user_error
from common.flags import COMMON

SEE = "see --help_all"
Config = TypeVar("Config")
Main = Callable[[], None]
ORDERED = ConstructorRegistry()


@ORDERED.primitive_rule
def choice_in_order(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Read a value that is a choice among words. Errors list the words in the order of their declaration, where tyro
    itself sorts those of a union by hash."""
    parts = get_args(info.type) if get_origin(info.type) in (Union, UnionType) else ()
    words = tuple(chain.from_iterable(map(get_args, parts)))
    if not parts or any(get_origin(part) is not Literal and part is not NoneType for part in parts):
        return None
    metavar, read_one = f"{{{','.join(words)}}}", operator.itemgetter(0)
    return PrimitiveConstructorSpec(1, metavar, read_one, {None, *words}.__contains__, lambda one: [str(one)], words)


# Flags are the fields' own names, however deep these lie; switches have no `--no_` of their own.
MARKERS = (OmitArgPrefixes, FlagCreatePairsOff, DisallowNone)
STYLE: Any = {"config": MARKERS, "use_underscores": True, "registry": ORDERED, "return_unknown_args": True}


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
    words = [*(sys.argv[1:] if argv is None else argv)]
    prog, about = prog or _program(), (sys.modules["__main__"].__doc__ or "").strip()
    is_short, said = not {"-h", "--help"}.isdisjoint(words), io.StringIO()
    shown: Any = _common(kind) if is_short else kind
    args = ["--help" if word == "--help_all" else word for word in words]
    try:
        with redirect_stderr(said):
            config, unknown = tyro.cli(shown, prog=prog, description=about, args=args, **STYLE)
    except SystemExit as ending:
        if ending.code:
            raise _refused(prog, _first_paragraph(said.getvalue()), words, getattr(kind, "ELSEWHERE", {})) from None
        if shown != kind:
            print("  --help_all shows every flag")
        raise
    if unknown:
        raise _unknown(type(config), prog, unknown, words)
    if empty := list(_emptied(config)):
        raise _unreadable(prog, f"{' '.join(empty)} without a value", "at least one value")
    return config


def _common(kind: Any, is_group: bool = False) -> Any:
    """Return a dataclass with the same flags, whose `--help` leaves out the flags of its groups that are neither
    `Common` nor required; `kind` itself if there are none. kind: a dataclass, or a union of dataclasses."""
    if commands := get_args(kind):
        return reduce(operator.or_, map(_common, commands))
    hints, changed = get_type_hints(kind, include_extras=True), list[tuple[str, Any, Any]]()
    for one in map(copy, fields(kind)):
        hint, default = hints[one.name], one.default_factory
        if is_dataclass(hint):
            group = _common(hint, is_group=True)
            if default is not MISSING:
                one.default_factory = lambda group=group, default=default: group(**vars(default()))
            if group is not hint:
                changed.append((one.name, group, one))
        elif is_group and COMMON not in getattr(hint, "__metadata__", ()) and one.default is not MISSING:
            changed.append((one.name, Annotated[hint, Suppress], one))
    if not changed:
        return kind
    own = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}  # tyro reads its source
    return make_dataclass(kind.__name__, changed, bases=(kind,), namespace=own, frozen=True, kw_only=True)


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
        seen, fix = "unrecognized arguments without a flag", "quote what has spaces, or name a folder of files"
        return _unreadable(prog, seen, "flags of this program", f"{fix}; {SEE}")
    command, seen = kind.__name__.lower(), f"unrecognized arguments: {' '.join(flags)}"
    is_early = argv[0] in words and command in argv
    return _unreadable(prog, seen, "flags of this program", f"put flags behind {command}" if is_early else SEE)


def _refused(prog: str, seen: str, words: Sequence[str], elsewhere: Mapping[str, str]) -> ConfigError:
    """Return the error for what tyro says of a value, or of what is missing. elsewhere: fixes for choices that another
    program has."""
    if commands := re.search(r"Expected one of \{(.*)\}", seen):
        word = next(iter(words), "no command").partition("=")[0]
        return _unreadable(prog, word, f"a command: {commands[1]}")
    if choice := re.search(r"(invalid choice '(.*)' for argument .*)\. Expected one of \((.*)\)", seen):
        required = choice[3].replace("'", "").rstrip(",")
        return _unreadable(prog, choice[1], required, elsewhere.get(choice[2], SEE) if "--draft" in choice[1] else SEE)
    if kinds := re.search(r"(Error parsing .*): no type matching (.*) could be instantiated from \[(.*)\]", seen):
        known = kinds[2].replace("INT", "a whole number").replace("FLOAT", "a number").replace("|", " or ")
        return _unreadable(prog, f"{kinds[1]}: {kinds[3]}", re.sub("[{}]", "", known))
    return _unreadable(prog, seen, "values as --help_all lists them")


def _first_paragraph(boxed: str) -> str:
    """Of a message below a title, in a frame or, where a terminal has no characters for that, between ruled lines."""
    lines = [line.strip("│ ") for line in boxed.splitlines()[1:]]
    text = [line if line.strip("╰╯─-") else "" for line in lines]
    return " ".join(takewhile(bool, dropwhile(operator.not_, text)))


def _unreadable(prog: str, seen: str, required: str, fix: str = SEE) -> ConfigError:
    return ConfigError("the command line cannot be read", prog, seen, required, fix)
