"""The passes of a benchmark over one prefilled state: plain decoding, speculation, phase times."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from common.jsonl import append_or_put_off
from common.process import is_leader
from common.say import say
from engine.bench.session import Session
from engine.contention import Usage, usage_so_far
from engine.cost_model.adaptive import Adaptive
from engine.cost_model.costs import Costs
from engine.cost_model.measure import interleaved_rounds, measure_costs
from engine.decoding import GenerateOutput
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice, Fixed, Interleaved, Pacing
from engine.requests import Progress, Request
from engine.timing import PhaseTimer, synchronize


@dataclass(frozen=True)
class Decoded(GenerateOutput):
    """What a pass decoded, and its `usage` of the processors."""

    usage: Usage


@dataclass(frozen=True)
class Passes:
    """What was run. `timed` is a pass of its own, because timing phases slows them down.

    costs: what `auto` chose by, measured in `cost_seconds`.
    """

    prefill_seconds: float
    baseline: Decoded | None
    speculative: Decoded | None = None
    timed: tuple[PhaseTimer, Decoded] | None = None
    costs: Sequence[Costs] = ()
    cost_seconds: float = 0.0


# Rounds after which nothing is compiled or captured any more: a part is called, captured, then replayed.
WARM_UP_ROUNDS = 3


def plain_passes(session: Session) -> Passes:
    """Prefill, then plain decoding."""
    prefill_seconds = prefill(session)
    warm_up(session)
    return Passes(prefill_seconds, decode(session, "baseline"))


def speculation_passes(session: Session) -> Passes:
    """Prefill, plain decoding unless --no_baseline, speculation, and with --benchmark phase times."""
    prefill_seconds = prefill(session)
    baseline = None
    if not session.config.passes.no_baseline:
        warm_up(session)
        baseline = decode(session, "baseline")
    drafters = session.drafters(baseline.tokens if baseline else None)
    warm_up(session, drafters)
    started = time.perf_counter()
    costs = costs_of(session, drafters)
    cost_seconds = time.perf_counter() - started

    def speculate(name: str, timer: PhaseTimer | None = None) -> Decoded:
        return decode(session, name, timer=timer, pacing=make_pacing(session, drafters, costs))

    speculative = speculate("speculation")
    timed = None
    if session.config.passes.benchmark:
        timer = PhaseTimer(session.runner.device)
        timed = timer, speculate("phase times", timer)
    return Passes(prefill_seconds, baseline, speculative, timed, costs, cost_seconds)


def costs_of(session: Session, drafters: Sequence[Drafter]) -> list[Costs]:
    """What the rounds of each drafter cost, measured from the prefilled state, where something is to be chosen.

    Every rank takes part in the measurement, and the first one's counts on all.
    """
    if not session.draft or not session.draft.automatic or session.draft.gamma < 1 or session.plan.gen_len < 2:
        return []
    say("measuring what rounds cost")
    measured = measure_costs(
        session.runner,
        drafters,
        session.prompts,
        gammas=session.draft.gammas,
        max_new_tokens=session.plan.gen_len,
        sampling=session.sampling.params,
        verification=session.sampling.mode,
    )
    return session.ranks.shared(lambda: measured)


def make_pacing(session: Session, drafters: Sequence[Drafter], costs: Sequence[Costs]) -> Pacing:
    """The one drafter in every round, or what pays best by costs and by the acceptance seen with them."""
    assert session.draft is not None
    if not costs:
        return Fixed(drafters[0])
    return Adaptive(drafters, costs, session.draft.gammas)


def warm_up(session: Session, drafters: Sequence[Drafter] = ()) -> None:
    """A few rounds from the prefilled state where something is compiled or captured, so that no measured round is."""
    if not session.config.target.compile and session.runner.graphs is None:
        return
    if session.plan.gen_len > 1:
        rounds = interleaved_rounds(
            session.runner,
            Interleaved(drafters, _possible(session, drafters), session.runner.max_batch, WARM_UP_ROUNDS),
            session.prompts,
            max_new_tokens=session.plan.gen_len,
            sampling=session.sampling.params,
            verification=session.sampling.mode,
        )
        for _ in rounds:
            pass


def _possible(session: Session, drafters: Sequence[Drafter]) -> list[Choice]:
    """Every choice that a round of these drafters can be; plain steps without any."""
    if not drafters:
        return [PLAIN]
    assert session.draft is not None
    speculative = [Choice(index, gamma) for index in range(len(drafters)) for gamma in session.draft.gammas]
    return [PLAIN, *speculative] if session.draft.automatic else speculative


@torch.inference_mode()
def prefill(session: Session) -> float:
    """Prefill the prompts that start in the slots, with a progress bar; returns seconds."""
    first = session.prompts[: session.runner.cache.max_batch]
    if (
        session.config.target.compile
    ):  # the second length makes the number of tokens a variable, and one token is special
        chunk = min(session.runner.prefill_chunk, len(first[0]))
        for n_token in (chunk, max(2, chunk - 1), 1):
            session.runner.fill_row(0, first[0][:n_token])
    started = time.perf_counter()
    with _bar("prefill", sum(map(len, first))) as bar:
        for row, prompt in enumerate(first):
            session.runner.prefill_row(row, prompt, bar.update)
    synchronize(session.runner.device)
    return time.perf_counter() - started


def decode(
    session: Session,
    name: str,
    drafter: Drafter | None = None,
    timer: PhaseTimer | None = None,
    pacing: Pacing | None = None,
) -> Decoded:
    """One pass over the prompts from the prefilled state, with a progress bar; the processors are watched.

    Raises UserError naming row and position if any row's logits were not finite.
    """
    before = usage_so_far()
    with _bar(name, len(session.prompts) * session.plan.gen_len) as bar:
        output = session.generate(drafter, pacing=pacing, progress=_DecodeProgress(bar, session, name), phase=timer)
    output.require_finite(name)
    return Decoded(**vars(output), usage=usage_so_far().since(before))


@dataclass(frozen=True)
class _DecodeProgress(Progress):
    bar: tqdm
    session: Session
    phase: str

    def prefilled(self, n_tokens: int) -> None:
        self.bar.set_postfix_str("prefilling", refresh=True)

    def emitted(self, n_tokens: int) -> None:
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update(n_tokens)

    def finished(self, request: Request) -> None:
        path, tokenizer = self.session.config.rows.save_rows, self.session.tokenizer
        if path is not None and self.session.ranks.leads:
            row = {"run": self.session.run, "pass": self.phase, "row": request.index}
            row |= {"finish_reason": request.finish_reason, "tokens": request.tokens}
            row |= {"text": tokenizer.decode(request.tokens) if tokenizer else None}
            append_or_put_off(path, row, self.session.put_off)


def _bar(name: str, total: int) -> tqdm:
    shown = {"file": sys.stderr, "dynamic_ncols": True, "disable": not is_leader()}
    return tqdm(total=total, desc=f"{name:<12}", unit="tok", **shown)
