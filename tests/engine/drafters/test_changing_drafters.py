"""Drafters that take turns: what fell after catches up, and no token changes."""

from functools import partial
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine import ModelRunner, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.controller import PLAIN
from engine.controller import RoundChoice as Choice
from engine.drafters.ngram import NGram
from kv_cache import StreamingKVCache
from tests.support.block_heads import with_head
from tests.support.controllers import Scripted
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.tiny import TINY, full_cache, random_prompts, recomputed, tiny_model, tiny_runner


def drafters_of(runner: ModelRunner) -> list:
    """A drafter of each kind that can fall behind: two budgets, a draft model, an n-gram lookup, and a head."""
    sizes = {"max_batch": runner.max_batch, "n_sink": 2, "dtype": torch.float64}
    small, large = (StreamingKVCache(TINY, budget=n, **sizes) for n in (10, 24))
    own = StreamingKVCache(TINY, budget=24, **sizes, rotate_on_read=True)
    return [
        SelfSpeculation(runner, large, gamma=4),
        SelfSpeculation(runner, small, gamma=4),
        StandaloneDraft(ModelRunner(tiny_model(seed=1), own), gamma=4),
        NGram(runner, gamma=4),
        with_head("eagle-3", runner, lambda shape: StreamingKVCache(shape, budget=24, **sizes), gamma=4),
    ]


SCRIPT = [Choice(0, 3), PLAIN, PLAIN, PLAIN, Choice(2, 2), Choice(1, 4), Choice(3, 1), Choice(1, 0), Choice(2, 4)]
SCRIPT += [PLAIN, Choice(0, 1), Choice(4, 4), Choice(2, 1), PLAIN, Choice(3, 4), Choice(4, 2)]


def test_changing_drafters_and_gammas_changes_no_token_where_rounds_are_captured():
    """Ragged, refilled rows; what fell after catches up, and is accepted as without graphs. Each choice has graphs of
    its own."""
    model, prompts = tiny_model(), random_prompts([40, 7, 23, 1, 31])
    graphs: list[RecordedGraph] = []
    new_graphs = partial(RecordedGraphs, recorded=graphs)
    runner = ModelRunner(model, full_cache(model, 2), prefill_chunk=8, new_graphs=new_graphs)
    sampling, limits = SamplingParams(0.9, seed=5), [26, 9, 20, 18, 27]
    how = {"max_new_tokens": limits, "sampling": sampling, "verification": "coupled"}
    expected = recomputed(model, prompts, limits, sampling)
    called = ModelRunner(model, full_cache(model, 2), prefill_chunk=8)
    rounds = generate(called, prompts, controller=Scripted(drafters_of(called), SCRIPT), **how).stats.rounds
    drafters = drafters_of(runner)
    for _ in range(2):
        out = generate(runner, prompts, controller=Scripted(drafters, SCRIPT), **how)
        assert out.tokens == expected
        assert [round_.emitted for round_ in out.stats.rounds] == [round_.emitted for round_ in rounds]
    assert {round_.choice for round_ in out.stats.rounds} == set(SCRIPT)
    # Four graphs of every choice, three of a plain step; for two rows, and for the one that is left.
    kinds = {(round_.choice, round_.busy) for round_ in rounds}
    assert len(graphs) == sum(3 + (choice != PLAIN) for choice, _ in kinds)


def two_rows(*lengths: int, **settings: Any) -> tuple[ModelRunner, list[list[int]]]:
    return tiny_runner(2, **settings), random_prompts(lengths)


def test_a_drafter_that_fell_behind_drafts_as_if_it_had_followed():
    """The target itself over a full cache is always right: also after rounds without it."""
    runner, prompts = two_rows(30, 11)
    perfect = StandaloneDraft(ModelRunner(runner.model, full_cache(runner.model, 2)), gamma=3)
    shadow = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=3)
    script = [PLAIN, PLAIN, Choice(0, 3), PLAIN, PLAIN, PLAIN, PLAIN, Choice(1, 2), Choice(0, 1), Choice(1, 3)]
    out = generate(runner, prompts, max_new_tokens=60, controller=Scripted([perfect, shadow], script))
    assert out.stats.counts.verified > 40 and out.stats.counts.acceptance_rate == 1.0


def test_a_head_has_slots_for_the_rounds_of_other_drafters(monkeypatch):
    monkeypatch.setattr("engine.drafters.hidden_states.LONGEST_BLOCK", 4)
    runner, prompts = two_rows(30, 11)
    *_, lookup, head = drafters_of(runner)
    longer = NGram(runner, gamma=6)
    for drafters, choices in (([lookup, head], [Choice(0, 4)]), ([longer], [Choice(0, 6)])):
        generate(runner, prompts, max_new_tokens=9, controller=Scripted(drafters, choices))
    with pytest.raises(ConfigError, match="a gamma of 0 to 4"):
        generate(runner, prompts, max_new_tokens=9, controller=Scripted([longer, head], [Choice(0, 6)]))
