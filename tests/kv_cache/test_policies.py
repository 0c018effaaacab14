"""Tests that every KV policy of tests/support/policies.py passes, on ragged rows."""

from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from engine import SelfSpeculation
from engine.drafters import RowUpdate
from kv_cache.base import EMPTY
from kv_cache.policy import policies
from kv_cache.scored import ScoredKVCache
from kv_cache.trial import try_policy
from tests.support.policies import BY_POSITION, POLICIES, SELF_DRAFT_POLICIES, Size, SmallestKeys, new_cache
from tests.support.tiny import TINY, random_prompts, tiny_runner

SIZE = Size(n_rows=3, longest=120, n_kept=3, window=9, dtype=torch.float64)
GAMMA = 3


@pytest.mark.parametrize("n_missed", [4, 20])
@pytest.mark.parametrize("policy", SELF_DRAFT_POLICIES)
def test_a_draft_catches_up_with_tokens_that_it_missed(policy, n_missed):
    """Ragged rows that missed fewer or more tokens than the window hold what a fresh fill gives, selections aside."""
    prompts, n_known = random_prompts([40, 7, 23]), [35, 4, 20]
    runner, cache, anew = tiny_runner(3), *(POLICIES[policy].make(TINY, SIZE) for _ in "12")
    drafter, again = SelfSpeculation(runner, cache, GAMMA), SelfSpeculation(runner, anew, GAMMA)
    texts = [prompt + random_prompts([n_missed], seed=len(prompt))[0] for prompt in prompts]
    for row, (text, known) in enumerate(zip(texts, n_known, strict=True)):
        runner.prefill(row, text)
        drafter.follow([RowUpdate(row, row, text[:known], 0)])
        drafter.follow([RowUpdate(row, row, text, known)])
        again.follow([RowUpdate(row, row, text, 0)])
        assert torch.equal(cache.positions[row], anew.positions[row])
        chosen = cache.n_fixed if cache.selects and len(text) > cache.capacity else 0
        assert torch.equal(cache.keys[:, row, :, chosen:], anew.keys[:, row, :, chosen:])
        if policy == "retrieval":
            n_whole = len(text) // cache.chunk
            assert torch.equal(cache.means[:, row, :, :n_whole], anew.means[:, row, :, :n_whole])
        if policy == "quantized":
            packed = max(0, len(text) - SIZE.window) // SIZE.window * SIZE.window
            assert torch.equal(cache.packed[1][:, row, :, :packed], anew.packed[1][:, row, :, :packed])


def test_entries_are_selected_when_a_text_outgrew_the_budget_unseen():
    """The result is that of a fill at once: nothing was selected while the whole text was kept."""
    text = random_prompts([90])[0]
    for policy in (name for name in SELF_DRAFT_POLICIES if POLICIES[name].sample.selects):
        runner, caches = tiny_runner(3), [POLICIES[policy].make(TINY, SIZE) for _ in "12"]
        runner.prefill(0, text)
        for cache, parts in zip(caches, ([(10, 0), (90, 10)], [(90, 0)]), strict=True):
            for n, known in parts:
                SelfSpeculation(runner, cache, GAMMA).follow([RowUpdate(0, 0, text[:n], known)])
        assert torch.equal(caches[0].keys[:, 0], caches[1].keys[:, 0])


@pytest.mark.parametrize("policy", SELF_DRAFT_POLICIES)
def test_a_filled_row_holds_entries_of_the_target_and_no_other_row_changes(policy):
    """Rows are filled twice, with longer prompts or shorter ones."""
    prompts = random_prompts([40, 7, 23, 9, 35, 2])
    runner, cache = tiny_runner(3), POLICIES[policy].make(TINY, SIZE)
    drafter = SelfSpeculation(runner, cache, GAMMA)
    for row, prompt in zip([0, 1, 2] * 2, prompts, strict=True):
        runner.prefill(row, prompt)
        before = cache.keys.clone(), cache.positions.clone()
        drafter.follow([RowUpdate(row, row, prompt, 0)])
        others = [i for i in range(3) if i != row]
        assert torch.equal(cache.keys[:, others], before[0][:, others])
        assert torch.equal(cache.positions[others], before[1][others])
        filled = cache.positions[row] != EMPTY
        kept = cache.positions[row][filled].tolist()
        assert len(set(kept)) == len(kept) == len(cache.retained_positions(len(prompt)))
        assert max(kept) == len(prompt) - 1
        if not POLICIES[policy].is_exact:
            continue
        # Each entry equals an entry of the target's row, in the same layer and head.
        for draft, whole in ((cache.keys, runner.cache.keys), (cache.entries[:, 1], runner.cache.entries[:, 1])):
            mine, theirs = draft[:, row][:, :, filled], whole[:, row, :, : len(prompt)]
            same = (mine[:, :, :, None] == theirs[:, :, None]).all(-1)
            assert bool(same.any(-1).all())
            assert policy not in BY_POSITION or torch.equal(mine, theirs[:, :, kept])


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_hold_the_retained_positions(policy):
    """Tokens that come one at a time leave `retained_positions`; a block has a slot for each of its tokens.

    No slot lies beyond its token's position: attention reads slots below the longest row only.
    """
    cache = POLICIES[policy].make(TINY, SIZE)
    positions = torch.arange(100)
    slots = cache.slots(positions)
    assert bool((slots <= positions).all()), "slots(p) <= p"
    for length in positions.tolist():
        cache.begin(torch.full((SIZE.n_rows, 1), length))
        positions_now = sorted(p for p in cache.positions[0].tolist() if p != EMPTY)
        assert positions_now == sorted(cache.retained_positions(length + 1).tolist())
        block = cache.slots(torch.arange(length, length + min(cache.max_block, SIZE.longest - length)))
        assert len(set(block.tolist())) == len(block)


MANY_LAYERS = replace(TINY, n_layer=40, head_dim=64)
SCORES = {
    r"not a number .*\.score\n.*float32 \[88, 2\]\n.* \[2, 88\]\n": lambda prompt: prompt.keys[..., 0].T,
    r"not a number .*seen: +list of 2\n": lambda prompt: prompt.keys[..., 0].tolist(),
    "not a number .*84": lambda prompt: prompt.keys[:, 4:, 0],
    r"not a number .*torch\.bool": lambda prompt: prompt.keys[..., 0] > 0,
    r"not a number .*with NaN": lambda prompt: prompt.keys[..., 0] * (float("nan") if prompt.layer == 39 else 1),
    r"test_policies\.py, line \d+\n.*IndexError: index 64": lambda prompt: prompt.keys[:, :, 64],
    r"test_policies\.py, line \d+\n.*LookupError.*n_queries": lambda prompt: prompt.queries,
}


@pytest.mark.parametrize("message", SCORES)
def test_scores_that_cannot_be_ranked_are_refused_before_a_run(message):
    class OtherScores(SmallestKeys):
        def score(self, prompt):
            return SCORES[message](prompt)

    with pytest.raises(ConfigError, match=f"(?s){message}"):
        try_policy(OtherScores(24, 8), MANY_LAYERS)


def test_a_policy_is_tried_in_the_sizes_of_the_model():
    tried = []

    class OfModel(SmallestKeys):
        def score(self, prompt):
            assert prompt.layer < prompt.n_layer == 40
            tried.append(prompt.layer)
            return prompt.keys[..., torch.arange(32, 64)].norm(dim=-1)

    try_policy(OfModel(24, 8), MANY_LAYERS)
    assert {*tried} == {*range(40)}


SLOTS = {
    r"OtherSlots\.slots\n.*slot 23 for position 0": lambda positions: 23 - positions % 24,
    r"OtherSlots\.slots\n.*slot 24 for position 24": lambda positions: positions,
    r"OtherSlots\.slots\n.*int64 \[1, 88\]\n.*int64 \[2, 88\]": lambda positions: positions[:1],
    "float32": lambda positions: (positions % 24).float(),
    r"test_policies\.py, line \d+\n.*IndexError": lambda positions: torch.arange(24)[positions],
}


@pytest.mark.parametrize("message", SLOTS)
def test_slots_that_rounds_cannot_use_are_refused_before_a_run(message):
    class OtherSlots(ScoredKVCache):
        def slots(self, positions):
            return SLOTS[message](positions)

    class Misplaced(SmallestKeys):
        def new_cache(self, config, max_batch, length, device, dtype):
            return OtherSlots(config, max_batch, self, device, dtype)

    with pytest.raises(ConfigError, match=f"(?s){message}"):
        try_policy(Misplaced(24, 8), TINY)


def test_a_policy_sees_the_values_and_positions_of_each_layer():
    """Of a prompt whose row is another in the source, whatever the layers of the draft."""
    seen = {}

    class Sees(SmallestKeys):
        def score(self, prompt):
            seen[prompt.layer] = prompt.values, prompt.positions
            return super().score(prompt)

    runner, prompts = tiny_runner(3), random_prompts([40, 33, 25])
    for row, prompt in enumerate(prompts):
        runner.prefill(row, prompt)
    cache = new_cache(Sees(24, 8), replace(TINY, n_layer=1), SIZE)
    for row, prompt in enumerate(prompts):
        cache.fill_row(row, runner.cache, len(prompt), layers=[1])
        values, positions = seen.pop(1)
        assert not seen and positions.tolist() == [*range(len(prompt))]
        assert torch.equal(values, runner.cache.entries[1, 1, row, :, : len(prompt)].float())


@pytest.mark.parametrize("kind", [kind for kind in policies().values() if hasattr(kind, "n_sink")])
def test_budgets_that_auto_chooses_have_room_for_the_sinks(kind):
    found = kind(draft_budget="auto", n_sink=96).alternatives(2000)
    for policy in found:
        policy.check()
    assert 1 < len(found) < len(kind.AUTO_BUDGETS)
    assert [policy.draft_budget for policy in kind(draft_budget="auto").alternatives(60)] == [64], "the smallest"
