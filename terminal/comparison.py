"""Plain decoding, then speculation, over the same prompts: shown while they run, then in figures and as a page."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from rich.console import Console

from bench.config import AUTO, RunConfig
from bench.finish import PROMPT_END, headline, notes
from bench.passes import run_passes
from bench.prompt_sets import load_prompts
from bench.record import make_record
from bench.session import Session
from bench.text import PromptText
from common.errors import ConfigError, flag
from common.jsonl import publish
from common.say import say
from engine.counts import acceptance_text
from models.checkpoints.chat_template import NoChatTemplateError
from terminal.panes import TITLES, Panes
from terminal.track import printable

FOLDER = Path(__file__).parent
# Nothing in it is loaded from elsewhere.
PAGE = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("page.html")


def compare(config: RunConfig, save: str | None) -> None:
    """Errors: UserError, before anything is loaded if it can be known then."""
    console = Console(stderr=True, highlight=False)
    _check(save, config.output.output)
    session, names = _open(config)
    panes = Panes(names, console)
    done = run_passes(session, panes.watch)
    assert done.baseline is not None and done.speculative is not None
    record = make_record("compare", session, done) | {"prompts": config.rows.prompts}
    differs = first_difference(done.baseline.tokens, done.speculative.tokens) if session.sampling.reproducible else None
    record["first_difference"] = differs
    head = headline(session, record, [len(prompt) for prompt in session.prompts])
    said = [f"  {line}" for line in (head, *verdict(record), *notes(record, session.draft))]
    # On a screen that also shows the record, what people read is to stand below it.
    on_screen = console.is_terminal and sys.stdout.isatty()
    publish(config.output.output, record, *([] if on_screen else said), for_people=True)
    if console.is_terminal:
        room = console.height - 2 - sum(1 + len(line) // console.width for line in said)
        shown = panes.frame(console.width, room, is_running=False)
        console.print(shown, *(said if on_screen else []), sep="\n", markup=False)
    if save is not None:
        page = PAGE.render(names=names, tracks=panes.tracks, figures=said, titles=TITLES)
        Path(save).write_text(page, encoding="utf-8")


def _open(config: RunConfig) -> tuple[Session, list[str]]:
    """With questions in the model's chat template, or stretches of a data set if that or their length is given; and how
    its rows are called. Errors: UserError."""
    source, own = config.target.with_text(), config.rows.prompts
    if own is None and (config.sizes.prefix_len is not None or config.text.dataset != AUTO):
        session = Session.open(config)
        assert session.tokenizer is not None
        return session, [printable(session.tokenizer.decode(prompt[-PROMPT_END:])) for prompt in session.prompts]
    questions = str(FOLDER / "questions.jsonl") if own is None else own
    texts = [prompt.turns[0] for prompt in load_prompts(questions)]
    prompts: list[PromptText] = [*texts]
    rows = replace(config.rows, prompts=None)
    try:
        template = source.chat_template()
        prompts = [template.encode([{"role": "user", "content": text}]) for text in texts]
        rows = replace(rows, stop_at_eos=True)  # an answer ends; behind its end a model talks to itself
    except NoChatTemplateError:
        say(f"note: {source.name} has no chat template, so questions are continued as they are")
    return Session.open(replace(config, rows=rows), prompts), [*map(printable, texts)]


def first_difference(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> dict[str, int] | None:
    """The first row that is not the same in both, and its first token that is not; from 0."""
    for row, pair in enumerate(zip(a, b, strict=True)):
        for place, (mine, its) in enumerate(zip_longest(*pair)):
            if mine != its:
                return {"row": row, "token": place}
    return None


def verdict(record: dict[str, Any]) -> list[str]:
    """How fast each was while all rows were busy, both speedups, and whether they emitted the same."""
    same, differs = record["identical_sequences"], record["first_difference"]
    identity = f"identical: {same} of {record['sequences']} rows"
    if same is None:
        identity = "rows are samples, which are not meant to be the same (those of --verification coupled are)"
    elif differs is not None:
        identity += f"; row {differs['row']} differs from its token {differs['token']} on (docs/lossless.md says why)"
    if record["speedup"] is None:
        return [identity]
    plain, drafted = (record[f"{name}_tokens_per_second"] for name in ("baseline", "decode"))
    return [
        f"plain decoding: {plain:.1f} tokens/s, {1e3 * record['B'] / plain:.1f} ms per token",
        f"speculation:    {drafted:.1f} tokens/s, {1e3 * record['B'] / drafted:.1f} ms per token: "
        f"{record['speedup']:.2f} times as fast ({record['wall_speedup']:.2f} to the last row), "
        f"acceptance rate {acceptance_text(record) or '0.000'}, {record['mean_accepted_length']:.2f} tokens per round",
        identity,
    ]


def _check(save: str | None, output: str | None) -> None:
    """Errors: ConfigError for a page that cannot be written."""
    if save is None:
        return
    page = Path(save).resolve()
    can_write = not page.is_dir() and os.access(page if page.exists() else page.parent, os.W_OK)
    if not can_write or (output is not None and page == Path(output).resolve()):
        required, fix = "a file of its own in an existing, writable folder", "choose another file"
        raise ConfigError("a page cannot be written", flag("save"), save[:80] or "an empty name", required, fix)
