"""Speculative decoding == the plain reference, token for token, over random scenarios (KV witness)."""

from __future__ import annotations

import os
import random

import pytest
import torch
from witness import VOCAB, ExactlyJ, WitnessModel, continue_plainly, cut

from engine import ModelRunner, SelfSpeculation, generate
from kv_cache import FullKVCache, StreamingKVCache

SCENARIOS = int(os.environ.get("WITNESS_SCENARIOS", "600"))
BATCHES = 20


def run_scenario(seed: int) -> None:
    rng = random.Random(seed)
    model = WitnessModel()
    n_slots = rng.randint(1, 4)
    n_prompts = rng.randint(1, 7)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(n_prompts)]
    limits = [rng.randint(1, 24) for _ in prompts]
    stops = [rng.sample(range(VOCAB), rng.choice([0, 0, 1, 2])) for _ in prompts]
    gamma = rng.randint(0, 6)
    room = max(len(p) + n for p, n in zip(prompts, limits, strict=True)) + gamma + 1 + rng.choice([0, 5])
    kind = rng.choice(["none", "streaming", "full", "exactly_j"])
    cache = FullKVCache(model.config, n_slots, room, dtype=torch.int64)
    runner = ModelRunner(model, cache, prefill_chunk=rng.choice([1, 3, 16, 64]))
    drafter = None
    if kind == "streaming":
        n_sink = rng.randint(0, 4)
        budget = n_sink + gamma + 1 + rng.choice([0, 1, 7, 50])
        drafter = SelfSpeculation(
            runner, StreamingKVCache(model.config, n_slots, budget, n_sink, dtype=torch.int64), gamma
        )
    elif kind == "full":
        drafter = SelfSpeculation(runner, FullKVCache(model.config, n_slots, room, dtype=torch.int64), gamma)
    elif kind == "exactly_j":
        drafter = ExactlyJ(cache, gamma, rng)

    expected = [cut(continue_plainly(p, n), stop) for p, n, stop in zip(prompts, limits, stops, strict=True)]
    for _ in range(2):  # the second run reuses rows that still hold their prompt
        out = generate(runner, prompts, max_new_tokens=limits, drafter=drafter, stop_tokens=stops)
        assert out.tokens == expected, f"seed {seed}: {kind}, gamma {gamma}"
        for tokens, stop, reason, row in zip(out.tokens, stops, out.finish_reasons, out.stats.rows, strict=True):
            assert reason == ("stop" if tokens[-1] in stop else "length")
            assert len(tokens) == 1 + row.emitted
            assert row.emitted == row.accepted + row.added
        assert sum(r.emitted for r in out.stats.rounds) == sum(len(t) - 1 for t in out.tokens)
        if kind == "full":
            assert out.stats.counts.acceptance_rate in (None, 1.0)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_speculation_equals_the_reference(batch: int) -> None:
    for seed in range(batch, SCENARIOS, BATCHES):
        run_scenario(seed)
