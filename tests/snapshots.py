"""What users see of the programs, kept as files: flags, the keys of JSON records, and what is said of bad flags.

    python tests/snapshots.py            # run every command line in tests/snapshots/ again, and write what is seen
    python tests/snapshots.py --check    # only print how that differs from what is kept

A command line is added by its text, with nothing behind it; words NAME=VALUE before its flags are environment
variables. All are run in one process, in a folder of tiny checkpoints, texts and records. What depends on the machine
or on a version is masked.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import torch

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).resolve().parent / "snapshots"
COST_MODEL = "python -m engine.cost_model"
PROGRAMS = (
    *("download.py", "convert_hf_checkpoint.py", COST_MODEL),
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


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, what it printed, and what it said on stderr."""

    code: object
    out: str
    err: str


def run(program: str, arguments: Sequence[str]) -> Ended:
    """Run a program in this process and the working directory, as if there were neither a GPU nor a network."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", [program, *arguments]),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch("torch.cuda.is_available", lambda: False),
        mock.patch("torch.cuda.device_count", lambda: 0),
        mock.patch("huggingface_hub.snapshot_download", _unreachable),
        mock.patch("huggingface_hub.HfApi.model_info", _unreachable),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(action="ignore"),
    ):
        try:
            if program == COST_MODEL:
                runpy.run_module("engine.cost_model", run_name="__main__")
            else:
                runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as ending:
            code = ending.code or 0
        except Exception as error:  # a bug, whose traceback would be printed
            code = 1
            err.write(f"{type(error).__name__}: {error}")
    return Ended(code, out.getvalue(), err.getvalue())


def _unreachable(*args: object, **kwargs: object) -> NoReturn:
    raise OSError("no network")


class _ParserSeen(BaseException):
    """Carries a program's parser past all that handles errors."""


def flags_of(program: str) -> dict[str, Any]:
    """Its flags by their first name: all names, what they take, whether they are required, default, choices.

    The one place that knows how programs read command lines.
    """

    def stop(parser: object, *args: object, **kwargs: object) -> NoReturn:
        raise _ParserSeen(parser)

    try:
        with mock.patch("argparse.ArgumentParser.parse_args", stop):
            run(program, [])
    except _ParserSeen as seen:
        actions = [action for action in seen.args[0]._actions if action.dest != "help"]
    flags = {}
    for action in actions:
        many = action.nargs not in (None, 0) or type(action).__name__ == "_AppendAction"
        names = sorted(action.option_strings) or [action.dest]
        flags[names[0]] = {
            "names": names,
            "takes": "flag" if action.nargs == 0 else "many" if many else "one",
            "required": action.required,
            "default": masked(str(action.default)) if isinstance(action.default, (Path, str)) else action.default,
            "choices": None if action.choices is None else list(action.choices),
        }
    return dict(sorted(flags.items()))


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
    """What each command line is told, and its exit code; some that might be refused are not."""
    return {command: _told(_run_line(program, command)) for command in commands}


def _run_line(program: str, command: str) -> Ended:
    words = shlex.split(command)
    environment = dict(word.split("=", 1) for word in takewhile(re.compile(r"[A-Z_]+=").match, words))
    for path in WRITTEN:
        path.unlink(missing_ok=True)
    with mock.patch.dict(os.environ, environment):
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
    text = re.sub(r"\(choose from .*\)", lambda choices: choices[0].replace("'", ""), text)  # quoted until Python 3.12
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
    if isinstance(value, list):
        begin, end, entries = "[", "]", [dump(entry, depth - 1) for entry in value]
    else:
        begin, end = "{", "}"
        entries = [f"{json.dumps(name)}: {dump(entry, depth - 1)}" for name, entry in value.items()]
    return "\n".join([begin, textwrap.indent(",\n".join(entries), " "), end])


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_values(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | changes).encode()


def with_words(**ids: int) -> Callable[[bytes], bytes]:
    """A tokenizer with other ids."""

    def change(content: bytes) -> bytes:
        tokenizer = json.loads(content)
        tokenizer["model"]["vocab"] |= ids
        return json.dumps(tokenizer).encode()

    return change


# Checkpoints of which something is wrong: copies of what, and what becomes of their files, None for nothing.
UNLISTED: dict[str, Callable[[bytes], bytes] | None] = {"manifest.json": None}
DAMAGED: dict[str, tuple[str, dict[str, Callable[[bytes], bytes] | None]]] = {
    "weightless": ("checkpoint", {"model.pth": None}),
    "configless": ("checkpoint", {"config.json": None}),
    "wordless": ("checkpoint", {"tokenizer.json": None}),
    "cut": ("checkpoint", {"model.pth": half, **UNLISTED}),
    "no_json": ("checkpoint", {"config.json": half, **UNLISTED}),
    "a_list": ("checkpoint", {"config.json": lambda content: b"[]", **UNLISTED}),
    "other_config": ("checkpoint", {"config.json": with_values(intermediate_size=100), **UNLISTED}),
    "listed_config": ("checkpoint", {"config.json": with_values(rms_norm_eps=1)}),
    "bad_manifest": ("checkpoint", {"manifest.json": half}),
    "more_words": ("checkpoint", {"tokenizer.json": with_words(**{"1": 257}), **UNLISTED}),
    "other_words": ("checkpoint", {"tokenizer.json": with_words(a=66, b=65), **UNLISTED}),
    "no_tokenizer_json": ("checkpoint", {"tokenizer.json": lambda content: b"{", **UNLISTED}),
    "no_weights": ("download", {"model.safetensors": None}),
    "cut_weights": ("download", {"model.safetensors": half}),
    "no_norm": ("download", {"model.safetensors": lambda content: content.replace(b"model.norm.w", b"model.nrom.w")}),
    "other_sizes": ("download", {"config.json": with_values(intermediate_size=100)}),
    "nan_weights": ("download", {"model.safetensors": lambda content: content[:-4] + b"\0\0\xc0\x7f"}),
    "no_words": ("download", {"tokenizer.json": None}),
}


def make_workspace(folder: Path) -> None:
    """What the command lines name, in the working directory: checkpoints, shapes, texts, records, grids."""
    from hf_tiny import random_model, save_folder
    from transformers import LlamaConfig

    made = kept_of("workspace")
    (folder / "download").mkdir()
    save_folder(random_model(LlamaConfig(**made["model"])), folder / "download")
    (folder / "download" / "generation_config.json").unlink(missing_ok=True)
    (folder / "download" / "config.json").write_text(json.dumps(made["model"]))
    converted = run("convert_hf_checkpoint.py", ["--checkpoint_dir", "download", "--out_dir", "checkpoint"])
    assert converted.code == 0, converted.err
    for name, (source, changes) in DAMAGED.items():
        shutil.copytree(folder / source, folder / name)
        for file, change in changes.items():
            before = (folder / name / file).read_bytes()
            (folder / name / file).unlink()
            if change:
                (folder / name / file).write_bytes(change(before))
    for name, values in made["shapes"].items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(made["model"] | values))
    for name, content in made["files"].items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode("latin-1"))


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    torch.set_num_threads(1)
    differs = False
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(Path(name).resolve()):
        make_workspace(Path.cwd())
        for kind, (see, depth) in KINDS.items():
            kept = kept_of(kind)
            seen = {program: see(program, kept.get(program, ())) for program in PROGRAMS}
            texts = [dump(one, depth).splitlines() for one in (kept, seen)]
            difference = list(difflib.unified_diff(*texts, f"{kind}.json, kept", f"{kind}.json, seen", "", "", 2, ""))
            print("\n".join([*difference, f"{kind}: {len(difference)} lines differ"]), flush=True)
            differs |= bool(difference)
            if not sys.argv[1:]:
                (KEPT / f"{kind}.json").write_text(dump(seen, depth) + "\n", encoding="utf-8")
    sys.exit(differs and bool(sys.argv[1:]))


if __name__ == "__main__":
    main()
