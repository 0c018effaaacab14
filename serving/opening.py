"""What a server decodes with: a session without prompts, and a pacing whose costs were measured on random entries."""

from collections.abc import Sequence
from dataclasses import replace

from bench.auto.run_costs import RunCosts, costs_of
from bench.config import RunConfig, Sizes
from bench.dummy_prefill import fill_with_noise
from bench.passes import make_pacing, warm_up
from bench.plan import resolve
from bench.session import Session, random_prompts
from engine.drafters import Drafter
from engine.drafters.standalone import drop_kept_prompts
from engine.pacing import Fixed, Pacing
from engine.sampling import SamplingParams

# Costs are measured in prompts that are this many times shorter, too: what pays depends on the length of a text.
SHORTER = 16
# A server decodes so many steps that all measuring pays.
MANY = 10**9


def open_session(config: RunConfig, max_batch: int, max_length: int) -> tuple[Session, Pacing]:
    """Open a session without prompts, and measure the costs that its pacing chooses by. Errors: UserError."""
    plan = resolve(replace(config, sizes=Sizes(B=max_batch)), max_length=max_length)
    session = Session.of_plan(plan)
    if session.runner.graphs is not None:
        # Clients may sample, with filters: rounds are captured for that from the start.
        session = replace(session, plan=replace(plan, sampling=SamplingParams(1.0, top_p=0.5)))
    if plan.draft is None:
        return session, Fixed(None)
    drafters = session.drafters()
    rehearsed = session.variant(prompts=random_prompts(session.runner.vocab_size, plan.n_rows, plan.prefix_len))
    if plan.chooses or plan.config.target.compile or session.runner.graphs is not None:
        # A round costs the same whatever the entries of its cache are.
        fill_with_noise(session.runner, rehearsed.prompts)
        warm_up(rehearsed, drafters)
    lengths = {max(1, plan.prefix_len // SHORTER), plan.prefix_len} if plan.chooses else set()
    costs = [_costs_behind(rehearsed, drafters, length) for length in sorted(lengths)]
    session.runner.cache.prefilled.clear()  # no request begins with what was rehearsed
    drop_kept_prompts(drafters)
    return session, make_pacing(session, drafters, *costs)


def _costs_behind(session: Session, drafters: Sequence[Drafter], length: int) -> RunCosts:
    """Return the costs of rounds behind `length` random entries, without acceptance, which random entries say nothing
    about."""
    plan, prompts = replace(session.plan, prefix_len=length), [prompt[:length] for prompt in session.prompts]
    fill_with_noise(session.runner, prompts)
    costs = costs_of(replace(session, plan=plan, prompts=prompts), drafters, n_steps=MANY)
    assert costs is not None, "something is to be chosen"
    by_rows = {n: [replace(one, acceptance=None) for one in each] for n, each in costs.by_rows.items()}
    return replace(costs, by_rows=by_rows)
