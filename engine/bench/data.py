"""Books -> equal-length prompts: PG-19, the built-in book, or local .txt, .jsonl and .parquet files."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from common.errors import ConfigError, DataError, flag
from common.say import say
from models.checkpoints.default_model import DEFAULT_BOOK
from models.checkpoints.tokenizer import Tokenizer

# Data sets that have names, as `--dataset` takes them; any other is a path.
BUILT_IN, PG19 = "default", "pg19"
# Parquet files with the rows of deepmind/pg19, which is itself a loading script and holds no text.
PG19_REPOSITORY = "emozilla/pg19"
PG19_REVISION = "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8"
PG19_SPLITS = ("train", "validation", "test")
TEXT_KEY = "text"
PARQUET_ROWS_AT_ONCE = 4


def load_books(dataset: str, *, split: str = "test") -> Iterator[str]:
    """The texts of `dataset`, one per book, in a fixed order and read as they are asked for.

    `default` is the built-in book; `pg19` the named split of PG-19 (arXiv 1911.05507) through the Hugging
    Face hub; anything else a .txt file (one book), a .jsonl file (key `text`), a .parquet file (column
    `text`), or a folder of these, in the order of their names. `split` concerns PG-19 only.
    Raises DataError: here for what cannot be found, on iteration for what cannot be read.
    """
    files = _book_files(dataset, split)
    return (book for file in files for book in READERS[file.suffix.lower()](file))


def make_prompts(books: Iterable[str], tokenizer: Tokenizer, *, n_prompts: int, prefix_len: int) -> list[list[int]]:
    """Cut `n_prompts` prompts of exactly `prefix_len` tokens, the tokenizer's BOS included.

    The prompts are distinct stretches of text that do not overlap, never wrapped, repeated or padded: the
    first stretch of each book, then the second of each, and so on. Books are tokenised only until enough
    of them have given a first stretch. Raises DataError, with the numbers, if there is too little text.
    """
    bos = tokenizer.encode("", add_bos=True)
    stretch_len = prefix_len - len(bos)
    if n_prompts < 1:
        raise _bad_request("no prompts asked for", "number of prompts", n_prompts, ">= 1")
    if stretch_len < 1:
        raise _bad_request("prompts without any text", "prefix_len", prefix_len, f">= {len(bos) + 1}")

    tokenised: list[array[int]] = []
    first_stretches = set()
    for book in books:
        tokens = array("i", tokenizer.encode(book, add_bos=False))
        tokenised.append(tokens)
        if len(tokens) >= stretch_len:
            first_stretches.add(tokens[:stretch_len].tobytes())
        if len(first_stretches) == n_prompts:
            break

    stretches = list(islice(_stretches(tokenised, stretch_len), n_prompts))
    if len(stretches) < n_prompts:
        raise _too_little_text(tokenised, n_prompts, len(stretches), prefix_len, len(bos))
    return [bos + stretch.tolist() for stretch in stretches]


def _stretches(tokenised: Sequence[array[int]], stretch_len: int) -> Iterator[array[int]]:
    """The distinct stretches of `stretch_len` tokens: the first of each book, then the second, ..."""
    seen = set()
    longest = max(map(len, tokenised), default=0)
    for start in range(0, longest - stretch_len + 1, stretch_len):
        for tokens in tokenised:
            stretch = tokens[start : start + stretch_len]
            if len(stretch) == stretch_len and stretch.tobytes() not in seen:
                seen.add(stretch.tobytes())
                yield stretch


def _largest_stretch_len(tokenised: Sequence[array[int]], n_prompts: int, upper: int) -> int:
    """A stretch length below `upper` that gives `n_prompts`, the largest where no text repeats; 0 if none."""
    fits, too_long = 0, upper
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(list(islice(_stretches(tokenised, middle), n_prompts))) == n_prompts:
            fits = middle
        else:
            too_long = middle
    return fits


def _too_little_text(
    tokenised: Sequence[array[int]], n_prompts: int, available: int, prefix_len: int, n_bos: int
) -> DataError:
    fits = _largest_stretch_len(tokenised, n_prompts, prefix_len - n_bos)
    return DataError(
        "too little text for the prompts",
        where=f"the dataset: {len(tokenised)} books, {sum(map(len, tokenised))} tokens in all",
        seen=f"{available} distinct prompts of {prefix_len} tokens",
        required=f"{n_prompts} distinct prompts of {prefix_len} tokens",
        fix=f"shorten the prompts to {fits + n_bos} tokens, ask for fewer, or give more text"
        if fits
        else "ask for fewer prompts, or give more text",
    )


def _bad_request(what: str, where: str, seen: int, required: str) -> ConfigError:
    return ConfigError(what, where=where, seen=seen, required=required, fix=f"ask for {where} {required}")


def _book_files(dataset: str, split: str) -> list[Path]:
    if dataset == BUILT_IN:
        if not DEFAULT_BOOK.is_file():
            raise DataError(
                "the built-in book is missing",
                where=str(DEFAULT_BOOK),
                seen="no such file",
                required="the book that download.py fetches",
                fix="run: python download.py",
            )
        return [DEFAULT_BOOK]
    if dataset == PG19:
        return _download_pg19(split)
    path = Path(dataset).expanduser()
    endings = ", ".join(READERS)
    if dataset and os.path.isdir(path):
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS)
        if not files:
            raise DataError(
                "the folder holds no books",
                where=str(path),
                seen=f"no file that ends in {endings}",
                required=f"books as {endings} directly in the folder",
                fix="name the folder that holds the files themselves",
            )
        return files
    if not os.path.isfile(path) or path.suffix.lower() not in READERS:
        kind = "another kind of file" if os.path.isfile(path) else "no such file or folder"
        raise DataError(
            "unknown dataset",
            where=flag("dataset"),
            seen=f"{dataset[:80] or 'an empty name'} ({kind})",
            required=f"auto, {BUILT_IN}, {PG19}, a file that ends in {endings}, or a folder of such files",
            fix="check the spelling and the working directory",
        )
    return [path]


def _download_pg19(split: str) -> list[Path]:
    """The parquet files of one PG-19 split, from the hub or from its local cache."""
    if split not in PG19_SPLITS:
        raise DataError(
            "unknown PG-19 split",
            where="split",
            seen=split,
            required=f"one of {', '.join(PG19_SPLITS)}",
            fix="use the test split",
        )
    from huggingface_hub import snapshot_download

    pattern = f"data/{split}-*.parquet"
    say(f"looking for {PG19_REPOSITORY} on the Hugging Face hub, or in its local cache")
    try:
        folder = snapshot_download(PG19_REPOSITORY, repo_type="dataset", revision=PG19_REVISION, allow_patterns=pattern)
    except Exception as error:  # the hub, its transport and its cache each raise their own families
        raise _no_pg19(pattern, f"{type(error).__name__}: {error}") from error
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise _no_pg19(pattern, "no such files in the downloaded snapshot")
    return files


def _no_pg19(pattern: str, seen: str) -> DataError:
    return DataError(
        "PG-19 could not be fetched",
        where=f"Hugging Face dataset {PG19_REPOSITORY}",
        seen=seen,
        required=f"its files {pattern}, from the network or the local hub cache",
        fix=f"name a text: --dataset FOLDER_OR_FILE ({', '.join(READERS)}), or --dataset {BUILT_IN} for the built-in "
        "book; or download those files on a connected machine and name their folder",
    )


def read_text(path: Path) -> Iterator[str]:
    """The text of a file, as one book or prompt."""
    try:
        yield path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "text in UTF-8") from None


def _read_jsonl(path: Path) -> Iterator[str]:
    for number, row in json_rows(path):
        yield _text_of(row.get(TEXT_KEY) if isinstance(row, dict) else row, path, number)


def json_rows(path: Path) -> Iterator[tuple[int, object]]:
    """The values of a .jsonl file, with the numbers of their lines. Errors: DataError."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json_of(line, path, number)
    except OSError as error:
        raise unreadable(path, error, "one JSON object per line") from None


def _json_of(line: bytes, path: Path, number: int) -> object:
    try:
        return json.loads(line.rstrip().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        seen = f"line {number}, column {error.colno}: {error.msg}"
    except (ValueError, RecursionError) as error:  # not UTF-8, an integer too long for Python, nested too deep
        seen = f"line {number}: {error}"
    raise unreadable(path, seen, "one JSON object per line, in UTF-8")


def _read_parquet(path: Path) -> Iterator[str]:
    """Rows in small batches, so that memory holds a few books however many the file has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            if TEXT_KEY not in table.schema_arrow.names:
                raise unreadable(path, f"columns {table.schema_arrow.names}", f"a column `{TEXT_KEY}`")
            number = 0
            for batch in table.iter_batches(batch_size=PARQUET_ROWS_AT_ONCE, columns=[TEXT_KEY]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _text_of(value, path, number)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error, "a parquet file") from None


def _text_of(value: object, path: Path, number: int) -> str:
    if not isinstance(value, str):
        seen = f"row {number}: {type(value).__name__}"
        raise unreadable(path, seen, f"a text under `{TEXT_KEY}` in every row")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        seen = f"row {number}: half of a surrogate pair at character {error.start}"
        raise unreadable(path, seen, "whole characters") from None
    return value


def unreadable(path: Path, seen: object, required: str, what: str = "books") -> DataError:
    """The error of a file that is not what it should be."""
    return DataError(
        f"a file of {what} cannot be read",
        where=str(path),
        seen=seen,
        required=required,
        fix="replace the file, or leave it out",
    )


READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
