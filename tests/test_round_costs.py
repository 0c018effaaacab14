"""What a captured round launches, by policy, and what it moves."""

import pytest

pytest.importorskip("triton")

from round_costs import N_ROW, row_of

from kv_cache.policy import policies


@pytest.mark.parametrize("name,most", [(name, {"retrieval": 60, "quantized": 56}.get(name, 51)) for name in policies()])
def test_no_policy_has_more_nodes_than_its_budget(name, most):
    """A layer: four products, attention and its merge, a write and five pointwise functions for each of four forwards;
    and what a policy does beside that."""
    row = row_of(policies()[name](), "greedy")
    assert row["nodes_a_layer"] <= most
    assert row["nodes_to_choose"] <= {"retrieval": 11}.get(name, 1)
    assert row["outside_gb"] < 1


@pytest.mark.parametrize("mode,most", [("coupled", 3), ("rejection", 3.5)])
def test_sampling_moves_little_outside_layers(mode, most):
    """Logits, random numbers and what a filter by top-p keeps, but for the conversion of 3 + 4 logits a row to float32:
    on a GPU they come so out of the product."""
    converted = (2 + 2) * 1e-9 * 7 * N_ROW * 128256
    assert row_of(policies()["streaming"](), mode)["outside_gb"] - converted < most


def test_noting_and_choosing_move_little_beside_attention():
    """At most: scores of chunks, not of entries, and each entry that is chosen once."""
    plain, chosen = (row_of(policies()[name](), "greedy") for name in ("snapkv", "verify_topk"))
    assert chosen["attention_gb"] < 1.05 * plain["attention_gb"]
    assert chosen["layers_gb"] - plain["layers_gb"] < 10
