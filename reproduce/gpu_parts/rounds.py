"""Measure rounds of tests/selfspec_benchmark.py: step times, kernels, the time between kernels, and memory."""

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import memory, passes
from bench.benchmark_flags import SelfSpecFlags
from bench.dummy_prefill import fill_with_noise
from bench.plan import resolve
from bench.record import make_record, rounded
from bench.session import Session
from common import cli
from engine.pacing import Fixed, Pacing
from engine.requests import Progress
from engine.stats import RoundStats
from engine.timing import PhaseTimer, synchronize
from reproduce.helpers.records import Record


def measure(device: str, words: str) -> Record:
    """Return the benchmark's record for flags, with the kernels of its rounds and the peak of memory over the plan.
    Random weights decode over random entries. Rows that do not fit into memory are left out."""
    if device != "cpu":  # a profile may miss kernels of graphs that were captured before the first profile
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.ones(8, device=device).sum().item()
    session = open_fitting(f"{words} --device {device}")
    runner, is_dummy = session.runner, session.plan.config.target.load_format == "dummy"
    seconds = fill_with_noise(runner, session.prompts) if is_dummy else passes.prefill(session)
    began, drafters = time.perf_counter(), session.drafters()
    passes.warm_up(session)
    passes.warm_up(session, drafters)
    synchronize(runner.device)
    warm_up_seconds, costs = time.perf_counter() - began, passes.costs_of(session, drafters)

    def pacing() -> Pacing:
        return passes.make_pacing(session, drafters, costs)

    done = passes.decode_in_turns(session, {"plain": Fixed(None), "speculation": pacing()})
    timed = passes.decode(session, "phase times", pacing=pacing(), phase=PhaseTimer(runner.device))
    made = passes.PassResults(seconds or 0.0, done["plain"], done["speculation"], timed, costs)
    record = make_record("gpu", session, made) | {"prefill_seconds": seconds, "asked_B": session.plan.config.sizes.B}
    planned, stats = memory.memory_plan(session.plan).total(session.plan.n_rows), done["speculation"].stats
    profiled = ProfiledRounds(device)
    passes.decode(session, "profile", pacing=pacing(), watch=lambda session, name: nullcontext(profiled))
    times, n_node = profiled.kernels()
    n_round, round_ms = profiled.n_round, 1e3 * stats.decode_seconds / len(stats.rounds)
    busy_ms = times.total() / n_round
    measured: Record = {"warm_up_seconds": warm_up_seconds, "planned_bytes": planned, "kernel_ms": busy_ms}
    measured |= {"peak_over_plan": record["peak_memory_bytes"] / planned if device != "cpu" else None}
    measured |= {"nodes_per_layer": n_node / n_round / runner.model.config.n_layer}
    measured |= {"gap_percent": 100 * (1 - busy_ms / round_ms) if device != "cpu" else None}
    measured |= {"largest": [[name, ms / n_round] for name, ms in times.most_common(10)]}
    measured |= {"differing_rows": record["sequences"] - (record["identical_sequences"] or 0)}
    measured |= {"graphs": len(getattr(runner.graphs, "captured", ()))}
    runner.drop_graphs()
    return record | rounded(measured)


def open_fitting(words: str) -> Session:
    """Open a session for flags, with the rows that fit into memory. Errors: OutOfMemoryError if none fits."""
    plan = resolve(cli.read(SelfSpecFlags, words.split(), "selfspec_benchmark.py").config())
    most = memory.memory_plan(plan).largest_batch(memory.available_bytes(plan.device))
    n_rows = min(plan.n_rows, most) or plan.n_rows
    return Session.of_plan(replace(plan, n_rows=n_rows, n_prompts=n_rows))


class ProfiledRounds(Progress):
    """Profiles the rounds of a pass behind the first, which follows the prefill of drafts: at most `most` of them."""

    def __init__(self, device: str, most: int = 8) -> None:
        self._kind, self._most, self._n_ended = "CPU" if device == "cpu" else "CUDA", most, 0
        self._profiler = profile(activities=[getattr(ProfilerActivity, self._kind)])

    @property
    def n_round(self) -> int:
        return min(self._n_ended - 1, self._most)

    def ended(self, round_: RoundStats) -> None:
        if self._n_ended == 0:
            self._profiler.start()
        if self._n_ended == self._most:
            self._profiler.stop()
        self._n_ended += 1

    def kernels(self) -> tuple[Counter[str], int]:
        """Return the ms of each kernel and copy on the GPU (on a CPU: of each operation), and how many ran."""
        if self._n_ended <= self._most:
            self._profiler.stop()
        times, n_node = Counter[str](), 0
        for event in self._profiler.events():
            # A user annotation covers kernels that are events, too.
            if event.device_type == getattr(DeviceType, self._kind) and not event.is_user_annotation:
                times[event.name[:160]] += event.time_range.elapsed_us() / 1e3
                n_node += 1
        return times, n_node
