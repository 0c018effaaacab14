"""Parts c and d: speculation beside plain decoding, and what its steps cost, many cells over one filled cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from engine.bench import memory, passes
from engine.bench.config import RunConfig, Sampling, Sizes, Target
from engine.bench.dummy_prefill import fill_with_noise
from engine.bench.plan import resolve
from engine.bench.record import make_record, rounded
from engine.bench.session import Session
from engine.drafters.self_speculation import SelfConfig
from engine.timing import PhaseTimer
from kv_cache.streaming import Streaming
from models.checkpoints.default_model import DEFAULT_BOOK, DEFAULT_CHECKPOINT
from models.checkpoints.tokenizer import load_tokenizer
from reproduce.gpu_parts.bandwidth import copy_bandwidth
from reproduce.gpu_parts.cells import Cell, Options, Record, Skip, shared
from reproduce.paper.prompts import stretches

COUPLED = Sampling(temperature=0.6, seed=7, verification="coupled")
SAMPLINGS = {"coupled": COUPLED, "greedy": Sampling(verification="greedy")}
MOST_GAMMA = 4
GAMMA = 3


def cells(options: Options) -> list[Cell]:
    found = []
    for batch, prefix, drafts in options.sizes["selfspec"]:
        for sampling, (gamma, weights) in product(SAMPLINGS, drafts):
            name = f"B {batch}, prefix {prefix}, {sampling}, gamma {gamma}, draft weights {weights}"
            run = partial(speculation, options, batch, prefix, sampling, gamma, weights)
            found.append(Cell("c", "gpu_selfspec", name, run))
    for setting, (weights, budget) in product(options.sizes["costs"], options.sizes["costs_drafts"]):
        name = "{}, B {}, S {}, {} KV, draft weights {}, budget {}".format(*setting, weights, budget)
        found.append(Cell("d", "gpu_costs", name, partial(costs, options, setting, weights, budget)))
    return found


def self_draft(gamma: int, budget: int, weights: Any = "same") -> SelfConfig:
    return SelfConfig(gamma=gamma, policy=Streaming(budget), draft_weights=weights)


def open_session(
    options: Options, target: Target, prompts: Sequence[list[int]] | None = None, **config: Any
) -> Session:
    """On a GPU compiled, and with graphs; of rows that do not fit into memory, as many as do. prompts: whole ones, a
    row each. config: other fields of `RunConfig`. Errors: OutOfMemoryError if no row fits."""
    target = replace(target, device=options.device, compile=options.on_cuda)
    plan = resolve(RunConfig(target, **config), prompts)
    most = memory.memory_plan(plan).largest_batch(memory.available_bytes(plan.device))
    n_rows = min(plan.n_rows, most) or plan.n_rows
    own_prompts = plan.own_prompts and plan.own_prompts[:n_rows]
    return Session.of_plan(replace(plan, n_rows=n_rows, n_prompts=n_rows, own_prompts=own_prompts))


def dummy_session(options: Options, model: str, sizes: Sizes, kv_dtype: Any = "same", **config: Any) -> Session:
    """Random weights of a published shape over a cache of random entries."""
    target = Target(model_name=model, load_format="dummy", kv_dtype=kv_dtype)
    session = open_session(options, target, sizes=sizes, **config)
    fill_with_noise(session.runner, session.prompts)
    return session


def size_record(session: Session) -> Record:
    """For a record: the rows, those that were asked for, and the bytes that the memory plan has for them."""
    plan = session.plan
    planned_bytes = memory.memory_plan(plan).total(plan.n_rows)
    return {"B": plan.n_rows, "asked_B": plan.config.sizes.B, "planned_bytes": planned_bytes}


@dataclass(frozen=True)
class Filled:
    """A session over a filled cache, and plain decoding from it in each verification mode that was asked for."""

    session: Session
    prefill_seconds: float = 0.0
    baselines: dict[str, passes.Decoded] = field(default_factory=dict)

    def record(self, benchmark: str, draft: SelfConfig, sampling: Sampling) -> Record:
        """A benchmark's record: a pass as a whole, and one by its phases. Then the drafter's graphs are let go."""
        session = self.session.variant(draft=draft, sampling=sampling)
        mode = session.sampling.mode
        if mode not in self.baselines:
            passes.warm_up(session)
            self.baselines[mode] = passes.decode(session, "baseline")
        drafter = session.drafter()
        try:
            passes.warm_up(session, [drafter])
            speculative = passes.decode(session, "speculation", drafter)
            timed = passes.decode(session, "phase times", drafter, PhaseTimer(session.runner.device))
        finally:
            session.runner.drop_graphs()
        made = passes.Passes(self.prefill_seconds, self.baselines[mode], speculative, timed)
        return make_record(benchmark, session, made) | size_record(session)


def speculation(options: Options, batch: int, prefix: int, sampling: str, gamma: int, weights: str) -> Record:
    """A record with every field of the benchmark scripts, and how much the prompts have in common."""
    filled, prompts = _prefilled(options, batch, prefix)
    draft = self_draft(gamma, options.sizes["budget"], weights)
    return filled.record("gpu_selfspec", draft, SAMPLINGS[sampling]) | {"dataset": "default"} | prompts


@shared
def _prefilled(options: Options, batch: int, prefix: int) -> tuple[Filled, Record]:
    """Over stretches of the default book; what a record says of them."""
    for path in (DEFAULT_CHECKPOINT / "model.pth", DEFAULT_BOOK):
        if not path.is_file():
            raise Skip(f"{path.name} of the default model and book is missing: python download.py, then convert")
    tokens = load_tokenizer(DEFAULT_CHECKPOINT).encode(DEFAULT_BOOK.read_text(encoding="utf-8-sig"), add_bos=False)
    sizes = Sizes(batch, gen_len=options.sizes["selfspec_gen_len"])
    own = {"sizes": sizes, "sampling": COUPLED, "draft": self_draft(MOST_GAMMA, options.sizes["budget"])}
    session = open_session(options, Target(), list(stretches(tokens, batch, prefix)), **own)
    overlap = max(0.0, 1 - (len(tokens) - prefix) / batch / prefix)
    prompts = {"prompts": "stretches of the book at even distances", "prompt_overlap": round(overlap, 4)}
    return Filled(session, passes.prefill(session)), prompts


def costs(options: Options, setting: tuple[str, int, int, str], weights: str, budget: int) -> Record:
    """A benchmark's record of random weights, and what a plain step reads."""
    filled = _dummy_filled(options, *setting)
    record = filled.record("gpu_costs", self_draft(GAMMA, budget, weights), Sampling())
    config, plan, cache = filled.session.runner.model.config, filled.session.plan, filled.session.runner.cache
    # What a plain step has to read: of an embedding that is not the head almost nothing, and the KV of its context.
    n_weights = config.n_parameters - (0 if config.tie_embeddings else config.vocab_size * config.dim)
    read = n_weights * plan.dtype.itemsize + cache.n_bytes * (plan.prefix_len + plan.gen_len // 2) // cache.capacity
    bandwidth = 1e3 * read / record["baseline_step_ms"]
    own = {"prefill_seconds": None, "cache_content": "random entries, not a prefill"}
    own |= {"rounds": sum(choice["rounds"] for choice in record["choices"])}
    own |= {"baseline_bytes_per_step": read, "baseline_bytes_per_second": bandwidth}
    own |= {"baseline_share_of_copy": bandwidth / copy_bandwidth(options)}
    return record | rounded(own)


@shared
def _dummy_filled(options: Options, model: str, batch: int, context: int, kv: str) -> Filled:
    copy_bandwidth(options)  # before the memory is taken: a copy needs some of its own
    weights, budget = options.sizes["costs_drafts"][0]
    sizes = Sizes(batch, context, options.sizes["costs_gen_len"])
    return Filled(dummy_session(options, model, sizes, kv, draft=self_draft(GAMMA, budget, weights)))
