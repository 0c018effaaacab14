"""Plain decoding and speculation of the same prompts in turn, so that a busy machine hits both; what tokens take."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.auto.run_costs import costs_of
from bench.config import RunConfig
from bench.passes import make_pacing, take_turns, warm_up
from bench.plan import Plan, resolve, with_draft
from bench.progress import progress_bar
from bench.record import rounded
from bench.session import Session
from bench.settings import settings_record
from bench.text import PromptText
from common.errors import ConfigError, flag
from common.say import say
from engine.contention import contention, usage_so_far
from engine.counts import acceptance_standard_error, total
from engine.decoding import GenerateOutput
from engine.drafters.config import ModelDrafterConfig
from engine.pacing import Fixed
from kv_cache.policy import BudgetedPolicy


def plan_of(config: RunConfig, texts: Sequence[PromptText] | None = None, *, evicts: bool = False) -> Plan:
    """Return the plan of a run that decodes prompts plainly and speculatively in turn. evicts: lower the draft's budget
    (see `evicting`). Errors: UserError, also for random weights and a draft that needs the baseline's tokens."""
    config.target.with_text()
    if config.draft and config.draft.needs_baseline:
        what, required = "nothing is known of the answers beforehand", "a draft that needs no plain decoding first"
        raise ConfigError(what, flag("draft"), config.draft.name, required, "use tests/selfspec_benchmark.py")
    plan = resolve(config, texts)
    return evicting(plan) if evicts else plan


def evicting(plan: Plan) -> Plan:
    """Lower the draft's budget to half of the longest prompt, or to the least that its policy needs: behind
    prompts within its budget, the draft's cache would hold all that the target's does. A draft that chooses its cache,
    or is itself drafted for, keeps its budget."""
    config, draft = plan.config.draft, plan.draft
    if draft is None or not isinstance(config, ModelDrafterConfig) or not isinstance(config.policy, BudgetedPolicy):
        return plan
    if config.policies or config.auto_budget or config.inner is not None:
        return plan
    # At least what its policy always keeps, and a verification block.
    budget = max(plan.prefix_len // 2, config.policy.reserved + draft.gamma + 1)
    if budget >= config.policy.budget:
        return plan
    say(f"note: the draft's cache keeps {budget} entries of prompts of up to {plan.prefix_len} tokens (--draft_budget)")
    return with_draft(plan, replace(config, policy=config.policy.with_entries(budget)))


def decode_in_turn(session: Session, **how: Any) -> Iterator[tuple[GenerateOutput, GenerateOutput]]:
    """Decode as many prompts at a time as there are rows, plainly and speculatively in turns (see `take_turns`), and
    yield both outputs. `how`: as of `generate`. Errors: UserError for logits that are not finite."""
    n_rows, drafters = session.n_rows, session.drafters()
    warm_up(session, drafters)
    costs = costs_of(session, drafters)
    with progress_bar(session.name, len(session.prompts), unit="prompt") as bar:
        for first in range(0, len(session.prompts), n_rows):
            own = replace(session, prompts=session.prompts[first:][:n_rows], numbered_from=first)
            pacings = Fixed(None), make_pacing(session, drafters, costs)
            plain, drafted = generations = [own.generation(pacing=pacing, **how) for pacing in pacings]
            take_turns(own.runner, generations)
            plain.output.require_finite("plain decoding")
            drafted.output.require_finite("speculation")
            bar.update(len(own.prompts))
            yield plain.output, drafted.output


def latencies(plan: Plan) -> list[dict[str, Any]]:
    """A record of each way, plain decoding first, behind a few prompts that warm up. Errors: UserError."""
    gc.collect()
    torch.cuda.empty_cache()
    session, before = Session.of_plan(plan), usage_so_far()
    _, *counted = decode_in_turn(session)
    contended, rows = contention([usage_so_far().since(before)])["contended"], list[dict[str, Any]]()
    for own, outputs in zip((session.variant(draft=None), session), zip(*counted, strict=True), strict=True):
        named = {"model": own.name, "dataset": plan.dataset, "draft": own.draft and own.draft.kind}
        rows.append({**named, **figures(outputs), "contended": contended, **settings_record(own)})
    return rounded([row | {"speedup": rows[0]["median_ms"] / row["median_ms"]} for row in rows])


def figures(outputs: Sequence[GenerateOutput]) -> dict[str, Any]:
    """What a row waits for a token, in ms: one value an output, the time of each round counted once for every row that
    it decoded; and tokens per second of all rows. No prefill counts."""
    rounds = [one.stats.rounds for one in outputs]
    ms = [1e3 * sum(one.seconds * one.busy for one in each) / sum(one.emitted for one in each) for each in rounds]
    p10, p50, p90 = np.percentile(ms, (10, 50, 90)).tolist()
    rows = [row for one in outputs for row in one.stats.rows]
    counts = total(rows)
    rate = counts.emitted / sum(one.stats.decode_seconds for one in outputs)
    found = {"median_ms": p50, "p90_ms": p90, "spread_ms": p90 - p10, "ms_per_token": ms, "tokens_per_second": rate}
    found |= {name: getattr(counts, name) for name in ("acceptance_rate", "mean_accepted_length")}
    return found | {"acceptance_standard_error": acceptance_standard_error(rows)}
