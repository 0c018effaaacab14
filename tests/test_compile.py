"""--compile: the same model up to rounding, and nothing compiled again whatever the rows do."""

import pytest
import torch
from machine import needs_cpp_compiler
from pacings import Scripted
from tiny import TINY, full_cache, random_prompts, tiny_model
from torch._dynamo.testing import CompileCounter

from engine import ModelRunner, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.pacing import PLAIN, Choice
from kv_cache import StreamingKVCache
from models.pointwise import HeadNorm, add_norm, compiled, rotate_heads, swiglu, use_pointwise
from models.rope import Rope, rotate, rotation


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_nothing_is_compiled_again_when_lengths_and_gammas_change_and_rows_refill():
    """Prefill chunks and their tails, draft steps, catch-up steps and verifications of ragged, refilled rows."""
    counter = CompileCounter()
    pointwise = compiled(counter)
    target, draft = tiny_model(), tiny_model(seed=1)
    for model in (target, draft):
        use_pointwise(model, pointwise)
    runner = ModelRunner(target, full_cache(target, 3), prefill_chunk=8)
    self_draft = SelfSpeculation(runner, StreamingKVCache(TINY, 3, 12, 2, dtype=torch.float64), gamma=3)
    standalone = StandaloneDraft(ModelRunner(draft, full_cache(draft, 3)), gamma=3)
    sampling = SamplingParams(temperature=0.8, seed=1)

    choices = [*(Choice(0, gamma) for gamma in range(4)), PLAIN]

    def run(seed: int, lengths: list[int]) -> None:
        limits, prompts = [5 + 3 * i for i in range(len(lengths))], random_prompts(lengths, seed=seed)
        for drafter in (None, self_draft, standalone):
            generate(runner, prompts, max_new_tokens=limits, drafter=drafter, sampling=sampling)

    run(0, [9, 20, 33, 4])
    warm = counter.frame_count
    assert warm > 0
    run(1, [17, 40, 1, 26, 31])
    run(2, [64, 2, 3])
    pacing = Scripted([self_draft], choices)
    out = generate(runner, random_prompts([17, 40]), max_new_tokens=60, pacing=pacing, sampling=sampling)
    assert {round_.choice for round_ in out.stats.rounds} == set(choices)
    assert counter.frame_count == warm


@pytest.mark.slow
@needs_cpp_compiler
def test_compiled_functions_equal_the_eager_ones():
    dtype, tolerance, parts = torch.float32, 1e-6, compiled()
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def same(got, wanted):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)

    for n in (3, 8, 1):
        same(parts.add_norm(*(args := (normal(n, 96), normal(n, 96), normal(96), 1e-5))), add_norm(*args))
        same(parts.swiglu(x := normal(n, 80)), swiglu(x))
        turn = rotation(torch.arange(n), Rope(torch.linspace(0.1, 1, 8, dtype=torch.float64), torch.ones(8)), dtype)
        same(parts.rotate_heads(heads := normal(n, 5, 16), turn), rotate(heads, turn))
        norm = HeadNorm(normal(2, 16), 3, 1e-6)
        same(parts.rotate_heads(heads, turn, norm), rotate_heads(heads, turn, norm))
