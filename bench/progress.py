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


def progress_bar(name: str, total: int | None, visible: bool = True, unit: str = "tok") -> tqdm:
    """Return a bar of `total` units, or, if the total is None, of a running number."""
    labels = {"desc": f"{name:<12}", "unit": unit}
    return tqdm(total=total, file=sys.stderr, dynamic_ncols=True, disable=not (visible and is_leader()), **labels)


@dataclass(frozen=True)
class BarProgress(Progress):
    """Moves a bar, and, with a session, saves each finished row under the name of the pass."""

    bar: tqdm
    session: Session | None = None
    name: str = ""

    def prefilled(self, n_tokens: int) -> None:
        self.bar.set_postfix_str("prefilling", refresh=True)

    def emitted(self, n_tokens: int) -> None:
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update(n_tokens)

    def finished(self, request: Request) -> None:
        session = self.session
        if session is None or not session.ranks.leads or (path := session.plan.config.rows.save_rows) is None:
            return
        text = session.tokenizer.decode(request.tokens) if session.tokenizer else None
        row = {"run": session.run, "pass": self.name, "row": request.index, "finish_reason": request.finish_reason}
        append_or_put_off(path, row | {"tokens": request.tokens, "text": text}, session.put_off)


@contextmanager
def bar_of_pass(session: Session, name: str, visible: bool = True) -> Iterator[Progress]:
    """Display a pass of a session as a progress bar."""
    with progress_bar(name, len(session.prompts) * session.plan.gen_len, visible) as bar:
        yield BarProgress(bar, session, name)
