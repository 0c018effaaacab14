"""What users see of the programs, kept as files: flags, the keys of JSON records, and what is said of bad flags.

    python tests/snapshots.py            # run every command line in tests/snapshots/ again, and write what is seen
    python tests/snapshots.py --check    # only print how that differs from what is kept

Behind these, programs: only they are run.

A command line is added by its text, with nothing behind it; words NAME=VALUE before its flags are environment
variables. All are run in one process, in a folder of tiny checkpoints, texts and records. What depends on the machine
or on a version is masked.
"""

import contextlib
import difflib
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from programs import COST_MODEL, ROOT, Ended, run
from tyro.conf import Positional
from workspace import make_workspace

from foretoken import SUBCOMMANDS

KEPT = Path(__file__).resolve().parent / "snapshots"
TERMINAL = {f"foretoken.py {kind.__name__.lower()}": kind for kind in get_args(SUBCOMMANDS)}
PROGRAMS = (
    *("download.py", "convert_hf_checkpoint.py", COST_MODEL, *TERMINAL),
    *(f"tests/{name}_benchmark.py" for name in ("baseline", "longspec", "selfspec")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "reproduce").glob("*.py")),
)
ERROR = re.compile(
    r"error: (?P<error>.*?)\n  where: +(?P<where>.*?)\n  seen: +(?P<seen>.*?)\n  required: +(?P<required>.*?)"
    r"\n  fix: +(?P<fix>[^\n]*)",
    re.DOTALL,
)
# Files that command lines name to be written to.
WRITTEN = (Path("out.jsonl"), Path("rows.jsonl"))


class _FlagsSeen(BaseException):
    """Carries a program's flags past all that handles errors."""


def flags_of(program: str) -> dict[str, Any]:
    """Its flags by their first name: all names, what they take, whether they are required, default, choices."""

    def stop(main: object, kind: type, *end: object) -> NoReturn:
        raise _FlagsSeen(dict(sorted(_flags_in(TERMINAL.get(program, kind)))))

    try:
        with mock.patch("common.cli.run", stop):
            ended = run(program, [])
    except _FlagsSeen as seen:
        return seen.args[0]
    raise AssertionError(f"{program} reads no command line: {ended.err}")


def _flags_in(kind: type, own: object = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that the fields of a dataclass are, and of the dataclasses within it; `own`: one that has the defaults."""
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        hint, *said = get_args(hints[one.name]) if get_origin(hints[one.name]) is Annotated else [hints[one.name]]
        required = own is None and one.default is MISSING and one.default_factory is MISSING
        default = None if required else getattr(own, one.name) if own else _default(one)
        if is_dataclass(hint):
            yield from _flags_in(hint, default)
            continue
        positional = any(marker in said for marker in get_args(Positional[str])[1:])
        name = next((how.name for how in said if getattr(how, "name", None)), one.name)
        aliases = [alias for how in said for alias in getattr(how, "aliases", None) or ()]
        defaults = [how.help_behavior_hint for how in said if getattr(how, "help_behavior_hint", None)]
        if default is None and defaults:  # what stands for it is only said
            default = defaults[0].removeprefix("(default: ").removesuffix(")")
        names = sorted([name if positional else f"--{name}", *aliases])
        kinds = [hint, *get_args(hint)]
        choices = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        found = {
            "names": names,
            "takes": "flag" if hint is bool else "many" if {tuple, list} & set(map(get_origin, kinds)) else "one",
            "required": required,
            "default": masked(str(default)) if isinstance(default, (Path, str)) else default,
            "choices": None if {int, float, str, Path} & set(kinds) else choices or None,
        }
        yield names[0], found


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def records_of(program: str, commands: Sequence[str]) -> list[dict[str, Any]]:
    """The keys of the records that each command line prints last and appends to files; equal ones together.

    None of one that is refused.
    """
    found: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for command in commands:
        ended = _run_line(program, command)
        files = "".join(path.read_text() for path in WRITTEN if path.exists())
        lines = [*ended.out.splitlines()[-1:], *files.splitlines()]
        records = [json.loads(line) for line in lines if line.startswith("{")]
        found.setdefault(tuple(dict.fromkeys(tuple(_keys(record)) for record in records)), []).append(command)
    return [{"commands": commands, "records": list(map(list, keys))} for keys, commands in found.items()]


def _keys(record: dict[str, Any]) -> Iterator[str]:
    """In their order; those within a value, or within the first of a list, behind a dot."""
    for key, value in record.items():
        yield key
        inner, name = (value[0], f"{key}[]") if isinstance(value, list) and value else (value, key)
        if isinstance(inner, dict):
            yield from (f"{name}.{within}" for within in inner)


def errors_of(program: str, commands: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each command line is told, and its exit code; some that might be refused are not.

    And whether that is after something was loaded, and which files it leaves.
    """
    found = {}
    for command in commands:
        ended = _run_line(program, command)
        later = {"loaded": "loading " in ended.err, "left": [str(path) for path in WRITTEN if path.exists()]}
        found[command] = _told(ended) | {name: seen for name, seen in later.items() if seen and ended.code}
    return found


def _run_line(program: str, command: str) -> Ended:
    words = shlex.split(command)
    environment = dict(word.split("=", 1) for word in takewhile(re.compile(r"[A-Z_]+=").match, words))
    for path in WRITTEN:
        path.unlink(missing_ok=True)
    unreachable = OSError("no network")
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch("huggingface_hub.snapshot_download", side_effect=unreachable),
        mock.patch("huggingface_hub.HfApi.model_info", side_effect=unreachable),
    ):
        return run(program, words[len(environment) :])


def _told(ended: Ended) -> dict[str, Any]:
    said = ERROR.search(ended.err)
    if said:
        return {"code": ended.code} | {part: masked(text.strip()) for part, text in said.groupdict().items()}
    last = masked("".join(ended.err.strip().splitlines()[-1:]))
    return {"code": ended.code} | ({"said": last} if ended.code else {})


def masked(text: str) -> str:
    """Without paths, versions and amounts of memory that are this machine's."""
    for own, name in ((os.getcwd(), "{folder}"), (str(ROOT), "{root}"), (torch.__version__, "{torch}")):
        text = text.replace(own, name)
    text = re.sub(r"(?<=Expected one of \().*(?=\))", lambda choices: ", ".join(sorted(choices[0].split(", "))), text)
    return re.sub(r"\d[\d.]*(?= [GM]iB)|\d+(?=, the largest batch)", "#", text)


# What a kind of snapshot is of a program, and how deep its JSON is broken into lines.
KINDS: dict[str, tuple[Callable[[str, Any], Any], int]] = {
    "flags": (lambda program, kept: flags_of(program), 2),
    "records": (lambda program, kept: records_of(program, [line for group in kept for line in group["commands"]]), 5),
    "errors": (lambda program, kept: errors_of(program, list(kept)), 3),
}


def kept_of(kind: str) -> dict[str, Any]:
    """What the file of that kind has of each program."""
    return json.loads((KEPT / f"{kind}.json").read_text(encoding="utf-8"))


def dump(value: Any, depth: int) -> str:
    """JSON, whose outer `depth` levels have a line for each entry."""
    if depth == 0 or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, ensure_ascii=False)
    begin, end = "[]" if isinstance(value, list) else "{}"
    named = [("", entry) for entry in value] if begin == "[" else [(f"{json.dumps(k)}: ", v) for k, v in value.items()]
    entries = ",\n".join(name + dump(entry, depth - 1) for name, entry in named)
    return "\n".join([begin, textwrap.indent(entries, " "), end])


def main(words: Sequence[str]) -> bool:
    """Whether anything differs from what is kept."""
    only_check, programs = words[:1] == ["--check"], [word for word in words if word != "--check"] or PROGRAMS
    if not set(programs) <= set(PROGRAMS):
        sys.exit(__doc__)
    torch.set_num_threads(1)
    differs = False
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(Path(name).resolve()):
        make_workspace(Path.cwd(), kept_of("workspace"))
        for kind, (see, depth) in KINDS.items():
            kept = kept_of(kind)
            seen = {one: see(one, kept.get(one, ())) if one in programs else kept.get(one) for one in PROGRAMS}
            texts = [dump(one, depth).splitlines() for one in (kept, seen)]
            difference = list(difflib.unified_diff(*texts, f"{kind}.json, kept", f"{kind}.json, seen", "", "", 2, ""))
            print("\n".join([*difference, f"{kind}.json: {len(difference)} lines differ"]), flush=True)
            differs |= bool(difference)
            if not only_check:
                (KEPT / f"{kind}.json").write_text(dump(seen, depth) + "\n", encoding="utf-8")
    return differs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) and sys.argv[1:2] == ["--check"])
