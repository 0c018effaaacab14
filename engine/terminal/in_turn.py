"""Plain decoding and speculation of the same prompts in turn, so that a busy machine hits both."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from common.errors import ConfigError, flag
from engine.bench.auto_costs import costs_of
from engine.bench.config import RunConfig
from engine.bench.passes import make_pacing, warm_up
from engine.bench.plan import Plan, resolve
from engine.bench.progress import progress_bar
from engine.bench.session import Session
from engine.decoding import GenerateOutput
from engine.terminal.texts import text_target


class Both(NamedTuple):
    """What the two ways made of the same prompts, the first of which has that number."""

    first: int
    plain: GenerateOutput
    speculative: GenerateOutput


def plan_of(config: RunConfig, texts: Sequence[str] | None = None) -> Plan:
    """As `resolve`. Errors: UserError, also for random weights, and for a draft that has to know beforehand what plain
    decoding makes of every prompt."""
    text_target(config)
    if config.draft and config.draft.needs_baseline:
        what, where, fix = "both ways decode a few prompts in turn", flag("draft"), "use tests/selfspec_benchmark.py"
        raise ConfigError(what, where, config.draft.name, "a draft that plain decoding need not come before", fix)
    return resolve(config, texts)


def decode_in_turn(session: Session, **how: Any) -> Iterator[Both]:
    """As many prompts at a time as there are rows, plainly and speculatively, in the other order every other time; the
    second starts from the state that the first prefilled. `how`: as of `generate`.

    Errors: UserError where logits are not finite.
    """
    n_rows, drafters = session.plan.n_rows, session.drafters()
    warm_up(session, drafters)
    costs = costs_of(session, drafters)
    with progress_bar(session.name, len(session.prompts), unit="prompt") as bar:
        for first in range(0, len(session.prompts), n_rows):
            own, outputs = replace(session, prompts=session.prompts[first:][:n_rows], numbered_from=first), {}
            for way in ("plain", "speculative")[:: -1 if first // n_rows % 2 else 1]:
                pacing = make_pacing(own, drafters, costs) if way == "speculative" else None
                outputs[way] = own.generate(pacing=pacing, **how)
                outputs[way].require_finite(f"{way} decoding")
            bar.update(len(own.prompts))
            yield Both(first, **outputs)
