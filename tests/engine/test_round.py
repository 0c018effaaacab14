"""The four parts of a round, over rows of different lengths and ways to sample."""

import pytest
import torch

from engine import ModelRunner, SamplingParams, SelfSpeculation, StandaloneDraft
from engine.batch import Batch
from engine.drafters import RowUpdate
from engine.drafters.ngram import NGram
from engine.drafters.saved_text import SavedText
from engine.drafters.speculated import Speculated
from engine.round import Round
from engine.sampling.distribution import Distribution, Filters
from kv_cache import StreamingKVCache
from kv_cache.retrieval import Retrieval
from kv_cache.streaming import Streaming
from kv_cache.verify_topk import VerifyTopK
from tests.support.recorded_graph import NoHostReads
from tests.support.tiny import TINY, full_cache, random_prompts, self_draft, tiny_model, tiny_runner

LENGTHS = [7, 4, 19]
SAMPLINGS = [SamplingParams(), SamplingParams(0.5, top_k=3), SamplingParams(1.0, top_p=0.9)]


@pytest.mark.parametrize("mode", ["greedy", "rejection", "coupled"])
def test_no_part_of_a_round_reads_a_value_back(mode):
    """A host read would stall every round; and what was rejected is in no cache behind it."""
    runner = tiny_runner(3)
    streaming = StreamingKVCache(TINY, 3, 8, 1, dtype=torch.float64)
    own = ModelRunner(tiny_model(seed=1), full_cache(runner.model, 3))
    for drafter in (
        SelfSpeculation(runner, streaming, 3),
        self_draft(runner, VerifyTopK(10, 4, n_sink=0, refresh=1), 3),
        self_draft(runner, Retrieval(7, 4, n_sink=1, refresh=1, chunk=2), 3),
        Speculated(SelfSpeculation(runner, streaming, 3), self_draft(runner, Streaming(6, n_sink=1), 2)),
        Speculated(SelfSpeculation(runner, streaming, 3), NGram(runner, 2)),
        Speculated(SelfSpeculation(runner, streaming, 3), StandaloneDraft(own, 2)),
        StandaloneDraft(own, 3),
        NGram(runner, 3),
        SavedText(runner, {0: [1, 2, 3], 1: [4]}, 3),
    ):
        for row, prompt in enumerate(random_prompts(LENGTHS)):
            runner.prefill(row, prompt)
            drafter.follow([RowUpdate(row, row, prompt, 0)])
        batch = Batch(3, Filters.of(SAMPLINGS))
        batch.set_rows(SAMPLINGS, range(3))
        batch.set_state(LENGTHS, [prompt[-1] for prompt in random_prompts(LENGTHS)], [5, 6, 7])
        round_ = Round(runner, batch, drafter, 3, mode)
        with torch.inference_mode(), NoHostReads():
            round_.propose()
            round_.verify()
            round_.accept()
            round_.roll_back()
        assert round_.proposed[0].tokens.shape == (3, 3) and len(round_.outcomes()) == 3
        for cache in (runner.cache, streaming, own.cache):
            assert (cache.positions.amax(dim=1) < batch.lengths).all()


def test_a_host_read_would_be_noticed():
    with pytest.raises(AssertionError, match="would wait"), NoHostReads():
        Distribution.of([SamplingParams(1.0)]).probs(torch.zeros(1, 6)).sum().item()
