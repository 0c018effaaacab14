"""The passes of a benchmark over one prefilled state: plain decoding, speculation, phase times."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain

import torch

from bench.auto.adaptive import Adaptive
from bench.auto.rehearsal import Rehearsal
from bench.auto.run_costs import RunCosts, costs_of
from bench.memory import available_bytes
from bench.progress import bar_of_pass, progress_bar
from bench.session import Session
from engine.contention import Usage, usage_so_far
from engine.counts import Counts, total
from engine.decoding import GenerateOutput, Generation, Phase
from engine.drafters import Drafter
from engine.drafters.speculated import Speculated
from engine.pacing import PLAIN, Choice, Fixed, Pacing
from engine.requests import Progress
from engine.runner import ModelRunner, captured_sizes
from engine.stats import Stats
from engine.timing import PhaseTimer, synchronize
from kv_cache import KVCache, StreamingKVCache
from kv_cache.base import KVShape

# What is shown of a pass, by its name, while it runs.
Watch = Callable[[Session, str], AbstractContextManager[Progress]]
# Rounds after which nothing is compiled or captured any more: a part is called, captured, then replayed.
WARM_UP_ROUNDS = 3
# Tokens of a row that a pass decodes in its turn.
TURN = 8
# The most of the memory left that copies of what passes decoded may take.
LARGEST_SHARE = 0.5


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


def run_passes(session: Session, watch: Watch | None = None) -> Passes:
    """Prefill, plain decoding unless --no_baseline, and of a draft speculation, and with --benchmark phase times.
    Plain decoding and speculation take turns, unless `watch` shows one behind the other or what drafts needs the text
    of the first."""
    which, draft, prefill_seconds = session.config.passes, session.draft, prefill(session)
    shown, done = watch or bar_of_pass, dict[str, Decoded]()
    pacings: dict[str, Pacing] = {} if which.no_baseline else {"baseline": Fixed(None)}
    if pacings:
        warm_up(session)
    if pacings and (draft is None or watch or draft.config.needs_baseline):
        done, pacings = decode_in_turns(session, pacings, watch=shown), {}
    if draft is None:
        return Passes(prefill_seconds, done.get("baseline"))
    drafters = session.drafters(done["baseline"].tokens if done else None)
    warm_up(session, drafters)
    costs = costs_of(session, drafters)
    done |= decode_in_turns(session, pacings | {"speculation": make_pacing(session, drafters, costs)}, watch=shown)
    timed = None
    if which.benchmark:
        timer = PhaseTimer(session.runner.device, session.ranks.timeout)
        pacing = make_pacing(session, drafters, costs)
        timed = decode(session, "phase times", phase=timer, pacing=pacing, watch=shown)
    return Passes(prefill_seconds, done.get("baseline"), done["speculation"], timed, costs)


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
            for n_tokens in runner.start_prefill(row, prompt)[1]:
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
    return decode_in_turns(session, {name: pacing or Fixed(drafter)}, phase, watch)[name]


def decode_in_turns(
    session: Session, pacings: Mapping[str, Pacing], phase: Phase | None = None, watch: Watch = bar_of_pass
) -> dict[str, Decoded]:
    """Return a pass for each pacing, by its name, decoded in turns (see `take_turns` and `decode`)."""
    session.processes.gathered(None)
    for one in chain.from_iterable(pacing.drafters for pacing in pacings.values()):
        if isinstance(one, Speculated):
            one.inner_counts()  # those of what ran before
    with ExitStack() as shown:
        passes = {
            name: session.generation(pacing=pacing, phase=phase, progress=shown.enter_context(watch(session, name)))
            for name, pacing in pacings.items()
        }
        usages = take_turns(session.runner, [*passes.values()])
    return {
        name: _joined(session, name, one, pacings[name], usage, phase)
        for (name, one), usage in zip(passes.items(), usages, strict=True)
    }


def take_turns(runner: ModelRunner, generations: Sequence[Generation]) -> list[Usage]:
    """Decode the same prompts several times, some tokens of a row in each turn, so that whatever else keeps the machine
    busy disturbs all alike; one behind the other where there are more prompts than rows, or no room for what follows.
    Returns the usage of each.

    A turn ends with what the rows hold behind their prompts copied elsewhere, and begins with that copied back: each
    decodes as if there were no other.
    """
    requests, own = generations[0].requests, runner.cache
    room = max((one.limit for one in requests), default=1)
    needed = len(generations) * room * own.n_bytes / own.capacity
    fits = runner.ranks.shared(lambda: needed < LARGEST_SHARE * available_bytes(str(own.device)))
    alone = len(generations) == 1 or len(requests) > runner.max_batch or not fits
    kept = [] if alone else [_beside(own, runner.model.config, room) for _ in generations]
    usages, goal = [Usage() for _ in generations], 0.0
    while going := [one for one in generations if not one.done]:
        goal = math.inf if alone or len(going) == 1 else goal + TURN * max(1, *(one.n_going for one in going))
        for index, one in enumerate(generations):
            if one.done:
                continue
            if kept:
                one.decoder.take_back(kept[index])
            before = usage_so_far()
            one.run(goal)
            usages[index] += usage_so_far().since(before)
            if kept:
                one.decoder.set_aside(kept[index])
    return usages


def _beside(own: KVCache, config: KVShape, n_tokens: int) -> KVCache:
    """Return a cache for the last tokens of each row of that one, stored alike."""
    return StreamingKVCache(config, own.max_batch, n_tokens, 0, own.device, own.entries.dtype)


def _joined(
    session: Session, name: str, generation: Generation, pacing: Pacing, usage: Usage, phase: Phase | None
) -> Decoded:
    """Return what all replicas decoded in a pass."""
    output = generation.output
    inner = [one.inner_counts() for one in pacing.drafters if isinstance(one, Speculated)]
    own = output, phase.seconds if isinstance(phase, PhaseTimer) else {}, inner
    each, seconds, inners = zip(*session.of_replicas(own), strict=True)
    of_rows = ("tokens", "finish_reasons", "errors")
    tokens, reasons, errors = ([*chain(*(getattr(one, name) for one in each))] for name in of_rows)
    phases = {name: [*chain(*(one.get(name, ()) for one in seconds))] for name in chain(*seconds)}
    stats, inner = Stats.joined([one.stats for one in each]), [*chain(*inners)]
    decoded = Decoded(tokens, reasons, errors, stats, usage, phases, total(inner) if inner else None)
    decoded.require_finite(name)
    return decoded
