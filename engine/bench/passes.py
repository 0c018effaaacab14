"""The passes of a benchmark over one prefilled state: plain decoding, speculation, phase times."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from engine.decoding import GenerateOutput, Phase
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice, Fixed, Interleaved, Pacing
from engine.requests import Progress, Request
from engine.runner import captured_sizes
from engine.timing import PhaseTimer, synchronize

# Rounds after which nothing is compiled or captured any more: a part is called, captured, then replayed.
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Decoded(GenerateOutput):
    """What a pass decoded, and its `usage` of the processors."""

    usage: Usage


@dataclass(frozen=True)
class Passes:
    """What was run; `timed` is a pass of its own, because timing phases slows them down. costs: what `auto` chose by,
    measured in `cost_seconds`.
    """

    prefill_seconds: float
    baseline: Decoded | None = None
    speculative: Decoded | None = None
    timed: tuple[PhaseTimer, Decoded] | None = None
    costs: Sequence[Costs] = ()
    cost_seconds: float = 0.0

    @property
    def by_name(self) -> dict[str, Decoded]:
        """Those that were made."""
        timed = self.timed[1] if self.timed else None
        named = {"baseline": self.baseline, "speculation": self.speculative, "phase times": timed}
        return {name: output for name, output in named.items() if output}

    @property
    def last(self) -> Decoded:
        """What the benchmark is about: speculation, or plain decoding where nothing else was run."""
        return self.by_name["speculation" if self.speculative else "baseline"]


def plain_passes(session: Session) -> Passes:
    """Prefill, then plain decoding."""
    prefill_seconds = prefill(session)
    warm_up(session)
    return Passes(prefill_seconds, decode(session, "baseline"))


def speculation_passes(session: Session) -> Passes:
    """Prefill, plain decoding unless --no_baseline, speculation, and with --benchmark phase times."""
    which = session.config.passes
    plain = Passes(prefill(session)) if which.no_baseline else plain_passes(session)
    drafters = session.drafters(plain.baseline.tokens if plain.baseline else None)
    warm_up(session, drafters)
    started = time.perf_counter()
    costs = costs_of(session, drafters)
    cost_seconds = time.perf_counter() - started

    def speculate(name: str, timer: PhaseTimer | None = None) -> Decoded:
        return decode(session, name, phase=timer, pacing=make_pacing(session, drafters, costs))

    speculative, timer = speculate("speculation"), PhaseTimer(session.runner.device)
    timed = (timer, speculate("phase times", timer)) if which.benchmark else None
    return replace(plain, speculative=speculative, timed=timed, costs=costs, cost_seconds=cost_seconds)


def costs_of(session: Session, drafters: Sequence[Drafter]) -> list[Costs]:
    """What the rounds of each drafter cost, measured from the prefilled state where something is to be chosen: by every
    rank, and the first one's counts on all.
    """
    draft = session.draft
    if not draft or not draft.automatic or draft.gamma < 1 or session.plan.gen_len < 2:
        return []
    say("measuring what rounds cost")
    measured = measure_costs(session.runner, drafters, session.prompts, gammas=draft.gammas, **_how(session))
    return session.ranks.shared(lambda: measured)


def make_pacing(session: Session, drafters: Sequence[Drafter], costs: Sequence[Costs]) -> Pacing:
    """The one drafter in every round, or what pays best by costs and by the acceptance seen with them."""
    assert session.draft is not None
    return Adaptive(drafters, costs, session.draft.gammas) if costs else Fixed(drafters[0])


def warm_up(session: Session, drafters: Sequence[Drafter] = ()) -> None:
    """A few rounds from the prefilled state where something is compiled or captured, so that no measured round is."""
    runner, draft = session.runner, session.draft
    if session.plan.gen_len < 2 or (not session.config.target.compile and runner.graphs is None):
        return
    choices = [Choice(index, gamma) for index in range(len(drafters)) for gamma in (draft.gammas if draft else ())]
    if not drafters or (draft and draft.automatic):
        choices.insert(0, PLAIN)
    for n_rows in captured_sizes(runner.max_batch) if runner.graphs else sorted({2, runner.max_batch}):
        pacing = Interleaved(drafters, choices, n_rows, WARM_UP_ROUNDS)
        for _ in interleaved_rounds(runner, pacing, session.prompts, **_how(session)):
            pass


def _how(session: Session) -> dict[str, Any]:
    """How the session decodes where costs are measured, whatever would end a row."""
    sampling = session.sampling
    return {"max_new_tokens": session.plan.gen_len, "sampling": sampling.params, "verification": sampling.mode}


@torch.inference_mode()
def prefill(session: Session) -> float:
    """Prefill the prompts that start in the slots, with a progress bar; returns seconds."""
    runner, first = session.runner, session.prompts[: session.runner.max_batch]
    if session.config.target.compile:
        # The second length makes the number of tokens a variable, and one token is special.
        chunk = min(runner.prefill_chunk, len(first[0]))
        for n_token in (chunk, max(2, chunk - 1), 1):
            runner.fill_row(0, first[0][:n_token])
    started = time.perf_counter()
    with _bar("prefill", sum(map(len, first))) as bar:
        for row, prompt in enumerate(first):
            runner.prefill_row(row, prompt, bar.update)
    synchronize(runner.device)
    return time.perf_counter() - started


def decode(
    session: Session,
    name: str,
    drafter: Drafter | None = None,
    phase: Phase | None = None,
    pacing: Pacing | None = None,
) -> Decoded:
    """One pass over the prompts from the prefilled state, with a progress bar; the processors are watched. Errors:
    UserError naming row and position if any row's logits were not finite.
    """
    before = usage_so_far()
    with _bar(name, len(session.prompts) * session.plan.gen_len) as bar:
        output = session.generate(drafter, pacing=pacing, progress=_DecodeProgress(bar, session, name), phase=phase)
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
            text = tokenizer.decode(request.tokens) if tokenizer else None
            row |= {"finish_reason": request.finish_reason, "tokens": request.tokens, "text": text}
            append_or_put_off(path, row, self.session.put_off)


def _bar(name: str, total: int) -> tqdm:
    named = {"desc": f"{name:<12}", "unit": "tok"}
    return tqdm(total=total, file=sys.stderr, dynamic_ncols=True, disable=not is_leader(), **named)
