"""Passes in turns over one prefilled state: each decodes as if it were alone."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from bench.passes import TURN, take_turns
from engine import ModelRunner, SamplingParams
from engine.generation import Generation
from engine.requests import Progress
from kv_cache import FullKVCache
from tests.support.drafters import three_drafters
from tests.support.tiny import random_prompts, tiny_model
from tests.support.witness import ROOM

PROMPTS, LIMITS = random_prompts([5, 19, 11, 2]), [30, 9, 21, 1]


def found(one: Generation) -> tuple[Any, ...]:
    """Return what a pass emits, its counts, and its rounds without their seconds."""
    stats = one.output.stats
    return one.output.tokens, stats.rows, [(each.busy, each.emitted, each.choice) for each in stats.rounds]


@pytest.mark.parametrize(("kind", "mode"), [(0, "rejection"), (1, "coupled"), (2, "rejection")])
def test_each_pass_decodes_as_if_it_were_alone(kind: int, mode: str) -> None:
    """Rows end at different times; samples that are rejected differ from plain decoding's."""
    model = tiny_model()
    runner = ModelRunner(model, FullKVCache(model.config, 4, ROOM, dtype=model.dtype))
    drafter, order, alone = three_drafters(runner)[kind], list[str](), list[tuple[Any, ...]]()

    def passes() -> Iterator[Generation]:
        for name, own in (("plain", None), ("drafted", drafter)):
            how: dict[str, Any] = {"sampling": SamplingParams(0.9, seed=5), "drafter": own, "verification": mode}
            how["progress"] = progress = Progress()
            progress.emitted = lambda n_tokens, name=name: order.append(name)
            yield Generation(runner, PROMPTS, max_new_tokens=LIMITS, **how)

    for one in passes():
        one.run()
        alone.append(found(one))
    order.clear()
    in_turns = [*passes()]
    assert all(usage.seconds > 0 for usage in take_turns(runner, in_turns))
    assert [found(one) for one in in_turns] == alone
    plain, drafted = (one.output.tokens for one in in_turns)
    assert [len(row) for row in plain] == LIMITS and (plain == drafted) == (mode != "rejection")
    assert sum(a != b for a, b in pairwise(order)) >= 2 * max(LIMITS) // TURN - 2
