"""What a server decodes with: a session without prompts, and a pacing whose costs were measured on random entries."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.auto.run_costs import RunCosts, costs_of
from bench.config import RunConfig, Sizes
from bench.dummy_prefill import fill_with_noise
from bench.memory import require_room
from bench.passes import make_pacing, warm_up
from bench.plan import Plan, resolve, with_draft
from bench.session import Session
from common.errors import require_at_least
from engine.drafters import Drafter
from engine.drafters.standalone import drop_kept_prompts
from engine.pacing import Fixed, Pacing
from engine.sampling import SamplingParams

# What requests are taken to be as long as where costs are measured, if rows are at least four times as long.
REPRESENTATIVE_LENGTH = 2048
# They are measured in rows that are so many times shorter, too: what pays depends on the length of a text.
SHORTER = 16
# A server decodes so many steps that all measuring pays.
MANY = 10**9


def open_session(config: RunConfig, max_batch: int, max_length: int) -> tuple[Session, Pacing]:
    """Errors: UserError."""
    plan = plan_of(config, max_batch, max_length)
    # Clients may sample, with filters. Rounds are captured for that from the start, and else rehearsed greedily.
    sampled = replace(plan.sampling, params=SamplingParams(1.0, top_p=0.5))
    require_room(replace(plan, sampling=sampled))
    session = Session.of_plan(plan)
    if session.runner.graphs is not None:
        session = replace(session, sampling=sampled)
    if session.draft is None:
        return session, Fixed(None)
    drafters = session.drafters()
    if session.plan.chooses or session.config.target.compile or session.runner.graphs is not None:
        # What is in a cache does not change what a round costs.
        fill_with_noise(session.runner, session.prompts)
        warm_up(session, drafters)
    lengths = {max(1, session.prefix_len // SHORTER), session.prefix_len} if session.plan.chooses else set()
    costs = [_costs_behind(session, drafters, length) for length in sorted(lengths)]
    session.runner.cache.prefilled.clear()  # no request begins with what was rehearsed
    drop_kept_prompts(drafters)
    return session, make_pacing(session, drafters, *costs)


def _costs_behind(session: Session, drafters: Sequence[Drafter], length: int) -> RunCosts:
    """Return the costs of rows of so many random entries, without acceptance: what was accepted of noise says nothing
    of text."""
    own = replace(session, prompts=[prompt[:length] for prompt in session.prompts], prefix_len=length)
    fill_with_noise(own.runner, own.prompts)
    costs = costs_of(own, drafters, n_steps=MANY)
    assert costs is not None, "something is to be chosen"
    by_rows = {n: [replace(one, acceptance=None) for one in each] for n, each in costs.by_rows.items()}
    return replace(costs, by_rows=by_rows)


def plan_of(config: RunConfig, max_batch: int, max_length: int) -> Plan:
    """With room for so many rows of so many entries, and for each a random prompt. Errors: UserError."""
    plan = resolve(replace(config, sizes=Sizes(B=max_batch, gen_len=2)), [[0]] * max_batch)
    room = min(max_length, plan.target.config.max_context)
    prefix_len = max(1, min(REPRESENTATIVE_LENGTH, room // 4))
    require_at_least("max_length", room, plan.gamma + 4)
    gen_len = room - prefix_len - plan.gamma - 1
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(plan.target.config.vocab_size, (max_batch, prefix_len), generator=generator).tolist()
    config = replace(plan.config, sizes=Sizes(B=max_batch, gen_len=gen_len))
    plan = replace(plan, config=config, prefix_len=prefix_len, own_prompts=prompts)
    return replace(with_draft(plan, config.draft), capacity=room)
