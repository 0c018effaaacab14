"""Drafts that are models: some of the target's layers, or a model of its own with a padded vocabulary; drafts that take
turns catch up."""

from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from engine import ModelRunner, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.controller import PLAIN, RoundChoice
from engine.drafters import RowUpdate
from engine.drafters.ngram import NGram
from engine.parallel.ranks import Ranks
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.base import EMPTY
from models import ModelConfig
from models.llama import select_layers
from tests.support.controllers import Scripted
from tests.support.drafters import watch
from tests.support.heads import with_head
from tests.support.policies import POLICIES, Size
from tests.support.tiny import (
    TINY,
    continue_by_recomputing,
    full_cache,
    random_prompts,
    recomputed,
    tiny_model,
    tiny_runner,
)

DEEP = replace(TINY, n_layer=4)
LENGTHS = [1, 9, 30, 17]


def standalone(config: ModelConfig, n_rows: int, gamma: int = 3, seed: int = 5) -> StandaloneDraft:
    draft = tiny_model(config, seed=seed)
    cache = StreamingKVCache(config, n_rows, budget=12, n_sink=2, dtype=torch.float64)
    return StandaloneDraft(ModelRunner(draft, cache), gamma)


@pytest.mark.parametrize("layers", [[0, 3], [1, 2, 3]])
def test_a_draft_of_some_layers_holds_those_layers_kv(layers):
    """The draft's cache holds what the target computed for committed tokens, in the prompt and after it."""
    model, prompts = tiny_model(DEEP), random_prompts(LENGTHS)
    runner, draft = ModelRunner(model, full_cache(model, len(prompts))), select_layers(model, layers)
    cache = StreamingKVCache(draft.config, len(prompts), budget=12, n_sink=2, dtype=torch.float64)
    drafter = SelfSpeculation(runner, cache, 3, draft, layers)
    out = generate(runner, prompts, max_new_tokens=12, drafter=drafter)
    assert out.tokens == recomputed(model, prompts, 12)
    compared = 0
    for row in range(len(prompts)):
        # A finished row idles, and its last block is not committed.
        settled = len(prompts[row]) + 12 - 3 - 1
        slots = [i for i, p in enumerate(cache.positions[row].tolist()) if p != EMPTY and p < settled]
        at = cache.positions[row, slots]
        for own, theirs in ((cache.keys, runner.cache.keys), (cache.entries[:, 1], runner.cache.entries[:, 1])):
            torch.testing.assert_close(own[:, row][:, :, slots], theirs[layers, row][:, :, at], rtol=0, atol=0)
        compared += len(slots)
    assert compared > 20


@pytest.mark.parametrize("policy", ["full", "streaming", "streaming, positions in the cache"])
def test_every_draft_is_what_the_draft_model_continues_with(policy):
    """A draft that is right now and then, the target under a slightly other head; rows keep unlike parts of a block.

    It sees the whole text, wherever its cache has the positions.
    """
    target, draft, prompts = tiny_model(), tiny_model(), random_prompts([1, 7, 61], seed=3)
    draft.output.weight += 0.3 * tiny_model(seed=5).output.weight
    cache = POLICIES[policy].make(TINY, Size(3, longest=128, n_kept=4, window=96, dtype=torch.float64))
    drafter = StandaloneDraft(ModelRunner(draft, cache, prefill_chunk=8), 3)
    seen = watch(drafter)
    out = generate(ModelRunner(target, full_cache(target, 3)), prompts, max_new_tokens=24, drafter=drafter)
    for row, length, _, drafts, _ in seen:
        known = (prompts[row] + out.tokens[row])[: length + 1]
        assert drafts == continue_by_recomputing(draft, known, 3)
    assert len({row.accepted for row in out.stats.rows}) > 1 and 0 < out.stats.counts.acceptance_rate < 1


@pytest.mark.parametrize("vocab_size", [50, 80])
@pytest.mark.parametrize("mode,temperature", [("greedy", 0.0), ("coupled", 1.5), ("rejection", 1.5)])
def test_a_padded_vocabulary_costs_no_token(vocab_size, mode, temperature):
    """The draft may have ids that the target lacks, which it must not propose, and may lack ids of the target."""
    target, prompts = tiny_model(), random_prompts(LENGTHS, TINY.vocab_size, seed=3)
    assert any(token >= 50 for prompt in prompts for token in prompt)
    sampling = SamplingParams(temperature, seed=4)
    drafter = standalone(replace(TINY, vocab_size=vocab_size), 3)
    seen = watch(drafter)
    runner = ModelRunner(target, full_cache(target, 3))
    out = generate(runner, prompts, max_new_tokens=10, drafter=drafter, sampling=sampling, verification=mode)
    assert mode == "rejection" or out.tokens == recomputed(target, prompts, 10, sampling)
    assert all(len(tokens) == 10 and max(tokens) < TINY.vocab_size for tokens in out.tokens)
    assert out.stats.accepted > 0 or mode != "rejection"
    assert max(token for *_, drafts, _ in seen for token in drafts) < min(vocab_size, TINY.vocab_size)


@pytest.mark.parametrize("mode,temperature", [("greedy", 0.0), ("coupled", 1.0)])
def test_a_draft_whose_logits_are_not_finite_costs_no_token(mode, temperature):
    target, prompts, drafter = tiny_model(), random_prompts(LENGTHS), standalone(TINY, 4)
    drafter._runner.model.norm.weight.data.fill_(torch.nan)
    sampling, runner = SamplingParams(temperature, seed=2), ModelRunner(target, full_cache(target, 4))
    out = generate(runner, prompts, max_new_tokens=6, drafter=drafter, sampling=sampling, verification=mode)
    assert out.tokens == recomputed(target, prompts, 6, sampling)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_was_kept_is_as_if_it_had_run_again(policy):
    """Behind a decode that evicted what the prompt had left; another prompt in its place runs."""
    size = Size(n_rows=2, longest=90, n_kept=3, window=12, dtype=torch.float64)
    runner, fills = ModelRunner(tiny_model(seed=5), POLICIES[policy].make(TINY, size)), []
    drafter, extend = StandaloneDraft(runner, 3, keeps_prompts=True), runner.extend
    prompts = random_prompts([40, 9, 7])
    runner.extend = lambda given: fills.extend(row for row, (_, n) in given.items() if n == 0) or extend(given)
    target = ModelRunner(tiny_model(), full_cache(tiny_model(), 2))
    drafter.follow([RowUpdate(row, row, prompts[row], 0) for row in range(2)])
    left = [x.clone() for x in runner.cache.tensors]
    for _ in range(2):
        generate(target, prompts[:2], max_new_tokens=16, drafter=drafter)
        assert not torch.equal(runner.cache.positions, left[1])
    drafter.follow([RowUpdate(row, row + 7, prompts[row], 0) for row in range(2)])
    assert fills == [0, 1] and all(map(torch.equal, runner.cache.tensors, left))
    drafter.follow([RowUpdate(1, 5, prompts[2], 0), RowUpdate(0, 6, prompts[1], 0)])
    assert fills == [0, 1, 1, 0] and runner.cache.positions.amax(dim=1).tolist() == [8, 6]


TEXTS = random_prompts([30, 11])


def test_a_drafter_that_fell_behind_drafts_as_if_it_had_followed():
    """The target itself over a full cache is always right, also after rounds without it, which it follows in parts."""
    runner = tiny_runner(2)
    perfect = StandaloneDraft(ModelRunner(runner.model, full_cache(runner.model, 2), prefill_chunk=2), gamma=3)
    shadow = SelfSpeculation(runner, full_cache(runner.model, 2), gamma=3)
    script = [PLAIN, PLAIN, RoundChoice(0, 3), *[PLAIN] * 4, RoundChoice(1, 2), RoundChoice(0, 1), RoundChoice(1, 3)]
    out = generate(runner, TEXTS, max_new_tokens=60, controller=Scripted([perfect, shadow], script))
    assert out.stats.counts.verified > 40 and out.stats.counts.acceptance_rate == 1.0


def test_a_head_has_slots_for_the_rounds_of_other_drafters(monkeypatch):
    monkeypatch.setattr("engine.drafters.hidden_states.LONGEST_BLOCK", 4)
    runner = tiny_runner(2)
    lookup, longer = NGram(runner, gamma=4), NGram(runner, gamma=6)
    head = with_head("eagle-3", runner, lambda shape: FullKVCache(shape, 2, 128, dtype=torch.float64), gamma=4)
    for drafters, choices in (([lookup, head], [RoundChoice(0, 4)]), ([longer], [RoundChoice(0, 6)])):
        generate(runner, TEXTS, max_new_tokens=9, controller=Scripted(drafters, choices))
    with pytest.raises(ConfigError, match="a gamma of 0 to 4"):
        generate(runner, TEXTS, max_new_tokens=9, controller=Scripted([longer, head], [RoundChoice(0, 6)]))


def test_what_cannot_work_is_refused():
    runner, target = tiny_runner(2), tiny_model()
    with pytest.raises(ConfigError, match="another number of rows"):
        generate(runner, [[1], [2]], max_new_tokens=2, drafter=standalone(TINY, 3))
    with pytest.raises(ConfigError, match="no room for a verification block"):
        standalone(TINY, 2, gamma=10)
    with pytest.raises(ConfigError, match="gamma is too small"):
        standalone(TINY, 2, gamma=-1)
    short = StandaloneDraft(ModelRunner(target, full_cache(target, 2, max_len=8)), 3)
    with pytest.raises(ConfigError, match="exceeds the draft's KV cache"):
        generate(runner, [[1] * 6, [2]], max_new_tokens=2, drafter=short)
    elsewhere = ModelRunner(target, full_cache(target, 2), ranks=Ranks(0, 2))
    with pytest.raises(ConfigError, match="other ranks"):
        generate(elsewhere, [[1], [2]], max_new_tokens=2, drafter=standalone(TINY, 2))
