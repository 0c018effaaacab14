"""generate() where the random scenarios do not go: bad rows, bad calls, and rows that hold prompts."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from engine import ModelRunner, SamplingParams, SelfSpeculation, generate
from engine.drafters.oracle import Oracle
from engine.requests import Progress
from kv_cache import FullKVCache, StreamingKVCache
from tests.support.tiny import TINY, continue_by_recomputing, full_cache, random_prompts, tiny_model
from tests.support.witness import cut

LENGTHS = [5, 17, 1, 30, 9]
N_NEW = 14


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def answers(model, prompts):
    return [continue_by_recomputing(model, prompt, N_NEW + 8) for prompt in prompts]


def expected(answers):
    return [answer[:N_NEW] for answer in answers]


def runner_broken_by(token: int, value: str, n_rows: int = 2) -> ModelRunner:
    """A runner of a model whose KV of that token is infinite or NaN."""
    model = tiny_model()
    model.tok_embeddings.weight[token] = float(value)
    return ModelRunner(model, full_cache(model, n_rows))


def never_seen(prompts, answers) -> int:
    return next(token for token in range(TINY.vocab_size) if all(token not in row for row in (*prompts, *answers)))


def test_a_row_with_nan_logits_ends_alone(prompts, answers):
    poison = never_seen(prompts, answers)
    poisoned = [*prompts[:1], [7, poison, 7], *prompts[1:]]
    for slots in (1, 3):
        runner = runner_broken_by(poison, "nan", slots)
        drafter = SelfSpeculation(runner, StreamingKVCache(TINY, slots, 10, 2, dtype=torch.float64), 3)
        out = generate(runner, poisoned, max_new_tokens=N_NEW, drafter=drafter)
        assert out.finish_reasons[1] == "error" and out.tokens[1] == []
        assert out.errors[1] == "row 1: logits at position 1 are NaN or infinite"
        assert [out.tokens[i] for i in (0, 2, 3, 4, 5)] == expected(answers)


def test_nan_in_the_middle_of_decoding_keeps_what_came_before(prompts, answers):
    """The third token that row 0 emits is made to poison it; the other row never meets that token."""
    target = answers[0][2]
    other = next(i for i in range(1, 5) if target not in (*answers[i], *prompts[i]))
    assert target not in (*answers[0][:2], *prompts[0])
    runner = runner_broken_by(target, "inf")
    for drafter in (None, SelfSpeculation(runner, full_cache(runner.model, 2), 3)):
        out = generate(runner, [prompts[0], prompts[other]], max_new_tokens=N_NEW, drafter=drafter)
        assert out.tokens == [answers[0][:3], answers[other][:N_NEW]]
        assert out.errors == [f"row 0: logits at position {LENGTHS[0] + 2} are NaN or infinite", None]


def test_a_rejected_draft_that_overflows_harms_nobody(prompts, answers):
    """Row after row, drafts are a token with infinite KV: the target never takes it, nor notices it."""
    poison = never_seen(prompts, answers)
    runner = runner_broken_by(poison, "inf")
    drafter = Oracle(runner, dict.fromkeys(range(len(prompts)), [poison] * (N_NEW + 8)), 3)
    out = generate(runner, prompts, max_new_tokens=N_NEW, drafter=drafter)
    assert out.tokens == expected(answers) and out.errors == [None] * len(prompts)


BAD_CALLS = {
    "an empty prompt": {"prompts": [[1], []]},
    "a token outside the vocabulary": {"prompts": [[1], [61]]},
    "no limit": {"max_new_tokens": 0},
    "too many stop lists": {"stop_tokens": [[1], [2], [3]]},
    "more than the model's context": {"max_new_tokens": 254},
    "an unknown mode": {"verification": "hope"},
    "greedy samples": {"verification": "greedy", "sampling": [SamplingParams(), SamplingParams(1.0)]},
    "shared random numbers": {"request_ids": [4, 4], "sampling": SamplingParams(1.0)},
    "an id of 33 bits": {"request_ids": [0, 2**32]},
}


@pytest.mark.parametrize("change", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_are_refused_before_anything_runs(model, change):
    cache = full_cache(model, 2, 300)
    with pytest.raises(ConfigError):
        generate(ModelRunner(model, cache), **{"prompts": [[1, 2], [3]], "max_new_tokens": 4, **change})
    assert int(cache.positions.max()) == -1, "something ran"


def test_the_room_needed_is_exact(model):
    """prompt + new + gamma + 1 entries suffice, one fewer is refused."""
    prompt, n_new, gamma = list(range(9)), 6, 3
    answer = continue_by_recomputing(model, prompt, n_new)
    for room, ends in ((9 + 6 + 3 + 1, nullcontext()), (9 + 6 + 3, pytest.raises(ConfigError, match="the KV cache"))):
        runner = ModelRunner(model, full_cache(model, 2, room))
        drafter = SelfSpeculation(runner, full_cache(model, 2, room), gamma)
        with ends:
            out = generate(runner, [prompt, prompt[:4]], max_new_tokens=n_new, drafter=drafter)
            assert out.tokens[0] == answer


def test_a_row_is_prefilled_once_and_trusted_only_while_it_holds_its_prompt(model, prompts, answers):
    cache = full_cache(model, 3)
    runner, three = ModelRunner(model, cache), prompts[:3]

    def prefilled_by(runner, prompts):
        progress, ran = Progress(), list[int]()
        progress.prefilled = ran.append
        out = generate(runner, prompts, max_new_tokens=N_NEW, progress=progress)
        return sum(ran), out.tokens

    assert prefilled_by(runner, three) == (sum(LENGTHS[:3]), expected(answers[:3]))
    assert prefilled_by(runner, three) == (0, expected(answers[:3]))
    # Two rows lose a part of their prompts without the runner.
    cache.rollback(torch.tensor([LENGTHS[0] - 2, LENGTHS[1], 0]))
    assert prefilled_by(runner, three) == (LENGTHS[0] + LENGTHS[2], expected(answers[:3]))
    # Another model over the same cache: neither takes the other's rows for its own.
    other = tiny_model(seed=1)
    others = [continue_by_recomputing(other, p, N_NEW) for p in three]
    assert prefilled_by(ModelRunner(other, cache), three) == (sum(LENGTHS[:3]), others)
    assert prefilled_by(runner, three)[1] == expected(answers[:3])


def test_a_cache_of_another_dtype_or_shape_is_refused(model):
    for cache in (FullKVCache(TINY, 2, 32), FullKVCache(replace(TINY, n_layer=3), 2, 32, dtype=torch.float64)):
        with pytest.raises(ConfigError, match="does not fit the model"):
            ModelRunner(model, cache)


def test_prompts_may_be_generators_and_hold_numbers_of_numpy(model, prompts, answers):
    runner, stop = ModelRunner(model, full_cache(model, 2)), answers[1][3]
    each = (iter(map(np.int32, prompt)) for prompt in prompts)
    limits, ids = np.array([N_NEW] * len(prompts)), np.arange(len(prompts))
    out = generate(runner, each, max_new_tokens=limits, stop_tokens=(np.int64(stop) for _ in "1"), request_ids=ids)
    assert out.tokens == [cut(answer, [stop]) for answer in expected(answers)]
