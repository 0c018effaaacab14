"""--compile: nothing is compiled again when lengths, gammas and rows change."""

import torch
from torch._dynamo.testing import CompileCounter

from engine import ModelRunner, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.controller import PLAIN, RoundChoice
from kv_cache import StreamingKVCache
from models.kernels.pointwise import compiled, use_pointwise
from tests.support.controllers import Scripted
from tests.support.tiny import TINY, full_cache, random_prompts, tiny_model


def test_nothing_is_compiled_again_when_lengths_and_gammas_change_and_rows_refill():
    """Covers prefill chunks and their tails, draft steps, catch-up steps and verifications of refilled rows."""
    torch._dynamo.reset()
    counter = CompileCounter()
    pointwise = compiled(counter)
    target, draft = tiny_model(), tiny_model(seed=1)
    for model in (target, draft):
        use_pointwise(model, pointwise)
    runner = ModelRunner(target, full_cache(target, 3), prefill_chunk=8)
    self_draft = SelfSpeculation(runner, StreamingKVCache(TINY, 3, 12, 2, dtype=torch.float64), gamma=3)
    standalone = StandaloneDraft(ModelRunner(draft, full_cache(draft, 3)), gamma=3)
    sampling = SamplingParams(temperature=0.8, seed=1)

    choices = [*(RoundChoice(0, gamma) for gamma in range(4)), PLAIN]

    def run(seed: int, lengths: list[int]) -> None:
        limits, prompts = [5 + 3 * i for i in range(len(lengths))], random_prompts(lengths, seed=seed)
        for drafter in (None, self_draft, standalone):
            generate(runner, prompts, max_new_tokens=limits, drafter=drafter, sampling=sampling)

    run(0, [9, 20, 33, 4])
    warm = counter.frame_count
    assert warm > 0
    run(1, [17, 64, 1, 26])
    controller = Scripted([self_draft], choices)
    out = generate(runner, random_prompts([17, 40]), max_new_tokens=60, controller=controller, sampling=sampling)
    assert {round_.choice for round_ in out.stats.rounds} == set(choices)
    assert counter.frame_count == warm
    torch._dynamo.reset()
