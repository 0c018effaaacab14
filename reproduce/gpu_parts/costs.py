"""Part d: what steps of published 7B and 8B shapes cost, with random weights over a KV cache of random entries."""

from functools import partial

from engine.bench.config import Sizes
from engine.bench.record import rounded
from engine.bench.session import Session
from engine.cost_model.costs import tokens_per_round
from reproduce.gpu_parts.cells import Cell, Options, Record, shared
from reproduce.gpu_parts.devices import copy_bandwidth
from reproduce.gpu_parts.setups import TINY, Filled, dummy_session, self_draft
from reproduce.paper.published import SELF, published, target_name

LLAMA_31_8B, LLAMA_2_7B = "meta-llama/Meta-Llama-3.1-8B", "togethercomputer/LLaMA-2-7B-32K"
Setting = tuple[str, int, int, str]
# Model, rows, context, entries of the target's cache: of the published settings those that one card may hold, if need
# be with fewer rows.
SETTINGS: tuple[Setting, ...] = (
    *((LLAMA_31_8B, 32, 16000, "same"), (LLAMA_31_8B, 8, 64000, "same"), (LLAMA_2_7B, 32, 4000, "same")),
    *((LLAMA_31_8B, 64, 8000, "same"), (LLAMA_2_7B, 32, 8000, "int8"), (LLAMA_31_8B, 32, 32000, "int8")),
    (LLAMA_2_7B, 32, 8000, "same"),
)
QUICK_SETTINGS: tuple[Setting, ...] = ((TINY, 2, 64, "same"),)
# Weights and budget of the draft; first the one that takes most memory, since the session makes room for that one.
DRAFTS = (("int4", 512), ("int4", 256), ("same", 512), ("same", 256))
QUICK_DRAFTS = (("int4", 32), ("same", 32))
GAMMA, GEN_LEN = 3, 32
ALPHA_SOURCE = "MagicDec, arXiv 2408.11049: Llama-3.1-8B, StreamingLLM, budget 512, PG-19; bfloat16 draft weights"


def cells(options: Options) -> list[Cell]:
    found = []
    for setting in QUICK_SETTINGS if options.quick else SETTINGS:
        model, batch, context, kv = setting
        for weights, budget in QUICK_DRAFTS if options.quick else DRAFTS:
            name = f"{model}, B {batch}, S {context}, {kv} KV, draft weights {weights}, budget {budget}"
            found.append(Cell("d", "gpu_costs", name, partial(costs, options, setting, weights, budget)))
    return found


def costs(options: Options, setting: Setting, weights: str, budget: int) -> Record:
    """A benchmark's record of random weights, what a plain step reads, and the speedup that the costs predict."""
    model, _, context, _ = setting
    filled = _filled(options, *setting)
    record = filled.record("gpu_costs", self_draft(GAMMA, budget, weights))
    is_published = budget == published().draft_budget
    alpha = published().alpha(target_name({"model": model}), SELF, context) if is_published else None
    step_ms, read = record["baseline_step_ms"], bytes_per_step(filled.session, context)
    predicted = None if alpha is None else tokens_per_round(alpha, GAMMA) * step_ms / record["round_ms"]
    bandwidth = 1e3 * read / step_ms
    own = {"prefill_seconds": None, "cache_content": "random entries, not a prefill"}
    own |= {"rounds": sum(choice["rounds"] for choice in record["choices"])}
    own |= {"predicted_speedup": predicted, "predicted_with_alpha": alpha}
    own |= {"alpha_source": None if alpha is None else ALPHA_SOURCE, "baseline_bytes_per_step": read}
    own |= {"baseline_bytes_per_second": bandwidth, "baseline_share_of_copy": bandwidth / copy_bandwidth(options)}
    return record | rounded(own)


def bytes_per_step(session: Session, context: int) -> int:
    """Weights and KV that one plain step has to read; of an embedding that is not the head, almost nothing."""
    config, cache = session.runner.model.config, session.runner.cache
    read_once = config.n_parameters - (0 if config.tie_embeddings else config.vocab_size * config.dim)
    kv = cache.n_bytes * (context + session.plan.gen_len // 2) // cache.capacity
    return read_once * session.plan.dtype.itemsize + kv


@shared
def _filled(options: Options, model: str, batch: int, context: int, kv: str) -> Filled:
    copy_bandwidth(options)  # before the memory is taken: a copy needs some of its own
    weights, budget = (QUICK_DRAFTS if options.quick else DRAFTS)[0]
    sizes = Sizes(batch, context, 8 if options.quick else GEN_LEN)
    return Filled(dummy_session(options, model, sizes, kv, draft=self_draft(GAMMA, budget, weights)))
