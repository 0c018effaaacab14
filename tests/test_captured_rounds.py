"""Rounds that are captured once and replayed give the very tokens of rounds that are called."""

from __future__ import annotations

import pytest
import torch
from recorded_graph import RecordedGraph
from tiny import TINY, full_cache, random_prompts, tiny_model

from engine import ModelRunner, NGram, SamplingParams, SelfSpeculation, StandaloneDraft, generate
from engine.drafters import SavedText
from kv_cache import FullKVCache, StreamingKVCache

LENGTHS = [40, 7, 23, 1, 31]
LIMITS = [25, 9, 18, 30, 12]
SAMPLED = [
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.1, top_k=9, seed=4),
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.8, seed=5),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.95, seed=6),
]


def make_drafter(kind: str, runner: ModelRunner):
    if kind == "none":
        return None
    if kind == "ngram":
        return NGram(runner, gamma=3)
    if kind == "saved":
        texts = {i: [5 * i + j for j in range(12)] for i in range(4)}
        return SavedText(runner, texts, gamma=3)
    if kind == "standalone":
        draft = tiny_model()
        cache = StreamingKVCache(draft.config, runner.max_batch, 24, 2, dtype=torch.float64, rotate_on_read=True)
        return StandaloneDraft(ModelRunner(draft, cache), gamma=3)
    if kind == "full":
        return SelfSpeculation(runner, full_cache(runner.model, runner.max_batch), gamma=2)
    return SelfSpeculation(runner, StreamingKVCache(TINY, runner.max_batch, 12, 2, dtype=torch.float64), gamma=3)


def run(kind: str, mode: str, new_graph=None, rounds: int = 1):
    model = tiny_model()
    runner = ModelRunner(model, full_cache(model, 2), prefill_chunk=8, new_graph=new_graph)
    drafter = make_drafter(kind, runner)
    sampling = SAMPLED if mode != "greedy" else None
    prompts = random_prompts(LENGTHS)
    for _ in range(rounds):
        out = generate(
            runner,
            prompts,
            max_new_tokens=LIMITS,
            drafter=drafter,
            sampling=sampling,
            verification=mode,
            stop_tokens=[[], [], [8], [], []],
        )
    return out


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("kind", ["none", "streaming", "full", "standalone", "ngram", "saved"])
def test_replayed_rounds_give_the_same_tokens(kind, mode):
    """Five ragged requests through two rows: rows roll back, finish, idle and are refilled, none alike."""
    graphs: list[RecordedGraph] = []

    def new_graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    called, replayed = run(kind, mode), run(kind, mode, new_graph)
    assert replayed.tokens == called.tokens
    assert replayed.stats.counts == called.stats.counts
    assert len({row.accepted for row in called.stats.rows}) > 1 or kind in ("none", "saved")
    assert len(graphs) == (3 if kind == "none" else 4)
    assert all(graph.replays == len(replayed.stats.rounds) - 1 for graph in graphs)


def test_a_second_run_of_the_same_kind_captures_nothing():
    graphs: list[RecordedGraph] = []

    def new_graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    again = run("streaming", "coupled", new_graph, rounds=2)
    assert again.tokens == run("streaming", "coupled").tokens
    assert len(graphs) == 4


def test_the_recorder_notices_what_a_graph_would_not_follow():
    """A value from the host, and a tensor that is replaced instead of written to."""
    state = {"x": torch.zeros(2)}
    graph = RecordedGraph()
    out = graph.capture(lambda: state["x"] + 1)
    state["x"] = torch.full((2,), 5.0)
    graph.replay()
    assert torch.equal(out, torch.ones(2))
    state["x"] = fixed = torch.zeros(2)
    out = graph.capture(lambda: state["x"] + 1)
    fixed.fill_(5.0)
    graph.replay()
    assert torch.equal(out, torch.full((2,), 6.0))
    with pytest.raises(AssertionError, match="the host read"):
        RecordedGraph().capture(lambda: fixed.sum().item())


def test_extents_do_not_follow_the_rows_when_captured():
    """A view that grows would be another shape in every round."""
    model = tiny_model()
    cache = FullKVCache(TINY, 2, 128, dtype=torch.float64)
    seen = set()

    class Watching(ModelRunner):
        def step(self, tokens, positions, extent, cache=None):
            seen.add(extent)
            return super().step(tokens, positions, extent, cache)

    runner = Watching(model, cache, new_graph=RecordedGraph)
    generate(runner, random_prompts([9, 20]), max_new_tokens=6)
    assert seen == {128}
