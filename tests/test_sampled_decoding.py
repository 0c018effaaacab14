"""Sampled decoding: coupled output is a function of seed, request and text; rejection keeps its promises too."""

from __future__ import annotations

import pytest
import torch
from guesses import Guesses
from tiny import TINY, continue_by_recomputing, full_cache, random_prompts, tiny_model

from engine import ModelRunner, NGram, SamplingParams, SavedText, SelfSpeculation, generate
from kv_cache import StreamingKVCache

LENGTHS = [5, 17, 1, 30, 9]
N_NEW = 14
IDS = [0, 1, 2, 3, 4]
SAMPLINGS = [
    SamplingParams(temperature=2.0, seed=7),
    SamplingParams(temperature=1.0, top_k=5, seed=7),
    SamplingParams(temperature=3.0, top_p=0.8, seed=2**40 + 1),
    SamplingParams(),
    SamplingParams(temperature=2.5, top_k=30, top_p=0.9, seed=1),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def answers(model, prompts):
    """Coupled samples of each prompt, by recomputation."""
    each = zip(prompts, SAMPLINGS, IDS, strict=True)
    return [continue_by_recomputing(model, prompt, N_NEW + 8, sampling, id_) for prompt, sampling, id_ in each]


def streaming(runner: ModelRunner, gamma: int, budget: int = 10, model=None) -> SelfSpeculation:
    cache = StreamingKVCache(TINY, runner.cache.max_batch, budget, 2, dtype=(model or runner.model).dtype)
    return SelfSpeculation(runner, cache, gamma, model)


def drafters(runner: ModelRunner, answers):
    texts = dict(enumerate(answers))
    yield "none", None
    for gamma in (0, 1, 3, 5):
        yield f"streaming, gamma {gamma}", streaming(runner, gamma)
    yield "bfloat16 weights", streaming(runner, 3, model=tiny_model(dtype=torch.bfloat16))
    yield "other weights", streaming(runner, 3, model=tiny_model(seed=5))
    yield "full", SelfSpeculation(runner, full_cache(runner.model, runner.cache.max_batch), 4)
    for gamma in (1, 4):
        yield f"n-gram, gamma {gamma}", NGram(runner, gamma)
    for kind in ("oracle", "reject", "upto", "ragged", "random"):
        yield kind, Guesses(runner, texts, 4, kind, TINY.vocab_size)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_coupled_output_is_the_same_whatever_drafts(model, prompts, answers, slots):
    runner = ModelRunner(model, full_cache(model, slots), prefill_chunk=4)
    for name, drafter in drafters(runner, answers):
        out = generate(
            runner, prompts, max_new_tokens=N_NEW, drafter=drafter, sampling=SAMPLINGS, verification="coupled"
        )
        assert out.tokens == [answer[:N_NEW] for answer in answers], name
        if name in ("full", "oracle"):
            assert out.stats.counts.acceptance_rate == 1.0


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_order_filler_rows_and_batch_size_change_nothing(model, prompts, mode):
    """The request id travels with its prompt; everything else about the batch is different."""
    order, filler = [3, 0, 4, 2, 1], random_prompts([3, 21], seed=9)

    def run(slots, prompts, samplings, ids):
        runner = ModelRunner(model, full_cache(model, slots))
        return generate(
            runner,
            prompts,
            max_new_tokens=N_NEW,
            drafter=streaming(runner, 3),
            sampling=samplings,
            verification=mode,
            request_ids=ids,
        ).tokens

    plain = run(5, prompts, SAMPLINGS, IDS)
    shuffled = [filler[0], *(prompts[i] for i in order), filler[1]]
    samplings = [SAMPLINGS[0], *(SAMPLINGS[i] for i in order), SAMPLINGS[4]]
    for slots in (2, 3, 7):
        again = run(slots, shuffled, samplings, [100, *order, 101])
        assert again[1:-1] == [plain[i] for i in order]


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_seed_and_request_id_both_matter(model, prompts, mode):
    """Rows with one prompt differ by id alone; another seed, also in its high half, gives other rows."""
    same = [prompts[1]] * 4

    def run(seed, ids):
        runner = ModelRunner(model, full_cache(model, 4))
        sampling = SamplingParams(temperature=2.0, seed=seed)
        return generate(
            runner, same, max_new_tokens=N_NEW, sampling=sampling, verification=mode, request_ids=ids
        ).tokens

    rows = [tuple(row) for seed in (3, 4, 3 + 2**32) for row in run(seed, IDS[:4])]
    assert len(set(rows)) == 12
    assert run(3, IDS[:4]) == run(3, IDS[:4])


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_gamma_zero_is_plain_decoding(model, prompts, mode):
    samplings = [SamplingParams()] * 5 if mode == "greedy" else SAMPLINGS
    runner = ModelRunner(model, full_cache(model, 2))
    outputs = [
        generate(runner, prompts, max_new_tokens=N_NEW, drafter=drafter, sampling=samplings, verification=mode).tokens
        for drafter in (
            None,
            streaming(runner, 0),
            NGram(runner, 0),
            SavedText(runner, {}, 0),
            SavedText(runner, {}, 3),
        )
    ]
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("samplings", [None, [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2)]])
def test_one_id_may_be_that_of_greedy_requests_or_of_other_seeds(model, samplings):
    runner = ModelRunner(model, full_cache(model, 2))
    out = generate(runner, [[1, 2], [3]], max_new_tokens=4, sampling=samplings, request_ids=[0, 0])
    assert all(len(row) == 4 for row in out.tokens)
