"""Drafters that take turns: what fell behind catches up, and heads have slots for the rounds of others."""

import pytest
import torch

from common.errors import ConfigError
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, generate
from engine.controller import PLAIN
from engine.controller import RoundChoice as Choice
from engine.drafters.ngram import NGram
from kv_cache import FullKVCache
from tests.support.controllers import Scripted
from tests.support.heads import with_head
from tests.support.tiny import full_cache, random_prompts, tiny_runner

PROMPTS = random_prompts([30, 11])


def test_a_drafter_that_fell_behind_drafts_as_if_it_had_followed():
    """The target itself over a full cache is always right: also after rounds without it."""
    runner = tiny_runner(2)
    perfect = StandaloneDraft(ModelRunner(runner.model, full_cache(runner.model, 2)), gamma=3)
    shadow = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=3)
    script = [PLAIN, PLAIN, Choice(0, 3), PLAIN, PLAIN, PLAIN, PLAIN, Choice(1, 2), Choice(0, 1), Choice(1, 3)]
    out = generate(runner, PROMPTS, max_new_tokens=60, controller=Scripted([perfect, shadow], script))
    assert out.stats.counts.verified > 40 and out.stats.counts.acceptance_rate == 1.0


def test_a_head_has_slots_for_the_rounds_of_other_drafters(monkeypatch):
    monkeypatch.setattr("engine.drafters.hidden_states.LONGEST_BLOCK", 4)
    runner = tiny_runner(2)
    lookup, longer = NGram(runner, gamma=4), NGram(runner, gamma=6)
    head = with_head("eagle-3", runner, lambda shape: FullKVCache(shape, 2, 128, dtype=torch.float64), gamma=4)
    for drafters, choices in (([lookup, head], [Choice(0, 4)]), ([longer], [Choice(0, 6)])):
        generate(runner, PROMPTS, max_new_tokens=9, controller=Scripted(drafters, choices))
    with pytest.raises(ConfigError, match="a gamma of 0 to 4"):
        generate(runner, PROMPTS, max_new_tokens=9, controller=Scripted([longer, head], [Choice(0, 6)]))
