"""reproduce/layer_search.py: which layers are dropped, and as a user runs it."""

import pytest
import torch
from tiny import TINY, full_cache, random_prompts, tiny_model

from models.llama import select_layers
from reproduce.layer_search import search


def test_the_layer_that_is_missed_least_is_dropped_first():
    """Worths that add up, but for layers 1 and 4, one of which does the work of both."""
    worth = {0: 5.0, 1: 3.0, 2: 0.5, 3: 0.25, 4: 3.0, 5: 9.0}

    def score(layers: tuple[int, ...]) -> float:
        return sum(worth[layer] for layer in layers) - 2.9 * ({1, 4} <= {*layers})

    found = search(6, 2, score)
    kept = [layers for layers, _ in found]
    assert kept == [(0, 1, 2, 3, 4, 5), (0, 2, 3, 4, 5), (0, 2, 4, 5), (0, 4, 5), (0, 5)]
    assert [seen for _, seen in found] == pytest.approx([score(layers) for layers in kept])


def test_an_early_exit_keeps_the_last_norm_and_the_head():
    model = tiny_model()
    tokens, positions = torch.tensor(random_prompts([7, 7])), torch.arange(7).expand(2, -1)
    exit_at_one = select_layers(model, [0])
    seen: list[torch.Tensor] = []
    hook = model.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0] + given[1]))
    whole = model(tokens, positions, full_cache(model, 2))
    hook.remove()
    early = exit_at_one(tokens, positions, full_cache(exit_at_one, 2))
    torch.testing.assert_close(early, model.logits(model.norm(seen[0])).view_as(early))
    assert TINY.n_layer == 2 and not torch.allclose(early, whole)


@pytest.mark.parametrize("more", ["", "--temperature 0.8 --seed 3"])
def test_a_search_on_a_tiny_model(call, more):
    """With a budget that holds everything all layers are accepted always, and fewer less."""
    sizes = "--B 2 --prefix_len 60 --gen_len 9 --gamma 2 --draft_budget 80 --fewest 1 --dtype float64"
    ended = call("reproduce/layer_search.py", f"{sizes} {more}")
    record = ended.record
    rows = record["rows"]
    n_layer = rows[0]["layers"]
    assert [row["layers"] for row in rows] == list(range(n_layer, 0, -1)) and n_layer > 1
    assert rows[0]["expected_acceptance"] == rows[0]["early_exit"] == 1.0
    assert 0 < rows[-1]["expected_acceptance"] < 1
    assert len({*record["order"]}) == n_layer - 1
    assert record["best"] == max(rows, key=lambda row: row["predicted_speedup"])["draft_layers"]
    assert all(row["predicted_speedup"] > 0 and row["gamma"] in (1, 2) for row in rows)
    assert f"--draft_layers {record['best']} --gamma" in ended.out


@pytest.mark.parametrize(
    ("flags", "says"),
    [("--gamma 0", "--gamma"), ("--fewest 0", "--fewest"), ("--gen_len 3 --gamma 2", "--gen_len")],
)
def test_what_cannot_be_searched_is_refused(call, flags, says):
    refusal = call("reproduce/layer_search.py", f"--B 2 --prefix_len 60 {flags}").refusal
    assert f"where:    {says}" in refusal
