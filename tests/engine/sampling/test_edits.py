"""Edited logits where all ids are excluded, and ids that no vocabulary has. Scenarios, captured rounds and the joint
law have random edits."""

import pytest
import torch

from common.errors import ConfigError
from engine import Decoder, Request, SamplingParams
from engine.batch import Batch
from engine.sampling.distribution import Distribution, Filters
from tests.support.tiny import TINY, decode, tiny_runner


def test_where_all_ids_are_excluded_tokens_are_still_drawn():
    rules = SamplingParams(1.0, bad_words=[[id_] for id_ in range(9)], min_tokens=3, repetition_penalty=100.0)
    batch = Batch(1, Filters.of([rules]), n_ids=9)
    batch.set_state([0], [0], [0], [Request([1], 9, [2, 3], rules)])
    for dtype in (torch.float32, torch.float64):
        logits = batch.processed(torch.randn(1, 1, 9, dtype=dtype), torch.zeros(1, 0, dtype=torch.int64))
        probs = Distribution.of([rules]).probs(logits)
        assert float(probs.sum()) == pytest.approx(1) and float(probs[..., 2:4].sum()) == 0


@pytest.mark.parametrize("rules", [{"logit_bias": {TINY.vocab_size: 1.0}}, {"bad_words": [[1, -1]]}])
def test_ids_outside_the_vocabulary_are_refused(rules):
    decoder = Decoder(tiny_runner(2))
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        decoder.submit(Request([1, 2], 5, sampling=SamplingParams(**rules)))
    decode(decoder, request := Request([1, 2], 5))
    assert len(request.tokens) == 5
