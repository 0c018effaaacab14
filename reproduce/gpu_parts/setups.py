"""Sessions that several cells share: one model over one filled cache, under different drafts and sampling."""

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.bench import passes
from engine.bench.config import RunConfig, Sampling, Sizes, Target
from engine.bench.dummy_prefill import fill_with_noise
from engine.bench.plan import resolve
from engine.bench.record import make_record
from engine.bench.room import memory_plan, room
from engine.bench.session import Session
from engine.drafters.self_speculation import SelfConfig
from engine.timing import PhaseTimer
from kv_cache.streaming import Streaming
from models.presets import PRESETS
from reproduce.gpu_parts.cells import Options, Record

COUPLED = Sampling(temperature=0.6, seed=7, verification="coupled")
# A model for a CPU and a test, of kinds of layers that quantise.
TINY = "tiny"
TINY_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 512}
TINY_CONFIG = PRESETS["JackFram/llama-68m"] | TINY_SIZES | {"num_key_value_heads": 1}


def self_draft(gamma: int, budget: int, weights: Any = "same") -> SelfConfig:
    return SelfConfig(gamma=gamma, policy=Streaming(budget), draft_weights=weights)


def open_session(options: Options, target: Target, **config: Any) -> Session:
    """On a GPU compiled, and with graphs. Of rows that do not fit into memory, as many as do.

    config: other fields of `RunConfig`. Errors: OutOfMemoryError if no row fits.
    """
    plan = resolve(RunConfig(replace(target, device=options.device, compile=options.on_cuda), **config))
    n_rows = min(plan.n_rows, memory_plan(plan).largest_batch(room(plan))) or plan.n_rows
    return Session.of_plan(replace(plan, n_rows=n_rows, n_prompts=n_rows))


def dummy_session(options: Options, model: str, sizes: Sizes, kv_dtype: Any = "same", **config: Any) -> Session:
    """Random weights of a published shape, or of TINY_CONFIG, over a cache of random entries."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, TINY).mkdir()
        Path(folder, TINY, "config.json").write_text(json.dumps(TINY_CONFIG))
        target = Target(model=f"{folder}/{TINY}") if model == TINY else Target(model_name=model)
        target = replace(target, load_format="dummy", kv_dtype=kv_dtype)
        session = open_session(options, target, sizes=sizes, **config)
    fill_with_noise(session.runner, session.prompts)
    return session


def size_record(session: Session) -> Record:
    """For a record: the rows, those that were asked for, and the bytes that the memory plan has for them."""
    plan = session.plan
    return {"B": plan.n_rows, "asked_B": plan.config.sizes.B, "planned_bytes": memory_plan(plan).total(plan.n_rows)}


@dataclass(frozen=True)
class Filled:
    """A session over a filled cache, and plain decoding from it in each verification mode that was asked for."""

    session: Session
    prefill_seconds: float = 0.0
    baselines: dict[str, passes.Decoded] = field(default_factory=dict)

    def record(self, benchmark: str, draft: SelfConfig, sampling: Sampling | None = None) -> Record:
        """With this draft, beside plain decoding one pass of speculation that is timed as a whole, and one whose
        phases are: a benchmark's record. The drafter's cache and graphs are let go afterwards.
        """
        session = self.session.variant(draft=draft, sampling=sampling or self.session.config.sampling)
        mode = session.sampling.mode
        if mode not in self.baselines:
            passes.warm_up(session)
            self.baselines[mode] = passes.decode(session, "baseline")
        drafter, timer = session.drafter(), PhaseTimer(session.runner.device)
        try:
            passes.warm_up(session, [drafter])
            speculative = passes.decode(session, "speculation", drafter)
            timed = timer, passes.decode(session, "phase times", drafter, timer)
        finally:
            session.runner.drop_graphs()
        made = passes.Passes(self.prefill_seconds, self.baselines[mode], speculative, timed)
        return make_record(benchmark, session, made) | size_record(session)
