"""Progress bars, on the leader's standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

from bench.session import Session
from common.jsonl import append_or_put_off
from common.process import is_leader
from engine.requests import Progress, Request


def progress_bar(name: str, total: int | None, shown: bool = True, unit: str = "tok") -> tqdm:
    """Of tokens; without a total it shows how many there were."""
    named = {"desc": f"{name:<12}", "unit": unit}
    return tqdm(total=total, file=sys.stderr, dynamic_ncols=True, disable=not (shown and is_leader()), **named)


@dataclass(frozen=True)
class BarProgress(Progress):
    """On a bar; of that pass of a session, it also saves the rows that have finished."""

    bar: tqdm
    session: Session | None = None
    phase: str = ""

    def prefilled(self, n_tokens: int) -> None:
        self.bar.set_postfix_str("prefilling", refresh=True)

    def emitted(self, n_tokens: int) -> None:
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update(n_tokens)

    def finished(self, request: Request) -> None:
        own = self.session
        if own is not None and own.config.rows.save_rows is not None and own.ranks.leads:
            text = own.tokenizer.decode(request.tokens) if own.tokenizer else None
            row = {"run": own.run, "pass": self.phase, "row": request.index, "finish_reason": request.finish_reason}
            append_or_put_off(own.config.rows.save_rows, row | {"tokens": request.tokens, "text": text}, own.put_off)


@contextmanager
def bar_of_pass(session: Session, name: str, shown: bool = True) -> Iterator[Progress]:
    """How a benchmark watches a pass."""
    with progress_bar(name, len(session.prompts) * session.gen_len, shown) as bar:
        yield BarProgress(bar, session, name)
