"""Runs the passes of a benchmark over one prefilled state: plain decoding, speculation, phase times."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from bench.auto.adaptive import Adaptive
from bench.auto.measure import CostProfiler, RunCosts, costs_of
from bench.memory import available_bytes
from bench.progress import bar_of_pass, log_of_pass, progress_bar
from bench.session import Session
from common.contention import Usage, usage_so_far
from engine.controller import PLAIN, Controller, Fixed, RoundChoice
from engine.decoding import Phase
from engine.drafters import Drafter
from engine.generation import GenerateOutput, Generation
from engine.requests import Progress
from engine.runner import ModelRunner, Prefill, captured_sizes
from engine.stats import Counts, Stats, total
from engine.timing import PhaseTimer, synchronize
from kv_cache import KVCache, StreamingKVCache
from kv_cache.base import Prefilled
from models.llama import logits_dtype

# Displays the progress of a session's pass, given the pass's name.
Watch = Callable[[Session, str], AbstractContextManager[Progress]]
# Rounds after which nothing is compiled or captured any more: a part is called, captured, then replayed.
WARM_UP_ROUNDS = 3
# Tokens of a row that a pass decodes in its turn.
TURN = 8
# The largest share of the available memory that copies of decoded entries may take.
LARGEST_SHARE = 0.5


@dataclass(frozen=True)
class Decoded(GenerateOutput):
    """The output of a pass, with the rows of all replicas.

    usage: of processors, by this process. phases: a `PhaseTimer`'s seconds. inner: counts of an inner draft, or None.
    """

    usage: Usage
    phases: Mapping[str, Sequence[float]]
    inner: Counts | None = None


@dataclass(frozen=True)
class PassResults:
    """The outputs of the passes that ran, by name: "baseline", "speculation", "ablation 1" and so on (the plan's other
    candidates), and "phase times", which timing slows down. costs: the costs that `auto` chose by."""

    prefill_seconds: float
    outputs: Mapping[str, Decoded]
    costs: RunCosts | None = None

    @property
    def baseline(self) -> Decoded | None:
        return self.outputs.get("baseline")

    @property
    def speculative(self) -> Decoded | None:
        return self.outputs.get("speculation")

    @property
    def last(self) -> Decoded:
        """Speculation, or plain decoding if nothing else ran."""
        return self.outputs["speculation" if self.speculative else "baseline"]


def run_passes(session: Session, watch: Watch = bar_of_pass) -> PassResults:
    """Prefill, then decode plainly (unless --no_baseline), speculatively (with a draft), and with phases timed
    (--benchmark), and with every verified draft logged (--log_verification).

    Plain decoding and speculation take turns, unless the drafter needs the tokens of plain decoding or `watch` is not
    the default, which displays one pass at a time.
    """
    plan, prefill_seconds, done = session.plan, prefill(session), dict[str, Decoded]()
    options = plan.config.passes
    waiting: dict[str, Controller] = {} if options.no_baseline else {"baseline": Fixed(None)}
    if waiting:
        warm_up(session)
    settle()
    if waiting and (not plan.candidates or watch is not bar_of_pass or plan.needs_baseline):
        done, waiting = decode_in_turns(session, waiting, watch=watch), {}
    if not plan.candidates:
        return PassResults(prefill_seconds, done)
    drafters = session.drafters(done["baseline"].tokens if done else None)
    warm_up(session, drafters)
    settle()
    costs = costs_of(session, drafters)
    new_controller = partial(make_controller, session, drafters, costs)
    waiting["speculation"] = new_controller()
    if options.ablate:
        waiting |= {f"ablation {n}": Fixed(drafter) for n, drafter in enumerate(drafters) if n}
    done |= decode_in_turns(session, waiting, watch=watch)
    if options.benchmark:
        timer = PhaseTimer(session.runner.device, session.ranks.timeout)
        done["phase times"] = decode(session, "phase times", new_controller(), timer, watch)
    if options.log_verification:
        decode(session, "verifications", new_controller(), watch=log_of_pass)
    return PassResults(prefill_seconds, done, costs)


def make_controller(session: Session, drafters: Sequence[Drafter], *costs: RunCosts | None) -> Controller:
    """Return a controller that chooses by costs, measured at one or several contexts, or a fixed one without costs."""
    plan = session.plan
    by_context = {measured.context: measured.by_rows for measured in costs if measured}
    names = [(each.config.kind, each.policy.name if each.policy else "") for each in plan.candidates]
    return Adaptive(drafters, by_context, plan.gammas, names) if by_context else Fixed(drafters[0])


def settle() -> None:
    """Leave the objects that exist now out of garbage collections, until another session is opened: a collection that
    goes through a loaded model's objects would pause a round."""
    gc.collect()
    gc.freeze()


def warm_up(session: Session, drafters: Sequence[Drafter] = ()) -> None:
    """Compile or capture what rounds need, if anything: run a few from the prefilled state before any is measured."""
    runner, plan = session.runner, session.plan
    if plan.target.gen_len < 2 or (not plan.config.target.compile and runner.graphs is None):
        return
    choices = [PLAIN] if not drafters or plan.automatic else []
    gammas = [(i, gamma) for i, drafter in enumerate(drafters) for gamma in plan.gammas if gamma <= drafter.gamma]
    choices += [RoundChoice(i, gamma) for i, gamma in gammas]
    gamma = max(choice.gamma for choice in choices)
    # Twice as many rounds as a policy has between two refreshes.
    n_rounds = max([WARM_UP_ROUNDS, *(2 * drafter.refresh_every for drafter in drafters)])
    for n_rows in captured_sizes(runner.max_batch) if runner.graphs else sorted({2, runner.max_batch}):
        profiler = CostProfiler(runner, drafters, session.prompts[:n_rows], gamma=gamma, **session.how)
        for choice in choices:  # one after the other, so that a refresh comes with each gamma
            profiler.run([choice], n_rounds)


@torch.inference_mode()
def prefill(session: Session) -> float:
    """Prefill the first prompt of every row, with a progress bar. Returns the slowest process's seconds, without those
    that `--prefix_cache` takes to write rows."""
    runner, first = session.runner, session.prompts[: session.runner.max_batch]
    if session.plan.config.target.compile:
        # The second length makes the number of tokens a variable, and a single token is special.
        chunk = min(runner.prefill_chunk, len(first[0]))
        for n_token in (chunk, max(2, chunk - 1), 1):
            runner.extend_row(0, first[0][:n_token])
    started = time.perf_counter()
    with progress_bar("prefill", sum(map(len, first))) as bar:
        for row, prompt in enumerate(first):
            runs = Prefill(runner, row, prompt)
            while runs.n_left:
                bar.update(runs.run_chunk())
            runs.finish()
    synchronize(runner.device)
    saving = runner.prefixes.saving_seconds if runner.prefixes else 0.0
    return max(session.processes.all_gather_object(time.perf_counter() - started - saving))


@torch.inference_mode()
def fill_with_noise(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> None:
    """Fill every row with random keys and values at the positions of its prompt, as if that had been prefilled."""
    cache, model = runner.cache, runner.model
    randomise(cache.view(extent=max(map(len, prompts))))
    dtype = logits_dtype(model.dtype, cache.device)
    for row, prompt in enumerate(prompts):
        cache.reset_row(row)
        cache.positions[row, : len(prompt)] = torch.arange(len(prompt), device=cache.device)
        logits = torch.randn(model.config.vocab_size, device=cache.device, dtype=dtype)
        cache.prefilled[row] = Prefilled(model, tuple(prompt), logits, None)


def randomise(cache: KVCache) -> None:
    """Fill every slot with random keys and values; 8-bit entries are drawn a row of a layer at a time, in float32."""
    if cache.scales is None:
        cache.entries.normal_()
        return
    for layer in cache.entries:
        for row in layer.unbind(1):
            row.copy_(torch.randn(row.shape, device=row.device))
    cache.scales.fill_(1)


def decode(
    session: Session, name: str, controller: Controller, phase: Phase | None = None, watch: Watch = bar_of_pass
) -> Decoded:
    """Decode the prompts once from the prefilled state (see `decode_in_turns`)."""
    return decode_in_turns(session, {name: controller}, phase, watch)[name]


def decode_in_turns(
    session: Session,
    controllers: Mapping[str, Controller],
    phase: Phase | None = None,
    watch: Watch = bar_of_pass,
    **how: Any,
) -> dict[str, Decoded]:
    """Decode the prompts once for each controller, by name, in turns (see `take_turns`). Replicas start together, and
    every process gets all rows.

    how: arguments of `generate`. Errors: UserError with row and position if logits were not finite.
    """
    session.processes.all_gather_object(None)  # replicas start together
    for drafter in chain.from_iterable(controller.drafters for controller in controllers.values()):
        drafter.inner_counts()  # forgets the counts of earlier passes
    with ExitStack() as watching:
        passes = {}
        for name, controller in controllers.items():
            progress = watching.enter_context(watch(session, name))
            passes[name] = session.generation(controller=controller, phase=phase, progress=progress, **how)
        usages = take_turns(session.runner, [*passes.values()])
    found = dict[str, Decoded]()
    for (name, generation), usage in zip(passes.items(), usages, strict=True):
        inner = [counts for drafter in controllers[name].drafters if (counts := drafter.inner_counts()) is not None]
        phases, counts = dict(phase.seconds) if isinstance(phase, PhaseTimer) else {}, total(inner) if inner else None
        parts = session.by_replica(Decoded(**vars(generation.output), usage=usage, phases=phases, inner=counts))
        found[name] = replace(joined(parts, Stats.joined([part.stats for part in parts])), usage=usage)
        found[name].require_finite(name)
    return found


def decode_batches(session: Session, **how: Any) -> Iterator[tuple[GenerateOutput, GenerateOutput]]:
    """Decode the prompts batch by batch, plainly and speculatively in turns (see `take_turns`); yield both outputs.

    how: arguments of `generate`. Errors: UserError for logits that are not finite.
    """
    n_rows, drafters = session.plan.target.n_rows, session.drafters()
    warm_up(session, drafters)
    settle()
    costs = costs_of(session, drafters)
    with progress_bar(session.name, len(session.prompts), unit="prompt") as bar:
        for first in range(0, len(session.prompts), n_rows):
            batch = replace(session, prompts=session.prompts[first:][:n_rows], numbered_from=first)
            ways = {"plain decoding": Fixed(None), "speculation": make_controller(session, drafters, costs)}
            plain, drafted = decode_in_turns(batch, ways, watch=lambda *_: nullcontext(Progress()), **how).values()
            bar.update(len(batch.prompts))
            yield plain, drafted


def take_turns(runner: ModelRunner, generations: Sequence[Generation]) -> list[Usage]:
    """Decode the same prompts several times, TURN tokens of a row at a time, so that other processes disturb all alike.

    A turn ends with a copy of the entries after the prompts, and begins by copying them back: each generation decodes
    as if it were alone. They decode one after the other if there are more prompts than rows, or no room for copies.
    Returns the usage of processors of each generation.
    """
    requests, cache = generations[0].requests, runner.cache
    n_tokens = max((request.limit for request in requests), default=1)
    needed = len(generations) * n_tokens * cache.n_bytes / cache.capacity
    fits = runner.ranks.broadcast_object(lambda: needed < LARGEST_SHARE * available_bytes(str(cache.device)))
    alone = len(generations) == 1 or len(requests) > runner.max_batch or not fits
    sizes = runner.model.config, cache.max_batch, n_tokens, 0, cache.device, cache.entries.dtype
    copies = [] if alone else [StreamingKVCache(*sizes) for _ in generations]
    usages, goal = [Usage() for _ in generations], 0.0
    while unfinished := [index for index, generation in enumerate(generations) if not generation.done]:
        n_rows = max(1, *(generations[index].n_unfinished for index in unfinished))
        goal = math.inf if alone or len(unfinished) == 1 else goal + TURN * n_rows
        for index in unfinished:
            generation = generations[index]
            if copies:
                generation.decoder.copy_answers(copies[index], cache)
                synchronize(cache.device, runner.ranks.timeout)
            before = usage_so_far()
            generation.run(goal)
            usages[index] += usage_so_far().since(before)
            if copies:
                generation.decoder.copy_answers(cache, copies[index])
    return usages


def joined(parts: Sequence[Decoded], stats: Stats) -> Decoded:
    """Return the output of a pass in several replicas, or over several batches. stats: those of all parts."""
    columns = ("tokens", "finish_reasons", "errors")
    tokens, reasons, errors = ([*chain(*(getattr(part, column) for part in parts))] for column in columns)
    names = dict.fromkeys(chain(*(part.phases for part in parts)))
    phases = {name: [*chain(*(part.phases.get(name, ()) for part in parts))] for name in names}
    inner, usage = [part.inner for part in parts if part.inner], sum((part.usage for part in parts), Usage())
    return Decoded(tokens, reasons, errors, stats, usage, phases, total(inner) if inner else None)
