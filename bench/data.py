"""Books -> equal-length prompts: PG-19, the built-in book, or local .txt, .jsonl and .parquet files."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from huggingface_hub import snapshot_download

from common.errors import ConfigError, DataError, flag
from common.say import say
from models.checkpoints.default_model import DEFAULT_BOOK
from models.checkpoints.tokenizer import Tokenizer

# Data sets that have names, as `--dataset` takes them; any other is a path.
BUILT_IN, PG19 = "default", "pg19"
# Parquet files with the rows of deepmind/pg19, which is itself a loading script and holds no text.
PG19_REPOSITORY = "emozilla/pg19"
PG19_REVISION = "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8"
PG19_TEST = "data/test-*.parquet"
TEXT_KEY = "text"
PARQUET_ROWS_AT_ONCE = 4


def load_books(dataset: str) -> Iterator[str]:
    """The texts of `dataset`, one per book, in a fixed order and read as they are asked for: `default` is the built-in
    book; `pg19` the test split of PG-19 (arXiv 1911.05507) through the Hugging Face hub; anything else a .txt file (one
    book), a .jsonl or .parquet file (key or column `text`), or a folder of these, in the order of their names. Errors:
    DataError, here for what cannot be found, on iteration for what cannot be read."""
    each = ((file, rows_of(file, [TEXT_KEY], "books")) for file in _book_files(dataset))
    return (_text_of(row, file, number) for file, rows in each for number, row in rows)


def make_prompts(books: Iterable[str], tokenizer: Tokenizer, *, n_prompts: int, prefix_len: int) -> list[list[int]]:
    """Cut `n_prompts` prompts of exactly `prefix_len` tokens, the tokenizer's BOS included: distinct stretches of text
    that do not overlap, the first of each book, then the second of each. Books are tokenised only until enough of them
    have given a first one. Errors: ConfigError for prompts without text, DataError if there is too little of it."""
    bos = tokenizer.encode("", add_bos=True)
    stretch_len, least = prefix_len - len(bos), f">= {len(bos) + 1}"
    if stretch_len < 1:
        raise ConfigError("prompts without any text", "prefix_len", prefix_len, least, f"ask for prefix_len {least}")
    tokenised: list[array[int]] = []
    distinct: dict[bytes, array[int]] = {}
    for stretch in _stretches(books, tokenizer, stretch_len, tokenised):
        if len(stretch) == stretch_len:
            distinct.setdefault(stretch.tobytes(), stretch)
        if len(distinct) == n_prompts:
            return [bos + one.tolist() for one in distinct.values()]
    where = f"the dataset: {len(tokenised)} books, {sum(map(len, tokenised))} tokens in all"
    seen, required = (f"{n} distinct prompts of {prefix_len} tokens" for n in (len(distinct), n_prompts))
    fix = "shorten the prompts, ask for fewer, or give more text"
    raise DataError("too little text for the prompts", where, seen, required, fix)


def _stretches(books: Iterable[str], tokenizer: Tokenizer, n: int, tokenised: list[array[int]]) -> Iterator[array[int]]:
    """The first `n` tokens, or fewer, of each book, which is then `tokenised`, then the next ones of each, ..."""
    for book in books:
        tokenised.append(array("i", tokenizer.encode(book, add_bos=False)))
        yield tokenised[-1][:n]
    for start in range(n, max(map(len, tokenised), default=0), n):
        yield from (tokens[start : start + n] for tokens in tokenised)


def _book_files(dataset: str) -> list[Path]:
    if dataset == PG19:
        fix = f"name a text: {flag('dataset')} FOLDER_OR_FILE, such as those files; or use {flag('dataset')} {BUILT_IN}"
        return hub_files(PG19_REPOSITORY, PG19_REVISION, PG19_TEST, "PG-19 could not be fetched", fix)
    if dataset == BUILT_IN:
        if DEFAULT_BOOK.is_file():
            return [DEFAULT_BOOK]
        what, required = "the built-in book is missing", "the book that download.py fetches"
        raise DataError(what, DEFAULT_BOOK, "no such file", required, "run: python download.py")
    return files_of(dataset, "dataset", [*READERS], others=f"auto, {BUILT_IN}, {PG19}")


def files_of(name: str, field: str, in_folder: Collection[str], others: str) -> list[Path]:
    """Those of a folder that end so, in the order of their names, or the one file that rows are read from. Errors:
    DataError where there is none; `others`: what else the field takes."""
    path = Path(name).expanduser()
    if name and os.path.isdir(path):
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in in_folder)
    else:
        files = [path] if path.suffix.lower() in READERS and os.path.isfile(path) else []
    if not files:
        required = f"{others}, a file that ends in {', '.join(READERS)}, or a folder with {', '.join(in_folder)} in it"
        what, fix = "there is no text to read", "check the spelling and the working directory"
        if os.path.isfile(path):
            what, fix = "a file of this kind is not read", f"save its text as {path.stem}.txt"
        elif name and os.path.isdir(path):
            fix = "save texts there, in files that end in .txt"
        raise DataError(what, flag(field), name[:80] or "an empty name", required, fix)
    return files


def hub_files(repository: str, revision: str, pattern: str, what: str, fix: str) -> list[Path]:
    """The files of a Hugging Face data set, from the hub or from its local cache. Errors: DataError."""
    seen = "no such files in the downloaded snapshot"
    say(f"looking for {repository} on the Hugging Face hub, or in its local cache")
    try:
        folder = snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=pattern)
        if files := sorted(Path(folder).glob(pattern)):
            return files
    except Exception as error:  # the hub, its transport and its cache each raise their own families
        seen = f"{type(error).__name__}: {error}"
    required = f"its files {pattern}, from the network or the local hub cache"
    raise DataError(what, f"Hugging Face dataset {repository}", seen, required, fix)


def rows_of(path: Path, keys: Collection[str], what: str) -> Iterator[tuple[int, object]]:
    """The rows of a file of `what` with their numbers: a .txt file is one, whatever the key; of a .jsonl file by line;
    of a .parquet file, which is read a few at a time, with those of the `keys` that it has. Errors: DataError."""
    return READERS[path.suffix.lower()](path, keys, what)


def _read_text(path: Path, keys: Collection[str], what: str) -> Iterator[tuple[int, object]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "text in UTF-8", what) from None
    yield 1, {"id": path.stem, "prompt": text, TEXT_KEY: text}


def _read_jsonl(path: Path, keys: Collection[str], what: str) -> Iterator[tuple[int, object]]:
    number, required = 0, "one JSON object per line, in UTF-8"
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = json.loads(line.rstrip().decode("utf-8-sig"))
                    json.dumps(row, ensure_ascii=False).encode()  # JSON may have half of a surrogate pair
                    yield number, row
    except OSError as error:
        raise unreadable(path, error, required, what) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, no JSON, an integer too long for Python, nested too deep
        raise unreadable(path, f"line {number}: {error}", required, what) from None


def _read_parquet(path: Path, keys: Collection[str], what: str) -> Iterator[tuple[int, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            if not (there := [name for name in table.schema_arrow.names if name in keys]):
                raise unreadable(path, f"columns {table.schema_arrow.names}", f"one of {', '.join(keys)}", what)
            batches = table.iter_batches(batch_size=PARQUET_ROWS_AT_ONCE, columns=there)
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
    """The error of a file that is not what it should be."""
    fix = "replace the file, or leave it out"
    return DataError(f"a file of {what} cannot be read", path, seen, required, fix)


Reader = Callable[[Path, Collection[str], str], Iterator[tuple[int, object]]]
READERS: dict[str, Reader] = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
