"""Part e: the time of a round in which the device computes, and in which it waits for the host or a launch."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine.bench import passes
from engine.bench.config import Sizes
from engine.bench.record import rounded
from engine.bench.session import Session
from engine.decoding import Phase
from engine.drafters import Drafter
from engine.timing import synchronize
from reproduce.gpu_parts.cells import Cell, Options, Record, shared
from reproduce.gpu_parts.speculation import COUPLED, dummy_session, self_draft, size_record

GEN_LEN, GAMMA = 96, 3
# Rounds before those that are looked at, how many of them there are, and of how many kernels the record says more.
WARM_UP, ROUNDS, N_KERNELS = 4, 16, 10


def cells(options: Options) -> list[Cell]:
    found = []
    for size, what in itertools.product(options.sizes["gaps"], ("speculation", "plain")):
        name = "{}, B {}, S {}, {}".format(*size, what)
        found.append(Cell("e", "gpu_launch_gaps", name, partial(profiled, options, size, what)))
    return found


def around_rounds(device: torch.device, begin: Callable[[], object], end: Callable[[], object]) -> Phase:
    """Phases for `generate`, which call `begin` and `end` around ROUNDS whole rounds."""
    n_round, calls = itertools.count(), {WARM_UP: begin, WARM_UP + ROUNDS: end}

    def phase(name: str) -> AbstractContextManager[None]:
        if name == "draft" and (call := calls.get(next(n_round))):
            synchronize(device)
            call()
        return nullcontext()

    return phase


def profiled(options: Options, size: tuple[str, int, int], what: str) -> Record:
    """Wall time of a round without the profiler, time in kernels with it, and the kernels that take most of it."""
    session = _filled(options, *size)
    drafter = session.drafter() if what == "speculation" else None
    try:
        passes.warm_up(session, [drafter] if drafter else [])
        wall, kernels = _wall_and_kernels(options, session, drafter)
    finally:
        if drafter is not None:
            session.runner.drop_graphs()
    kernel_ms = sum(kernel["ms_per_round"] for kernel in kernels)
    target = session.config.target
    record = {"model": size[0], "load_format": target.load_format, **size_record(session), "prefix_len": size[2]}
    record |= {"gamma": GAMMA if drafter else 0, "draft_budget": session.draft.capacity if drafter else None}
    record |= {"attention": session.runner.model.backend.name, "compile": target.compile}
    record |= {"verification": session.sampling.mode, "rounds": ROUNDS, "round_ms": wall}
    gap_percent = 100 * (1 - kernel_ms / wall) if options.on_cuda else None
    record |= {"kernel_ms_per_round": kernel_ms, "gap_percent": gap_percent, "largest": kernels[:N_KERNELS]}
    return rounded(record)


def _wall_and_kernels(options: Options, session: Session, drafter: Drafter | None) -> tuple[float, list[Record]]:
    """Milliseconds of a round, and its kernels, those first that take most of it."""
    kind = "CUDA" if options.on_cuda else "CPU"
    device, times = session.runner.device, list[float]()

    def watch() -> None:
        times.append(time.perf_counter())

    passes.decode(session, "wall time", drafter, around_rounds(device, watch, watch))
    if len(times) != 2:
        raise RuntimeError(f"fewer than {WARM_UP + ROUNDS + 1} rounds were run")
    profiler = profile(activities=[getattr(ProfilerActivity, kind)])
    passes.decode(session, "profile", drafter, around_rounds(device, profiler.start, profiler.stop))
    microseconds: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        # A range of the profiler's user covers kernels that are there as well.
        if event.device_type == getattr(DeviceType, kind) and not event.is_user_annotation:
            microseconds[event.name].append(event.time_range.elapsed_us())
    if not microseconds:
        raise RuntimeError("the profiler saw no kernels")
    kernels = [
        {"kernel": name[:160], "ms_per_round": sum(us) / 1e3 / ROUNDS, "calls_per_round": round(len(us) / ROUNDS, 2)}
        for name, us in sorted(microseconds.items(), key=lambda item: -sum(item[1]))
    ]
    return 1e3 * (times[1] - times[0]) / ROUNDS, kernels


@shared
def _filled(options: Options, model: str, batch: int, context: int) -> Session:
    if options.on_cuda:
        # Before any graph is captured: kernels of graphs from before the first profile may not be seen by it.
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.ones(8, device=options.device).sum().item()
    draft = self_draft(GAMMA, options.sizes["budget"])
    return dummy_session(options, model, Sizes(batch, context, GEN_LEN), draft=draft, sampling=COUPLED)
