"""One's own prompts: .txt files, one prompt each, or .jsonl with `prompt` or `turns` in each line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from common.errors import DataError, flag
from engine.bench.data import json_rows, read_text, unreadable

ENDINGS = (".txt", ".jsonl")


def read_prompts(name: str) -> list[str]:
    """The prompts of a .txt file, of a folder of them in the order of their names, or of a .jsonl file.

    Of a conversation's `turns` the first is the prompt. Errors: DataError.
    """
    path = Path(name).expanduser()
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".txt") if path.is_dir() else [path]
    if not name or not files or not all(os.path.isfile(file) and file.suffix.lower() in ENDINGS for file in files):
        raise DataError(
            "there are no prompts",
            where=flag("prompts"),
            seen=name[:80] or "an empty name",
            required="a .txt file, a folder of them, or a .jsonl file",
            fix="check the spelling and the working directory",
        )
    prompts = [prompt for file in files for prompt in (_of_jsonl(file) if file.suffix == ".jsonl" else read_text(file))]
    if not prompts or not all(prompt.strip() for prompt in prompts):
        empty = next((number for number, prompt in enumerate(prompts) if not prompt.strip()), 0)
        raise DataError(
            "a prompt is empty",
            where=f"{flag('prompts')} {name}",
            seen=f"prompt {empty} of {len(prompts)}",
            required="text in every prompt",
            fix="leave it out",
        )
    return prompts


def _of_jsonl(path: Path) -> Iterator[str]:
    for number, row in json_rows(path):
        found = row.get("prompt", row.get("turns")) if isinstance(row, dict) else None
        prompt = found[0] if isinstance(found, list) and found else found
        if not isinstance(prompt, str):
            seen = f"line {number}: {sorted(row) if isinstance(row, dict) else type(row).__name__}"
            raise unreadable(path, seen, "a text under `prompt`, or a list of texts under `turns`, in every line")
        yield prompt
