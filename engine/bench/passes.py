"""The passes of a benchmark over one prefilled state: plain decoding, speculation, phase times."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain

import torch

from engine.bench.auto_costs import RunCosts, costs_of
from engine.bench.progress import bar_of_pass, progress_bar
from engine.bench.session import Session
from engine.contention import Usage, usage_so_far
from engine.cost_model.adaptive import Adaptive
from engine.cost_model.rehearsal import Rehearsal
from engine.counts import Counts, total
from engine.decoding import GenerateOutput, Phase
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice, Fixed, Pacing
from engine.requests import Progress
from engine.runner import captured_sizes
from engine.stats import Stats
from engine.timing import PhaseTimer, synchronize

# What is shown of a pass, by its name, while it runs.
Watch = Callable[[Session, str], AbstractContextManager[Progress]]
# Rounds after which nothing is compiled or captured any more: a part is called, captured, then replayed.
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Decoded(GenerateOutput):
    """What a pass decoded, all replicas' rows as one, and this process's `usage` of the processors. phases: a
    `PhaseTimer`'s seconds. inner: of drafts for what drafted, all rows as one; None without any."""

    usage: Usage
    phases: Mapping[str, Sequence[float]]
    inner: Counts | None = None


@dataclass(frozen=True)
class Passes:
    """What was run; `timed` is a pass of its own, because timing phases slows it down. costs: what `auto` chose by."""

    prefill_seconds: float
    baseline: Decoded | None = None
    speculative: Decoded | None = None
    timed: Decoded | None = None
    costs: RunCosts | None = None

    @property
    def by_name(self) -> dict[str, Decoded]:
        """Those that were made."""
        named = {"baseline": self.baseline, "speculation": self.speculative, "phase times": self.timed}
        return {name: output for name, output in named.items() if output}

    @property
    def last(self) -> Decoded:
        """What the benchmark is about: speculation, or plain decoding where nothing else was run."""
        return self.by_name["speculation" if self.speculative else "baseline"]


def run_passes(session: Session, watch: Watch = bar_of_pass) -> Passes:
    """Prefill, plain decoding unless --no_baseline, and of a draft speculation, and with --benchmark phase times."""
    which, prefill_seconds, baseline = session.config.passes, prefill(session), None
    if not which.no_baseline:
        warm_up(session)
        baseline = decode(session, "baseline", watch=watch)
    if session.draft is None:
        return Passes(prefill_seconds, baseline)
    drafters = session.drafters(baseline.tokens if baseline else None)
    warm_up(session, drafters)
    costs = costs_of(session, drafters)

    def speculate(name: str, timer: PhaseTimer | None = None) -> Decoded:
        return decode(session, name, phase=timer, pacing=make_pacing(session, drafters, costs), watch=watch)

    speculative = speculate("speculation")
    timed = speculate("phase times", PhaseTimer(session.runner.device)) if which.benchmark else None
    return Passes(prefill_seconds, baseline, speculative, timed, costs)


def make_pacing(session: Session, drafters: Sequence[Drafter], *costs: RunCosts | None) -> Pacing:
    """Return a pacing of what pays best by costs, at one or several contexts, and by the acceptance seen with them;
    without costs, of the one drafter in every round."""
    assert session.draft is not None
    names, by_context = [one.name for one in session.draft.policies], {one.context: one.by_rows for one in costs if one}
    return Adaptive(drafters, by_context, session.draft.gammas, names) if by_context else Fixed(drafters[0])


def warm_up(session: Session, drafters: Sequence[Drafter] = ()) -> None:
    """A few rounds from the prefilled state where something is compiled or captured, so that no measured round is."""
    runner, draft = session.runner, session.draft
    if session.gen_len < 2 or (not session.config.target.compile and runner.graphs is None):
        return
    choices = [PLAIN] if not drafters or (draft and draft.automatic) else []
    choices += [Choice(index, gamma) for index in range(len(drafters)) for gamma in (draft.gammas if draft else ())]
    gamma = max(choice.gamma for choice in choices)
    # What comes every so many rounds, twice.
    n_rounds = max([WARM_UP_ROUNDS, *(2 * one.refresh_every for one in drafters)])
    for n_rows in captured_sizes(runner.max_batch) if runner.graphs else sorted({2, runner.max_batch}):
        prompts = session.prompts[:n_rows]
        rehearsal = Rehearsal(runner, drafters, prompts, gamma=gamma, **session.how)
        for choice in choices:  # one by one: what comes every so many rounds comes with each gamma
            rehearsal.run([choice], n_rounds)


@torch.inference_mode()
def prefill(session: Session) -> float:
    """Prefill the prompts that start in the slots, with a progress bar; returns the slowest process's seconds."""
    runner, first = session.runner, session.prompts[: session.runner.max_batch]
    if session.config.target.compile:
        # The second length makes the number of tokens a variable, and one token is special.
        chunk = min(runner.prefill_chunk, len(first[0]))
        for n_token in (chunk, max(2, chunk - 1), 1):
            runner.fill_row(0, first[0][:n_token])
    started = time.perf_counter()
    with progress_bar("prefill", sum(map(len, first))) as bar:
        for row, prompt in enumerate(first):
            for n_tokens in runner.prefilling(row, prompt)[1]:
                bar.update(n_tokens)
    synchronize(runner.device)
    return max(session.processes.gathered(time.perf_counter() - started))


def decode(
    session: Session,
    name: str,
    drafter: Drafter | None = None,
    phase: Phase | None = None,
    pacing: Pacing | None = None,
    watch: Watch = bar_of_pass,
) -> Decoded:
    """One pass over the prompts from the prefilled state, shown by `watch`. Replicas start together, and every process
    has what all of them decoded. Errors: UserError naming row and position if any row's logits were not finite."""
    session.processes.gathered(None)
    pacing = pacing or Fixed(drafter)
    for one in pacing.drafters:
        one.inner_counts()  # those of what ran before
    before = usage_so_far()
    with watch(session, name) as progress:
        output = session.generate(pacing=pacing, progress=progress, phase=phase)
    usage = usage_so_far().since(before)
    inner = [counts for one in pacing.drafters if (counts := one.inner_counts())]
    own = output, phase.seconds if isinstance(phase, PhaseTimer) else {}, inner
    each, seconds, inners = zip(*session.of_replicas(own), strict=True)
    of_rows = ("tokens", "finish_reasons", "errors")
    tokens, reasons, errors = ([*chain(*(getattr(one, name) for one in each))] for name in of_rows)
    phases = {name: [*chain(*(one.get(name, ()) for one in seconds))] for name in chain(*seconds)}
    stats, inner = Stats.joined([one.stats for one in each]), [*chain(*inners)]
    decoded = Decoded(tokens, reasons, errors, stats, usage, phases, total(inner) if inner else None)
    decoded.require_finite(name)
    return decoded
