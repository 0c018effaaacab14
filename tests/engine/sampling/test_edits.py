"""Edited logits at every drafted position: by lists, in captured rounds, and where all ids are excluded."""

from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch

from common.errors import ConfigError
from engine import Decoder, ModelRunner, Request, SamplingParams, generate
from engine.batch import Batch
from engine.evaluation import reference
from engine.sampling.distribution import Distribution, Filters
from tests.support.drafters import Drafters
from tests.support.edit_cases import edited
from tests.support.policies import Size
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.tiny import TINY, decode, full_cache, random_prompts, recomputing, tiny_model, tiny_runner
from tests.support.witness import cut

LENGTHS, LIMITS = [40, 7, 23, 1, 31], [25, 9, 18, 32, 12]
SIZE = Size(n_rows=2, longest=128, n_kept=2, window=10, dtype=torch.float64)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.75, "frequency_penalty": 0.3}
BIAS, BANS = {3: 16.0, 17: -100.0}, [[5], [8, 9], [60, 1, 2]]
# Rows with and without edits; of their temperatures, the greedy mode takes none.
EDITED = [
    SamplingParams(0.7, seed=3, **PENALTIES, min_p=0.02),
    SamplingParams(1.1, seed=4),
    SamplingParams(logit_bias=BIAS, repetition_penalty=0.8, min_tokens=12),
    SamplingParams(0.9, seed=5, bad_words=[[token] for token in range(0, 60, 2)], typical_p=0.9),
    SamplingParams(0.9, top_k=30, seed=6, logit_bias={2: 8.0}, min_tokens=5, bad_words=BANS),
]
STOPS = [[], [], [8, 11, 30], [], [*range(0, 61, 4)]]


KINDS = ("none", "full", "ngram", "speculated, streaming", "full: confidence")


@pytest.mark.parametrize("kind,mode", [*zip(KINDS, cycle(["coupled", "greedy"]), strict=False)])
def test_captured_rows_are_those_of_a_slow_reference(kind, mode):
    """Five ragged requests through two rows: rounds with and without edits alternate."""
    model, prompts, graphs = tiny_model(), random_prompts(LENGTHS), list[RecordedGraph]()
    new_graphs = partial(RecordedGraphs, recorded=graphs)
    runner = ModelRunner(model, full_cache(model, 2), prefill_chunk=8, new_graphs=new_graphs)
    rules = [replace(rule, temperature=0.0) if mode == "greedy" else rule for rule in EDITED]
    how = {"max_new_tokens": LIMITS, "sampling": rules, "stop_tokens": STOPS, "verification": mode}
    out = generate(runner, prompts, **how, drafter=Drafters(runner, 3, SIZE)(kind))
    each = zip(prompts, LIMITS, rules, STOPS, out.tokens, strict=True)
    for id_, (prompt, limit, rule, stops, tokens) in enumerate(each):
        next_logits = edited(recomputing(model), prompt, rule, stops)
        assert tokens == cut(reference.decode(next_logits, prompt, limit, rule, mode, id_), stops)
    plain = [SamplingParams(rule.temperature, rule.top_k, seed=rule.seed) for rule in rules]
    unlike = generate(tiny_runner(2), prompts, **how | {"sampling": plain}).tokens
    assert [tokens == other for tokens, other in zip(out.tokens, unlike, strict=True)] == [False, True, *[False] * 3]
    assert kind == "none" or out.stats.accepted > 0
    assert graphs and all(graph.replays for graph in graphs)


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
