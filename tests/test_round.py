"""The four parts of a round, over rows of different lengths and ways to sample."""

from __future__ import annotations

import pytest
import torch
from tiny import TINY, full_cache, random_prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from engine import ModelRunner, NGram, SamplingParams, SavedText, SelfSpeculation, StandaloneDraft
from engine.batch import Batch
from engine.round import Round
from engine.sampling import Distribution, Filters
from kv_cache import StreamingKVCache

LENGTHS = [7, 4, 19]
SAMPLINGS = [SamplingParams(), SamplingParams(0.5, top_k=3), SamplingParams(1.0, top_p=0.9)]


class NoHostSync(TorchDispatchMode):
    """Refuses what reads a tensor's values back to the host, or has a shape that depends on them."""

    READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "tolist")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        boolean_index = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        assert name not in self.READS and not boolean_index, f"{func} would wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["greedy", "rejection", "coupled"])
def test_no_part_of_a_round_reads_a_value_back(mode):
    """A host read would stall every round; and what was rejected is in no cache behind it."""
    model = tiny_model()
    runner = ModelRunner(model, full_cache(model, 3))
    streaming = StreamingKVCache(TINY, 3, 8, 1, dtype=torch.float64)
    own = ModelRunner(tiny_model(seed=1), full_cache(model, 3))
    for drafter in (
        SelfSpeculation(runner, streaming, 3),
        StandaloneDraft(own, 3),
        NGram(runner, 3),
        SavedText(runner, {0: [1, 2, 3], 1: [4]}, 3),
    ):
        for row, prompt in enumerate(random_prompts(LENGTHS)):
            runner.prefill_row(row, prompt)
            drafter.follow(row, row, prompt, 0)
        batch = Batch(3, Filters.of(SAMPLINGS))
        batch.set_rows(SAMPLINGS, range(3))
        batch.set_state(LENGTHS, [5, 6, 7])
        round_ = Round(runner, batch, drafter, 3, mode)
        with torch.inference_mode(), NoHostSync():
            round_.propose()
            round_.verify()
            round_.accept()
            round_.roll_back()
        assert round_.drafts.tokens.shape == (3, 3) and len(round_.outcomes()) == 3
        for cache in (runner.cache, streaming, own.cache):
            assert (cache.positions.amax(dim=1) < batch.lengths).all()


def test_a_host_read_would_be_noticed():
    with pytest.raises(AssertionError, match="would wait"), NoHostSync():
        Distribution.of([SamplingParams(1.0)]).probs(torch.zeros(1, 6)).sum().item()
