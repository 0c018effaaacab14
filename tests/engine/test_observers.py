"""What an observer of verifications gets: each verified draft, p and q, and no other tokens because of it."""

from itertools import product

import pytest
import torch

from engine import SamplingParams, generate
from engine.requests import Progress, VerifiedRow
from kv_cache.streaming import Streaming
from tests.support.recorded_graph import RecordedGraphs
from tests.support.tiny import random_prompts, recomputing, self_draft, tiny_model, tiny_runner

GAMMA, LIMITS = 3, [12, 9, 8]
PENALTIES = {"repetition_penalty": 1.3}
SAMPLINGS = {
    "greedy": [SamplingParams()] * 3,
    "rejection": [SamplingParams(0.7, seed=3), SamplingParams(1.1, top_k=9, seed=4), SamplingParams(0.9, seed=5)],
    "coupled": [SamplingParams(0.7, seed=3, **PENALTIES), SamplingParams(0.8, top_p=0.9), SamplingParams(seed=1)],
}


class Observer(list[VerifiedRow], Progress):
    """The rows that were observed: as an empty list, false at first."""

    observes = True

    def verified(self, row: VerifiedRow) -> None:
        self.append(row)


@pytest.mark.parametrize("mode,new_graphs", [*product(SAMPLINGS, [RecordedGraphs]), ("rejection", None)])
def test_an_observer_gets_every_verified_draft_and_changes_no_token(mode, new_graphs):
    """Two rows decode three requests that stop at other tokens."""
    runner, prompts, seen = tiny_runner(2, new_graphs=new_graphs), random_prompts([40, 7, 23]), Observer()
    drafter = self_draft(runner, Streaming(16, 4), GAMMA)
    how = {"max_new_tokens": LIMITS, "sampling": SAMPLINGS[mode], "verification": mode, "stop_tokens": [[], [8], []]}
    plain, observed, again = (
        generate(runner, prompts, drafter=drafter, **how, **more) for more in ({}, {"progress": seen}, {})
    )
    assert plain.tokens == observed.tokens == again.tokens
    next_logits = recomputing(tiny_model())
    for index, (prompt, tokens, counts) in enumerate(zip(prompts, plain.tokens, plain.stats.rows, strict=True)):
        rows = [row for row in seen if row.request.index == index]
        assert sum(row.part.verified for row in rows) == counts.verified > 0
        assert sum(row.part.accepted for row in rows) == counts.accepted
        text, sampling = prompt + tokens, SAMPLINGS[mode][index]
        unedited = SamplingParams(sampling.temperature, seed=sampling.seed)
        for row in rows:
            n = len(row.drafts)
            assert row.logprobs.shape[0] == n + 1 and row.draft_logprobs.shape[0] == n
            assert text[row.start : row.start + row.part.accepted] == row.drafts[: row.part.accepted]
            q = row.draft_logprobs.exp()
            torch.testing.assert_close(q.sum(-1), torch.ones_like(q[:, 0]))
            assert bool((q.gather(1, torch.tensor(row.drafts)[:, None]) > 0).all())
            if sampling != unedited or (sampling.greedy and mode != "greedy"):
                continue
            for i in range(row.part.verified):
                before = next_logits(text[: row.start] + row.drafts[:i])
                expected = (before / (sampling.temperature or 1)).log_softmax(-1)
                torch.testing.assert_close(row.logprobs[i], expected, rtol=0, atol=1e-9)
