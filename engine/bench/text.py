"""Which text a run continues: a data set's, or one's own prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import ConfigError, DataError, flag, without_effect
from engine.bench.config import AUTO, RunConfig
from engine.bench.data import BUILT_IN, PG19, json_rows, read_text, unreadable
from models.checkpoints.model_source import ModelSource

ENDINGS = (".txt", ".jsonl")


def resolve_dataset(config: RunConfig, target: ModelSource) -> str | None:
    """`auto` is the built-in book for the built-in model, and PG-19 for every other. Random weights read no text.

    Errors: ConfigError for what has no effect on random weights.
    """
    wanted = config.text.dataset
    if target.has_text:
        return wanted if wanted != AUTO else BUILT_IN if target.is_default else PG19
    useless = {
        "dataset": wanted != AUTO,
        "prompts": config.rows.prompts is not None,
        "stop_at_eos": config.rows.stop_at_eos,
        "verify": config.target.verify,
    }
    if given := [field for field, is_given in useless.items() if is_given]:
        what, seen = "random weights read neither a checkpoint nor a text", f"given, with {flag('load_format')} dummy"
        raise without_effect(given, what, seen=seen, required="a trained model")
    return None


def own_prompts(
    config: RunConfig, target: ModelSource, texts: Sequence[str] | None
) -> tuple[tuple[int, ...], ...] | None:
    """One's own prompts as token ids: `texts`, or what `--prompts` names."""
    given = config.rows.prompts
    if texts is None and given is None:
        return None
    useless = {
        "prompts": texts is not None and given is not None,
        "dataset": config.text.dataset != AUTO,
        "prefix_len": config.sizes.prefix_len is not None,
        "num_prompts": config.rows.num_prompts is not None,
    }
    if named := [field for field, is_given in useless.items() if is_given]:
        what = "one's own prompts are taken whole, and all of them"
        raise without_effect(named, what, seen=f"given, with {flag('prompts')}", required="either")
    if texts is not None and (isinstance(texts, str) or not texts or not all(texts) or not target.has_text):
        raise ConfigError(
            "these prompts cannot be continued",
            where="Session.open: prompts",
            seen=repr(texts)[:80] + ("" if target.has_text else ", with random weights"),
            required="a list of texts, none of them empty, and a trained model",
            fix="give [text, text, ...]",
        )
    tokenizer = target.tokenizer()
    prompts = [tokenizer.encode(text, add_bos=True) for text in (read_prompts(str(given)) if texts is None else texts)]
    target.check_tokens(prompts)
    return tuple(map(tuple, prompts))


def read_prompts(name: str) -> list[str]:
    """The prompts of a .txt file, of a folder of them in the order of their names, or of a .jsonl file.

    Of a conversation's `turns` the first is the prompt. Errors: DataError.
    """
    path = Path(name).expanduser()
    is_folder = bool(name) and os.path.isdir(path)
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".txt") if is_folder else [path]
    if not files or not all(os.path.isfile(file) and file.suffix.lower() in ENDINGS for file in files):
        raise DataError(
            "there are no prompts",
            where=flag("prompts"),
            seen=f"{name[:80]}: a folder without .txt files" if is_folder else name[:80] or "an empty name",
            required="a .txt file, a folder of them, or a .jsonl file",
            fix="check the spelling and the working directory",
        )
    prompts = [
        prompt for file in files for prompt in (_of_jsonl(file) if file.suffix.lower() == ".jsonl" else read_text(file))
    ]
    if not prompts:
        raise unreadable(path, "an empty file", "at least one prompt", "prompts")
    if empty := [number for number, prompt in enumerate(prompts) if not prompt.strip()]:
        raise DataError(
            "a prompt is empty",
            where=f"{flag('prompts')} {name}",
            seen=f"prompt {empty[0]} of {len(prompts)}",
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
            required = "a text under `prompt`, or a list of texts under `turns`, in every line"
            raise unreadable(path, seen, required, "prompts")
        yield prompt
