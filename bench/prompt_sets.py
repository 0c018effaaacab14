"""Reads sets of prompts: conversations with an id and a category, from files or from a known set."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.data import files_of, hub_files, rows_of, unreadable
from common.checkout import ROOT
from common.errors import ConfigError, DataError, flag
from common.say import say
from models.checkpoints.manifest import atomic_path

SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/{revision}/data/spec_bench/question.jsonl"
SPEC_BENCH_REVISION = "fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
SPEC_BENCH_SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
SPEC_BENCH_FILE = ROOT / "data" / "spec_bench" / "question.jsonl"
SPEED_BENCH = "nvidia/SPEED-Bench", "487aa718444e816458d1a0a52bfce7a454285cf4"
# Replaces many texts in SPEED-Bench's public copy; NVIDIA's prepare_data.py fetches them from their sources.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
ID_KEYS, CATEGORY_KEYS = ("question_id", "id", "_id"), ("category", "dataset")
KEYS = (*ID_KEYS, *CATEGORY_KEYS, "prompt", "turns", "context", "input")
FIX = f"fetch it on a connected machine, and name its file: {flag('prompts')} FILE"


@dataclass(frozen=True)
class Prompt:
    """A conversation: the user's message in each turn."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(name: str) -> list[Prompt]:
    """Return the prompts of a .txt, .jsonl or .parquet file, of a folder of .txt files, or of a known set.

    Known sets are `spec-bench`, and `speed-bench` with `/qualitative`, `/throughput_1k` and the like. A row has the key
    `prompt`, or `turns` (Spec-Bench, SPEED-Bench), or `context` and `input` (LongBench). Placeholders are left out,
    with a note. Errors: DataError.
    """
    each = ((file, rows_of(file, KEYS, "prompts")) for file in _files(name))
    found = [_prompt(row, file, number) for file, rows in each for number, row in rows]
    whole = [prompt for prompt in found if not any(PLACEHOLDER in turn for turn in prompt.turns)]
    seen = f"{len(found)} prompts, {len(found) - len(whole)} of them placeholders of a public copy"
    if not whole:
        raise unreadable(Path(name), seen, "at least one prompt", "prompts")
    if len(whole) < len(found):
        say(f"note: {name} has {seen}, which are left out")
    return whole


def by_category(
    prompts: Iterable[Prompt], categories: Sequence[str] = (), per_category: int | None = None
) -> dict[str, list[Prompt]]:
    """Return the first `per_category` prompts of each of `categories`, by default of all. Errors: ConfigError."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category, []).append(prompt)
    if missing := [name for name in categories if name not in found]:
        what, required = "there is no such category", ", ".join(found)
        raise ConfigError(what, flag("categories"), ", ".join(missing), required, "choose among these")
    return {name: found[name][:per_category] for name in categories or found}


def _files(name: str) -> list[Path]:
    kind, _, part = name.partition("/")
    if name == "spec-bench" and not os.path.exists(name):
        return [_spec_bench()]
    if kind == "speed-bench" and not os.path.exists(name):
        return hub_files(*SPEED_BENCH, f"{part or 'qualitative'}/test-*.parquet", FIX)
    return files_of(name, "prompts", [".txt"], "spec-bench, speed-bench/SPLIT")


def _spec_bench() -> Path:
    """Return Spec-Bench's file, fetched from GitHub the first time. Errors: DataError."""
    if SPEC_BENCH_FILE.is_file():
        return SPEC_BENCH_FILE
    url = SPEC_BENCH.format(revision=SPEC_BENCH_REVISION)
    say(f"fetching {url}")
    try:
        with urlopen(url, timeout=60) as answer:
            content = answer.read()
        if (seen := hashlib.sha256(content).hexdigest()) != SPEC_BENCH_SHA256:
            raise OSError(f"sha256 {seen}")
    except (OSError, HTTPException) as error:
        required = f"the file with sha256 {SPEC_BENCH_SHA256}"
        raise DataError("spec-bench could not be fetched", url, error, required, FIX) from None
    with atomic_path(SPEC_BENCH_FILE) as partial:
        partial.write_bytes(content)
    return SPEC_BENCH_FILE


def _prompt(row: object, path: Path, number: int) -> Prompt:
    values: dict[str, Any] = (
        {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {}
    )
    text = values.get("prompt", values.get("turns"))
    if text is None and "context" in values:
        parts = values["context"], values.get("input") or ""
        text = "\n\n".join(filter(None, parts)) if all(isinstance(part, str) for part in parts) else None
    turns: list[Any] = text if isinstance(text, list) else [text]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        seen = f"line {number}: {sorted(row) if isinstance(row, dict) else type(row).__name__}"
        required = "a text under `prompt` or `context`, or a list of texts under `turns`, none of them empty"
        raise unreadable(path, seen, required, "prompts")
    id_, category = (next((values[key] for key in keys if key in values), None) for keys in (ID_KEYS, CATEGORY_KEYS))
    return Prompt(str(number if id_ is None else id_), str(category or "uncategorised"), tuple(turns))
