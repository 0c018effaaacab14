"""A coupled sample is the same by any drafter, gamma, budget, row order and batch size."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.config import RunConfig, Sampling, Sizes, Target, Text
from bench.session import Session
from engine.drafters.config import DrafterConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.saved_text import OracleConfig
from engine.drafters.self_speculation import SelfConfig
from kv_cache.streaming import Streaming

COUPLED = Sampling(temperature=0.6, seed=7, verification="coupled")


class Way(NamedTuple):
    """A way to decode: the draft, the order of the prompts, and the number of rows."""

    draft: DrafterConfig | None
    order: Sequence[int] = range(4)
    n_rows: int = 4


def streaming(gamma: int, budget: int) -> SelfConfig:
    return SelfConfig(gamma=gamma, policy=Streaming(budget, n_sink=4))


def ways(budgets: Sequence[int]) -> dict[str, Way]:
    """Ways to decode that give the baseline's tokens. A prompt's place is also its request id."""
    pairs = itertools.product((1, 3, 5), budgets)
    return {
        **{f"self, gamma {gamma}, budget {budget}": Way(streaming(gamma, budget)) for gamma, budget in pairs},
        "n-gram, gamma 5": Way(NGramConfig(gamma=5)),
        "oracle, gamma 5": Way(OracleConfig(gamma=5)),
        "rows reversed, self, gamma 3": Way(streaming(3, budgets[-1]), range(4)[::-1]),
        "rows rotated, no draft": Way(None, [1, 2, 3, 0]),
        "rows at a time: 2, n-gram, gamma 3": Way(NGramConfig(gamma=3), n_rows=2),
    }


def differing(config: RunConfig, budgets: Sequence[int], shorter_by: int) -> dict[str, list[int]]:
    """The rows in which a way to decode is not plain decoding; -rP shows what each accepts. Each row's prompt has so
    many tokens less than the one before it.
    """
    session = Session.open(config)
    cut = [prompt[: len(prompt) - shorter_by * row] for row, prompt in enumerate(session.prompts)]
    session, found = session.variant(prompts=cut), {}
    baseline = session.generate().tokens
    for name, way in ways(budgets).items():
        own = session.variant(draft=way.draft, prompts=[cut[place] for place in way.order])
        if way.n_rows != own.plan.n_rows:
            own = own.narrowed(way.n_rows, own.plan.capacity)
        out = own.generate(own.drafter(texts=baseline) if way.draft else None, request_ids=list(way.order))
        print(f"{name}: acceptance {out.stats.counts.acceptance_rate}")
        found[name] = [place for place, tokens in zip(way.order, out.tokens, strict=True) if tokens != baseline[place]]
    return found


@pytest.mark.parametrize("sampling", [COUPLED, Sampling()], ids=["coupled", "greedy"])
def test_drafts_and_batches_change_no_token(checkpoint: Path, books: Path, sampling: Sampling) -> None:
    target = Target(model=str(checkpoint), device="cpu", dtype="float64")
    config = RunConfig(target, Text(str(books)), Sizes(4, 100, 12), sampling=sampling, draft=streaming(5, 40))
    assert not any(differing(config, (16, 40), 23).values())


@pytest.mark.slow
def test_drafts_and_batches_change_no_token_of_the_default_model() -> None:
    config = RunConfig(Target(dtype="float32"), sizes=Sizes(4, 2000, 64), sampling=COUPLED, draft=streaming(5, 512))
    assert not any(differing(config, (64, 512), 37).values())
