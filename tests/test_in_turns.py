"""Runs that are compared are interleaved, in the other order every other time."""

from functools import partial

from reproduce.paper.in_turns import in_turns


def test_every_other_repeat_runs_in_reverse():
    order: list[str] = []
    runs = {name: partial(lambda name: order.append(name) or len(order), name) for name in ("a", "b", "c")}
    assert in_turns(runs, 3) == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert "".join(order) == "abccbaabc"
