"""A draft of a draft: it proposes what the draft alone would, ragged, and its counts are those of its rounds."""

from collections import Counter

import pytest
import torch

from common.errors import ConfigError
from engine import ModelRunner, SamplingParams, SelfSpeculation, StandaloneDraft, generate, modes
from engine.batch import Batch
from engine.controller import PLAIN, RoundChoice
from engine.drafters import RowUpdate
from engine.drafters.ngram import NGram
from engine.drafters.speculated import Speculated
from engine.modes import verification_in
from engine.sampling import noise
from engine.sampling.distribution import Filters
from kv_cache import StreamingKVCache
from tests.support import tiny
from tests.support.controllers import Scripted

LENGTHS = [40, 7, 23]
SAMPLINGS = [SamplingParams(0.9, seed=4), SamplingParams(), SamplingParams(1.2, top_k=9, seed=5)]


def drafters(kind: str, gamma: int, inner_gamma: int, budget: int = 14):
    """A runner, a draft alone, and another of its kind that is speculated for."""
    runner = tiny.tiny_runner(3)
    alone, outer = (
        SelfSpeculation(runner, tiny.full_cache(runner.model, 3), gamma, tiny.near_model()) for _ in range(2)
    )
    own = StreamingKVCache(tiny.TINY, 3, budget, 2, dtype=torch.float64)
    inner = {
        "ngram": lambda: NGram(runner, inner_gamma),
        "streaming": lambda: SelfSpeculation(runner, own, inner_gamma, tiny.near_model()),
        "model": lambda: StandaloneDraft(ModelRunner(tiny.near_model(), own), inner_gamma),
    }
    return runner, alone, Speculated(outer, inner[kind]())


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("kind", ["ngram", "streaming", "model"])
@pytest.mark.parametrize("gamma,inner_gamma", [(5, 2), (3, 4), (1, 2)])
def test_a_draft_of_a_draft_proposes_what_the_draft_alone_would(kind, mode, gamma, inner_gamma):
    """Each row proposes whole inner rounds where inner drafts stand, and at least a token an inner round."""
    runner, alone, both = drafters(kind, gamma, inner_gamma)
    samplings = SAMPLINGS if mode == "coupled" else [SamplingParams()] * 3
    prompts = tiny.random_prompts(LENGTHS)
    for row, prompt in enumerate(prompts):
        runner.prefill(row, prompt)
        for drafter in (alone, both):
            drafter.follow([RowUpdate(row, row, prompt, 0)])
    batch = Batch(3, Filters.of(samplings))
    batch.set_rows(samplings, range(3))
    batch.set_state(LENGTHS, [prompt[-1] for prompt in prompts], [5, 6, 7])
    wanted, drafts = (
        drafter.propose(batch, verification_in(mode, batch, gamma, runner.model), gamma) for drafter in (alone, both)
    )
    n_rounds = -(-2 * gamma // (2 + inner_gamma))
    assert drafts.tokens.shape == wanted.tokens.shape
    for own, expected, n in zip(drafts.tokens.tolist(), wanted.tokens.tolist(), drafts.lengths.tolist(), strict=True):
        assert min(n_rounds, gamma) <= n <= gamma and own[:n] == expected[:n]
    counts = both.inner_counts()
    assert counts.emitted == int(drafts.lengths.sum()) == counts.rounds + counts.accepted
    assert counts.rounds <= 3 * n_rounds and counts.accepted <= counts.verified <= counts.drafted
    assert both.inner_counts().rounds == 0, "counted once"


@pytest.mark.parametrize("gamma,inner_gamma", [(5, 2), (4, 1), (6, 4)])
def test_a_draft_model_drafts_behind_all_that_stands(gamma, inner_gamma):
    """The inner model drafts what it drafts of the row's text alone, whatever was accepted, and after plain rounds."""
    model, small = tiny.tiny_model(), tiny.near_model()
    runner = ModelRunner(model, tiny.full_cache(model, 2))
    inner = StandaloneDraft(ModelRunner(small, tiny.full_cache(small, 2)), inner_gamma)
    both = Speculated(SelfSpeculation(runner, tiny.full_cache(model, 2), gamma, tiny.near_model()), inner)
    prompts, propose_inner, propose = tiny.random_prompts([40, 7, 23]), inner.propose, both.propose
    seen, texts = [], []

    def inner_round(ahead, *how):
        drafts = propose_inner(ahead, *how)
        seen.append((ahead.rows.tolist(), ahead.lengths.tolist(), ahead.current.tolist(), drafts.tokens.tolist()))
        return drafts

    def outer_round(batch, *how):
        first, (requests, lengths) = len(seen), (batch.requests.tolist(), batch.lengths.tolist())
        drafts = propose(batch, *how)
        ends = [length + n for length, n in zip(lengths, drafts.lengths.tolist(), strict=True)]
        for _, at, current, tokens in seen[first:]:
            for place, request in enumerate(requests):
                if at[place] < ends[place] and not batch.idle[place]:
                    ahead = drafts.tokens[place, : at[place] - lengths[place]].tolist()
                    texts.append((request, lengths[place], ahead, current[place], tokens[place]))
        return drafts

    inner.propose, both.propose = inner_round, outer_round
    controller = Scripted([both], [RoundChoice(0, gamma), RoundChoice(0, 3), PLAIN, PLAIN])
    out = generate(runner, prompts, max_new_tokens=[16, 7, 20], controller=controller)
    whole = [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]
    for request, length, ahead, current, tokens in texts:
        text = [*whole[request][: length + 1], *ahead]
        assert text[-1] == current and tokens == tiny.continue_by_recomputing(small, text, inner_gamma)
    inner_counts = both.inner_counts()
    assert 0 < inner_counts.accepted < inner_counts.verified and len({len(ahead) for _, _, ahead, *_ in texts}) > 3


def test_an_inner_draft_has_room_after_the_rounds_tokens() -> None:
    runner, limit, (prompt,) = tiny.tiny_runner(1), 5, tiny.random_prompts([6])
    full = tiny.full_cache(runner.model, 1, len(prompt) + limit + 4)  # as many as a draft with gamma 3 alone needs
    inner = StandaloneDraft(ModelRunner(tiny.near_model(), full), 8)
    both = Speculated(SelfSpeculation(runner, tiny.full_cache(runner.model, 1), 3, tiny.near_model()), inner)
    with pytest.raises(ConfigError, match="23"):
        generate(runner, [prompt], max_new_tokens=limit, drafter=both)


def test_no_random_number_is_drawn_by_both_levels(monkeypatch):
    """In rejection mode no number is drawn twice, but one that accepts or rejects for the target: that of a draft
    behind a rejection was never looked at."""
    drawn, uniform = Counter(), noise.uniform

    def noted(seed, request, position, stream, n_ids=1):
        for id_, at in zip(*(x.flatten().tolist() for x in torch.broadcast_tensors(request, position)), strict=True):
            drawn[id_, at, int(stream), n_ids] += 1
        return uniform(seed, request, position, stream, n_ids)

    for module in (noise, modes):
        monkeypatch.setattr(module, "uniform", noted)
    runner, _, both = drafters("streaming", gamma=4, inner_gamma=2)
    sampling = [SamplingParams(0.8, seed=seed) for seed in (2, 3, 4)]
    how = {"max_new_tokens": [30, 19, 25], "request_ids": [11, 12, 13], "verification": "rejection"}
    out = generate(runner, tiny.random_prompts(LENGTHS), drafter=both, sampling=sampling, **how)
    assert 0 < out.stats.accepted < out.stats.drafted
    again = {key for key, times in drawn.items() if times > 1 and key[0] in how["request_ids"]}
    assert {(stream, n_ids) for _, _, stream, n_ids in again} <= {(noise.Stream.ACCEPT, 1)}
