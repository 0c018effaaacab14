"""foretoken.py compare: prompts decoded plainly and speculatively, live, then in figures and as a page."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from rich.console import Console

from bench.config import AUTO, ComparedSampling, Output, Rows, RunConfig, Sizes, Text
from bench.passes import run_passes
from bench.plan import PromptText
from bench.prompt_sets import load_prompts
from bench.record import make_record
from bench.session import Session
from bench.table import PROMPT_END, headline, notes
from common.errors import ConfigError, flag
from common.jsonl import publish
from common.say import say
from engine.counts import acceptance_text
from models.checkpoints.chat_template import NoChatTemplateError
from terminal.models import ModelFlags
from terminal.panes import TITLES, Panes
from terminal.track import printable

FOLDER = Path(__file__).parent
# The page loads nothing from elsewhere.
PAGE = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("page.html")


@dataclass(frozen=True)
class Questions(Rows):
    """The prompts, and the ends of their rows."""

    prompts: str | None = None
    """your prompts, in the model's chat template if it has one: a file or folder as the benchmarks take (default: a few
    questions; with --prefix_len or --dataset stretches of a text)"""


@dataclass(frozen=True, kw_only=True)
class Compare(ModelFlags):
    """the same prompts decoded plainly and speculatively, live and side by side"""

    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=lambda: Sizes(gen_len=128))
    rows: Questions = field(default_factory=Questions)
    output: Output = field(default_factory=Output)
    save: str | None = None
    """write both texts of every row to this file, as a page for a browser"""

    def run(self) -> None:
        """Decode both ways, then publish. Errors: UserError, before anything is loaded where possible."""
        config, console = self.config(), Console(stderr=True, highlight=False)
        _check_page(self.save, config.output.output)
        session, names = _open(config)
        panes = Panes(names, console)
        passes = run_passes(session, panes.watch)
        plain, drafted = passes.baseline, passes.speculative
        assert plain is not None and drafted is not None
        differs = first_difference(plain.tokens, drafted.tokens) if session.plan.reproducible else None
        record = make_record("compare", session, passes) | {"prompts": config.rows.prompts, "first_difference": differs}
        head = headline(session, record, [len(prompt) for prompt in session.prompts])
        lines = [f"  {line}" for line in (head, *verdict(record), *notes(record, session.plan.automatic))]
        # On a screen that also displays the record, the lines for people are to stand below it.
        on_screen = console.is_terminal and sys.stdout.isatty()
        publish(config.output.output, record, *([] if on_screen else lines), for_people=True)
        if console.is_terminal:
            room = console.height - 2 - sum(1 + len(line) // console.width for line in lines)
            frame = panes.frame(console.width, room, is_running=False)
            console.print(frame, *(lines if on_screen else []), sep="\n", markup=False)
        if self.save is not None:
            page = PAGE.render(names=names, tracks=panes.tracks, figures=lines, titles=TITLES)
            Path(self.save).write_text(page, encoding="utf-8")


def _open(config: RunConfig) -> tuple[Session, list[str]]:
    """Return a session and names for its rows. Errors: UserError.

    Prompts are questions in the model's chat template, or stretches of a data set if that or their length is given.
    """
    source, prompts = config.target.with_text(), config.rows.prompts
    if prompts is None and (config.sizes.prefix_len is not None or config.text.dataset != AUTO):
        session = Session.open(config)
        assert session.tokenizer is not None
        return session, [printable(session.tokenizer.decode(prompt[-PROMPT_END:])) for prompt in session.prompts]
    questions = [prompt.turns[0] for prompt in load_prompts(prompts or str(FOLDER / "questions.jsonl"))]
    texts: list[PromptText] = [*questions]
    rows = replace(config.rows, prompts=None)
    try:
        template = source.chat_template()
        texts = [template.encode([{"role": "user", "content": question}]) for question in questions]
        rows = replace(rows, stop_at_eos=True)  # behind the end of its answer a model talks to itself
    except NoChatTemplateError:
        say(f"note: {source.name} has no chat template, so questions are continued as they are")
    return Session.open(replace(config, rows=rows), texts), [*map(printable, questions)]


def first_difference(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> dict[str, int] | None:
    """Return the first differing row and its first differing token, both from 0; None if all rows are equal."""
    for row, pair in enumerate(zip(a, b, strict=True)):
        for index, tokens in enumerate(zip_longest(*pair)):
            if len({*tokens}) > 1:
                return {"row": row, "token": index}
    return None


def verdict(record: dict[str, Any]) -> list[str]:
    """Return lines: the speeds while all rows were busy with both speedups, and whether the tokens are identical."""
    n_identical, differs = record["identical_sequences"], record["first_difference"]
    identity = f"identical: {n_identical} of {record['sequences']} rows"
    if n_identical is None:
        identity = "rows are samples, which differ by design (with --verification coupled they are identical)"
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


def _check_page(save: str | None, output: str | None) -> None:
    """Raise ConfigError for a page that cannot be written."""
    if save is None:
        return
    page = Path(save).resolve()
    can_write = not page.is_dir() and os.access(page if page.exists() else page.parent, os.W_OK)
    if not can_write or (output is not None and page == Path(output).resolve()):
        required = "another file than --output, in an existing, writable folder"
        raise ConfigError("a page cannot be written", flag("save"), save[:80] or "an empty name", required, "rename it")
