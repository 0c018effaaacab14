"""A captured round launches no more than its budget, by policy, and sampling moves little outside layers."""

import pytest

pytest.importorskip("triton")

from kv_cache.policy import policies
from tests.support.round_costs import N_ROW, row_of


@pytest.mark.parametrize("name,most", [("streaming", 51), ("verify_topk", 52), ("retrieval", 60), ("quantized", 56)])
def test_no_policy_has_more_nodes_than_its_budget(name, most):
    """A layer of four forwards: products, attention and its merge, a write, five pointwise functions, and the policy's
    nodes."""
    row = row_of(policies()[name](), "greedy")
    assert row["nodes_a_layer"] <= most and row["outside_gb"] < 1
    assert row["nodes_to_choose"] <= {"retrieval": 11, "verify_topk": 2}.get(name, 1)


def test_sampling_moves_little_outside_layers():
    # A GPU's product gives float32; here 3 + 4 logits of a row are converted.
    converted = (2 + 2) * 1e-9 * 7 * N_ROW * 128256
    assert row_of(policies()["streaming"](), "coupled")["outside_gb"] - converted < 3
