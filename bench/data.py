"""Cuts prompts of equal length from books: PG-19, the built-in book, or .txt, .jsonl and .parquet files."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import snapshot_download

from bench.config import AUTO
from common.errors import ConfigError, DataError, flag
from common.jsonl import parse_json
from common.say import say
from models.checkpoints.default_model import DEFAULT_BOOK
from models.checkpoints.model_source import ModelSource
from models.checkpoints.tokenizer import Tokenizer

# Names that `--dataset` takes; any other value is a path.
BUILT_IN, PG19 = "default", "pg19"
# A copy of deepmind/pg19, which is a loading script without texts, in parquet files.
PG19_REPOSITORY = "emozilla/pg19"
PG19_REVISION = "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8"
PG19_TEST = "data/test-*.parquet"
TEXT_KEY = "text"
PARQUET_ROWS_AT_ONCE = 4


def resolve_dataset(name: str, target: ModelSource) -> str | None:
    """Return a data set's name without `auto`: the book of the built-in model, else PG-19; None for random weights."""
    if not target.has_text:
        return None
    return name if name != AUTO else BUILT_IN if target.is_default else PG19


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
    say(f"looking for {repository} on the Hugging Face hub, or in its local cache")
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
