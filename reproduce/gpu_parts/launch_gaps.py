"""Part e: the time of a round in which the device computes, and in which it waits for the host or a launch."""

import itertools
from collections import Counter
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine.bench import passes
from engine.bench.config import Sizes
from engine.bench.record import rounded
from engine.bench.session import Session
from reproduce.gpu_parts.cells import Cell, Options, Record, shared
from reproduce.gpu_parts.speculation import COUPLED, GAMMA, dummy_session, self_draft, size_record

# Of how many kernels the record says more.
N_KERNELS = 10


def cells(options: Options) -> list[Cell]:
    found = []
    for size, what in itertools.product(options.sizes["gaps"], ("speculation", "plain")):
        name = "{}, B {}, S {}, {}".format(*size, what)
        found.append(Cell("e", "gpu_launch_gaps", name, partial(profiled, options, size, what)))
    return found


def profiled(options: Options, size: tuple[str, int, int], what: str) -> Record:
    """Wall time of a round without the profiler, time in kernels with it, and the kernels that take most of it."""
    session, kind = _filled(options, *size), "CUDA" if options.on_cuda else "CPU"
    drafter = session.drafter() if what == "speculation" else None
    try:
        passes.warm_up(session, [drafter] if drafter else [])
        stats = passes.decode(session, "wall time", drafter).stats
        with profile(activities=[getattr(ProfilerActivity, kind)]) as profiler:
            n_profiled = len(passes.decode(session, "profile", drafter).stats.rounds)
    finally:
        if drafter is not None:
            session.runner.drop_graphs()
    times = Counter[str]()
    for event in profiler.events():
        # A range of the profiler's user covers kernels that are there as well.
        if event.device_type == getattr(DeviceType, kind) and not event.is_user_annotation:
            times[event.name[:160]] += event.time_range.elapsed_us() / 1e3 / n_profiled
    kernel_ms, round_ms = times.total(), 1e3 * stats.decode_seconds / len(stats.rounds)
    record = {"model": size[0], "load_format": "dummy", **size_record(session), "prefix_len": size[2]}
    record |= {"gamma": GAMMA if drafter else 0, "draft_budget": session.draft.capacity if drafter else None}
    record |= {"attention": session.runner.model.backend.name, "compile": session.config.target.compile}
    record |= {"verification": session.sampling.mode, "rounds": len(stats.rounds), "round_ms": round_ms}
    gap_percent = 100 * (1 - kernel_ms / round_ms) if options.on_cuda else None
    record |= {"kernel_ms_per_round": kernel_ms, "gap_percent": gap_percent}
    kernels = [{"kernel": name, "ms_per_round": ms} for name, ms in times.most_common(N_KERNELS)]
    return rounded(record | {"largest": kernels})


@shared
def _filled(options: Options, model: str, batch: int, context: int) -> Session:
    if options.on_cuda:
        # Before any graph is captured: kernels of graphs from before the first profile may not be seen by it.
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.ones(8, device=options.device).sum().item()
    draft = self_draft(GAMMA, options.sizes["budget"])
    return dummy_session(
        options, model, Sizes(batch, context, options.sizes["gaps_tokens"]), draft=draft, sampling=COUPLED
    )
