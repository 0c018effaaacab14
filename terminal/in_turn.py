"""Decodes prompts plainly and speculatively in turns, so that a busy machine disturbs both alike."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from bench.auto.measure import costs_of
from bench.config import RunConfig
from bench.passes import decode_in_turns, make_controller, settle, warm_up
from bench.plan import Plan, PromptText, resolve
from bench.progress import progress_bar
from bench.session import Session
from common.errors import refuse
from common.say import say
from engine.controller import Fixed
from engine.drafters.config import Trait
from engine.generation import GenerateOutput
from engine.requests import Progress


def require_fixed_text(config: RunConfig) -> None:
    """Raise ConfigError for random weights, and for a draft that needs the tokens of plain decoding."""
    config.target.require_trained("random weights have nothing to say")
    if config.draft and Trait.NEEDS_BASELINE in config.draft.traits:
        what, required = "nothing is known of the answers beforehand", "a draft that needs no plain decoding first"
        refuse("draft", config.draft.kind, required, what, "use tests/selfspec_benchmark.py")


def plan_of(config: RunConfig, texts: Sequence[PromptText] | None = None, *, evicts: bool = False) -> Plan:
    """Return the plan of a run that decodes prompts plainly and speculatively in turn. Errors: UserError.

    evicts: lower fixed draft budgets to half of the longest prompt, or to the most that a draft needs, since a cache
    with room for the whole prompt would hold what the target's holds.
    """
    require_fixed_text(config)
    plan = resolve(config, texts)
    if not evicts:
        return plan

    def lowered(n_entries: int) -> Plan:
        first, *others = (draft.within(n_entries, plan.gamma) for draft in config.drafts)
        return plan.with_drafts(first, tuple(others))

    halved = lowered(plan.prefix_len // 2)
    n_entries = max(draft.capacity for draft in halved.candidates)
    if halved.config.drafts == config.drafts:
        return plan
    said = f"{n_entries} entries of prompts of up to {plan.prefix_len} tokens (--draft_budget)"
    say(f"note: the draft's cache keeps {said}")
    return lowered(n_entries)  # a policy that needs more than half of a prompt sets the size of the others


def decode_batches(session: Session, **how: Any) -> Iterator[tuple[GenerateOutput, GenerateOutput]]:
    """Decode the prompts batch by batch, plainly and speculatively in turns (see `take_turns`); yield both outputs.

    how: arguments of `generate`. Errors: UserError for logits that are not finite.
    """
    n_rows, drafters = session.plan.n_rows, session.drafters()
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
