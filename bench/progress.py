"""Progress bars, on the leader's standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from bench.session import Session
from common.errors import UserError
from common.jsonl import append_or_put_off, append_record
from common.process import is_leader
from engine.requests import Progress, Request, VerifiedRow


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


def verified_drafts(row: VerifiedRow) -> Iterator[dict[str, Any]]:
    """Yield a line for every verified draft token, with its probability p by the target and q by the draft (None if it
    was not drawn), and the target's entropy at its position, in nats."""
    verified, device = row.drafts[: row.part.verified], row.logprobs.device
    drafts = torch.tensor(verified, dtype=torch.int64, device=device)[:, None]
    logprobs, q = row.logprobs[: len(drafts)], [None] * len(drafts)
    if row.draft_logprobs is not None:
        q = row.draft_logprobs[: len(drafts)].gather(1, drafts)[:, 0].exp().tolist()
    p, entropy = logprobs.gather(1, drafts)[:, 0].exp().tolist(), torch.special.entr(logprobs.exp()).sum(1).tolist()
    columns = {"draft": verified, "p": p, "q": q, "entropy": entropy}
    for i, values in enumerate(zip(*columns.values(), strict=True)):
        line = {"request": row.request.index, "position": row.start + i} | dict(zip(columns, values, strict=True))
        yield line | {"accepted": i < row.part.accepted}


@dataclass(frozen=True)
class VerificationLog(BarProgress):
    """Lists every verified draft token."""

    observes = True
    lines: list[dict[str, Any]] = field(default_factory=list)

    def verified(self, row: VerifiedRow) -> None:
        self.lines.extend(verified_drafts(row))


@contextmanager
def bar_of_pass(session: Session, name: str, visible: bool = True) -> Iterator[Progress]:
    """Display a pass of a session as a progress bar."""
    label = name
    if name.startswith("ablation"):
        made = session.plan.candidates[int(name.split()[1])].record()
        label = f"{name}: {made['draft_weights'] or made['draft_dtype']} weights, {made['draft_policy']}"
    with progress_bar(label, len(session.prompts) * session.plan.target.gen_len, visible) as bar:
        yield BarProgress(bar, session, name)


@contextmanager
def log_of_pass(session: Session, name: str) -> Iterator[Progress]:
    """Display a pass, and append its verified draft tokens to the file of `--log_verification`."""
    with progress_bar(name, len(session.prompts) * session.plan.target.gen_len) as bar:
        yield (log := VerificationLog(bar))
    path = session.plan.config.passes.log_verification if log.lines else None  # other ranks have no lines
    try:
        append_record(path, *({"run": session.run} | line for line in log.lines))
    except UserError as error:
        session.put_off.append(error)
