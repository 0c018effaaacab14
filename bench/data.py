"""Texts of a run: prompts of equal length cut from books, or sets of whole prompts, from files, the built-in book, or
known sets on the network."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import snapshot_download

from bench.config import AUTO
from common.checkout import ROOT
from common.errors import ConfigError, DataError, flag
from common.jsonl import parse_json
from common.say import say, say_once
from models.checkpoints.default_model import DEFAULT_BOOK
from models.checkpoints.manifest import atomic_path
from models.checkpoints.model_source import ModelSource
from models.checkpoints.tokenizer import Tokenizer

# Names that `--dataset` takes; any other value is a path.
BUILT_IN, PG19 = "default", "pg19"
# A copy of deepmind/pg19, which is a loading script without texts, in parquet files.
PG19_REPOSITORY = "emozilla/pg19"
PG19_REVISION = "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8"
PG19_TEST = "data/test-*.parquet"
TEXT_KEY = "text"
# The fewest bytes of a token, on average, in English text.
LEAST_BYTES = 3
PARQUET_ROWS_AT_ONCE = 4
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


def resolve_dataset(name: str, target: ModelSource, n_tokens: int = 0) -> str | None:
    """Return a data set's name without `auto`: the built-in book, or PG-19 if that cannot have `n_tokens` tokens; None
    for random weights."""
    if not target.has_text:
        return None
    is_short = DEFAULT_BOOK.is_file() and n_tokens > DEFAULT_BOOK.stat().st_size / LEAST_BYTES
    if name == AUTO and is_short:
        say_once(f"note: the built-in book is too short for {n_tokens} tokens, so prompts come from PG-19")
    return name if name != AUTO else PG19 if is_short else BUILT_IN


def load_books(dataset: str) -> Iterator[str]:
    """Yield the texts of a data set in a fixed order, each read when it is needed.

    dataset: `default`, the built-in book; `pg19`, the test split of PG-19 (arXiv 1911.05507) from the Hugging Face hub;
    else a .txt file (a single book), a .jsonl or .parquet file (key or column `text`), or a folder of these, sorted by
    name. Errors: DataError, for missing files at the call, for unreadable files on iteration.
    """
    each = ((file, rows_of(file, [TEXT_KEY], "books")) for file in _book_files(dataset))
    return (_text_of(row, file, number) for file, rows in each for number, row in rows)


def make_prompts(books: Iterable[str], tokenizer: Tokenizer, *, n_prompts: int, prefix_len: int) -> list[list[int]]:
    """Cut prompts of `prefix_len` tokens, BOS included: the first stretch of each book, then the second, and so on.

    Prompts differ and do not overlap. No more books are tokenised than are needed. Errors: ConfigError for prompts
    without text, DataError for too little text.
    """
    bos = tokenizer.encode("", add_bos=True)
    length, least = prefix_len - len(bos), f">= {len(bos) + 1}"
    if length < 1:
        raise ConfigError("prompts without any text", "prefix_len", prefix_len, least, f"ask for prefix_len {least}")
    tokenised: list[array[int]] = []
    distinct: dict[bytes, array[int]] = {}
    for stretch in _stretches(books, tokenizer, length, tokenised):
        if len(stretch) == length:
            distinct.setdefault(stretch.tobytes(), stretch)
        if len(distinct) == n_prompts:
            return [bos + stretch.tolist() for stretch in distinct.values()]
    where = f"the dataset: {len(tokenised)} books, {sum(map(len, tokenised))} tokens in all"
    seen, required = (f"{n} distinct prompts of {prefix_len} tokens" for n in (len(distinct), n_prompts))
    raise DataError("too little text for the prompts", where, seen, required, "ask for shorter or fewer prompts")


def _stretches(books: Iterable[str], tokenizer: Tokenizer, n: int, tokenised: list[array[int]]) -> Iterator[array[int]]:
    """Yield the first `n` tokens of each book, which is added to `tokenised`, then the next `n` of each, and so on."""
    for book in books:
        tokenised.append(array("i", tokenizer.encode(book, add_bos=False)))
        yield tokenised[-1][:n]
    for start in range(n, max(map(len, tokenised), default=0), n):
        yield from (tokens[start : start + n] for tokens in tokenised)


def load_prompts(name: str) -> list[Prompt]:
    """Return the prompts of a .txt, .jsonl or .parquet file, of a folder of .txt files, or of a known set.

    Known sets are `spec-bench`, and `speed-bench` with `/qualitative`, `/throughput_1k` and the like. A row has the key
    `prompt`, or `turns` (Spec-Bench, SPEED-Bench), or `context` and `input` (LongBench). Placeholders are left out,
    with a note. Errors: DataError.
    """
    each = ((file, rows_of(file, KEYS, "prompts")) for file in _prompt_files(name))
    found = [_prompt(row, file, number) for file, rows in each for number, row in rows]
    whole = [prompt for prompt in found if not any(PLACEHOLDER in turn for turn in prompt.turns)]
    seen = f"{len(found)} prompts, {len(found) - len(whole)} of them placeholders of a public copy"
    if not whole:
        raise unreadable(Path(name), seen, "at least one prompt", "prompts")
    if len(whole) < len(found):
        say_once(f"note: {name} has {seen}, which are left out")
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


def _prompt_files(name: str) -> list[Path]:
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
    entries = row.items() if isinstance(row, dict) else ()
    values: dict[str, Any] = {key: value for key, value in entries if value is not None}
    text = values.get("prompt", values.get("turns"))
    if text is None and "context" in values:
        parts = values["context"], values.get("input") or ""
        text = "\n\n".join(filter(None, parts)) if all(isinstance(part, str) for part in parts) else None
    turns: list[Any] = text if isinstance(text, list) else [text]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        kind = sorted(row) if isinstance(row, dict) else type(row).__name__
        seen = f"line {number}: {'an empty text' if turns and all(isinstance(x, str) for x in turns) else kind}"
        required = "a text under `prompt` or `context`, or a list of texts under `turns`, none of them empty"
        raise unreadable(path, seen, required, "prompts")
    id_, category = (next((values[key] for key in keys if key in values), None) for keys in (ID_KEYS, CATEGORY_KEYS))
    return Prompt(str(number if id_ is None else id_), str(category or "uncategorised"), tuple(turns))


def _book_files(dataset: str) -> list[Path]:
    if dataset == PG19:
        fix = f"name a text: {flag('dataset')} FOLDER_OR_FILE, such as those files; or use {flag('dataset')} {BUILT_IN}"
        return hub_files(PG19_REPOSITORY, PG19_REVISION, PG19_TEST, fix)
    if dataset == BUILT_IN:
        if DEFAULT_BOOK.is_file():
            return [DEFAULT_BOOK]
        what, required = "the built-in book is missing", "the book that download.py fetches"
        raise DataError(what, DEFAULT_BOOK, "no such file", required, "run: python download.py")
    return files_of(dataset, "dataset", [*READERS], f"auto, {BUILT_IN}, {PG19}")


def files_of(name: str, field: str, suffixes: Collection[str], names: str) -> list[Path]:
    """Return a folder's files that end in `suffixes`, sorted by name, or the file that is named.

    names: other values of the field, for the message. Errors: DataError if there is no file to read.
    """
    path = Path(name).expanduser()
    if name and os.path.isdir(path):
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in suffixes)
    else:
        files = [path] if path.suffix.lower() in READERS and os.path.isfile(path) else []
    if not files:
        required = f"{names}, a file that ends in {', '.join(READERS)}, or a folder with {', '.join(suffixes)} in it"
        fix = "check the spelling and the working directory, or save texts in files that end in .txt"
        raise DataError("there is no text to read", flag(field), name[:80] or "an empty name", required, fix)
    return files


def hub_files(repository: str, revision: str, pattern: str, fix: str) -> list[Path]:
    """Return the files of a Hugging Face data set, from the hub or its local cache. Errors: DataError."""
    seen = "no such files in the downloaded snapshot"
    say_once(f"looking for {repository} on the Hugging Face hub, or in its cache (half a minute without a network)")
    try:
        folder = snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=pattern)
        if files := sorted(Path(folder).glob(pattern)):
            return files
    except Exception as error:  # the hub, its transport and its cache raise errors of unrelated classes
        seen = f"{type(error).__name__}: {error}"
    required = f"its files {pattern}, from the network or the local hub cache"
    raise DataError("a data set could not be fetched", f"Hugging Face dataset {repository}", seen, required, fix)


def rows_of(path: Path, keys: Collection[str], what: str) -> Iterator[tuple[int, object]]:
    """Yield the rows of a file with their numbers.

    A .txt file is a single row, and a line of a .jsonl file is a row. Of a .parquet file, the columns `keys` are read,
    a few rows at a time. what: the content, for messages. Errors: DataError.
    """
    return READERS[path.suffix.lower()](path, keys, what)


def _read_text(path: Path, keys: Collection[str], what: str) -> Iterator[tuple[int, object]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "text in UTF-8", what) from None
    yield 1, {"id": path.stem, "prompt": text, TEXT_KEY: text}


def _read_jsonl(path: Path, keys: Collection[str], what: str) -> Iterator[tuple[int, object]]:
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = parse_json(line.rstrip().decode("utf-8-sig"))
                    json.dumps(row, ensure_ascii=False).encode()  # fails for half of a surrogate pair
                    yield number, row
    except (OSError, ValueError) as error:
        raise unreadable(path, f"line {number}: {error}", "one JSON object per line, in UTF-8", what) from None


def _read_parquet(path: Path, keys: Collection[str], what: str) -> Iterator[tuple[int, object]]:
    try:
        with pq.ParquetFile(path) as table:
            if not (columns := [name for name in table.schema_arrow.names if name in keys]):
                raise unreadable(path, f"columns {table.schema_arrow.names}", f"one of {', '.join(keys)}", what)
            batches = table.iter_batches(batch_size=PARQUET_ROWS_AT_ONCE, columns=columns)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error, "a parquet file", what) from None


def _text_of(row: object, path: Path, number: int) -> str:
    value = row.get(TEXT_KEY) if isinstance(row, dict) else None
    if not isinstance(value, str):
        seen = f"row {number}: {list(row) if isinstance(row, dict) else type(row).__name__}"
        raise unreadable(path, seen, f"a text under `{TEXT_KEY}` in every row", "books")
    return value


def unreadable(path: Path, seen: object, required: str, what: str) -> DataError:
    """Return the error for a file of `what` that cannot be read."""
    return DataError(f"a file of {what} cannot be read", path, seen, required, "replace the file, or leave it out")


Reader = Callable[[Path, Collection[str], str], Iterator[tuple[int, object]]]
READERS: dict[str, Reader] = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
