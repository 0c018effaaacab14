"""foretoken.py compare: prompts decoded plainly and speculatively, live, then in figures."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console

from bench.config import AUTO, ChatRows, ComparedSampling, Output, RunConfig, Sizes, Text
from bench.data import load_prompts
from bench.passes import run_passes
from bench.record import make_record
from bench.session import Session
from bench.table import PROMPT_END, summary
from common.jsonl import publish
from common.say import say
from models.checkpoints.chat_template import NoChatTemplateError
from terminal.models import ModelFlags
from terminal.panes import Panes, printable

QUESTIONS = Path(__file__).parent / "questions.jsonl"


@dataclass(frozen=True, kw_only=True)
class Compare(ModelFlags):
    """the same prompts decoded plainly and speculatively, live and side by side. Without --prompts, --prefix_len and
    --dataset these are a few questions; prompts are put into the model's chat template, if it has one"""

    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=lambda: Sizes(gen_len=128))
    rows: ChatRows = field(default_factory=ChatRows)
    output: Output = field(default_factory=Output)

    def run(self) -> None:
        """Decode both ways, then publish. Errors: UserError, before anything is loaded where possible."""
        config, console = self.config(), Console(stderr=True, highlight=False)
        session, names = _open(config)
        panes = Panes(names, console)
        passes = run_passes(session, panes.watch)
        plain, drafted = passes.baseline, passes.speculative
        assert plain is not None and drafted is not None
        differs = first_difference(plain.tokens, drafted.tokens) if session.plan.reproducible else None
        record = make_record("compare", session, passes) | {"prompts": config.rows.prompts, "first_difference": differs}
        lines = summary(session, record, [len(prompt) for prompt in session.prompts])
        if differs is not None:
            where = "row {row} differs from its token {token} on".format_map(differs)
            lines.append(f"  {where} (docs/lossless.md says why)")
        # On a screen that also displays the record, the lines for people are to stand below it.
        on_screen = console.is_terminal and sys.stdout.isatty()
        publish(config.output.output, record, *([] if on_screen else lines), for_people=True)
        if console.is_terminal:
            room = console.height - 2 - sum(1 + len(line) // console.width for line in lines)
            frame = panes.frame(console.width, room, is_running=False)
            console.print(frame, *(lines if on_screen else []), sep="\n", markup=False)


def _open(config: RunConfig) -> tuple[Session, list[str]]:
    """Return a session and names for its rows. Errors: UserError.

    Prompts are questions in the model's chat template, or stretches of a data set if that or their length is given.
    """
    source, prompts = config.target.with_text(), config.rows.prompts
    if prompts is None and (config.sizes.prefix_len is not None or config.text.dataset != AUTO):
        session = Session.open(replace(config, rows=replace(config.rows, chat=False)))
        assert session.tokenizer is not None
        return session, [printable(session.tokenizer.decode(prompt[-PROMPT_END:])) for prompt in session.prompts]
    rows = replace(config.rows, prompts=prompts or str(QUESTIONS))
    try:
        source.chat_template()
        rows = replace(rows, stop_at_eos=True)  # after the end of its answer a model talks to itself
    except NoChatTemplateError:
        rows = replace(rows, chat=False)
        say(f"note: {source.name} has no chat template, so questions are continued as they are")
    session = Session.open(replace(config, rows=rows))
    return session, [printable(prompt.turns[0]) for prompt in load_prompts(str(rows.prompts))]


def first_difference(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> dict[str, int] | None:
    """Return the first differing row and its first differing token, both from 0; None if all rows are equal."""
    for row, pair in enumerate(zip(a, b, strict=True)):
        for index, tokens in enumerate(zip_longest(*pair)):
            if len({*tokens}) > 1:
                return {"row": row, "token": index}
    return None
