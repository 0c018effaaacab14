"""Passes in turns over one prefilled state: each decodes as if it were alone."""

from itertools import pairwise
from typing import Any

import pytest

from bench.passes import TURN, take_turns
from engine import ModelRunner, SamplingParams
from engine.drafters import Drafter
from engine.generation import Generation
from engine.requests import Progress
from kv_cache import FullKVCache
from tests.support.drafters import three_drafters
from tests.support.tiny import random_prompts, tiny_model
from tests.support.witness import ROOM

LIMITS = [30, 9, 21, 1, 26]


def passes_of(runner: ModelRunner, drafter: Drafter, mode: str, n_prompts: int) -> dict[str, Any]:
    """Return what each pass emits, its counts and rounds without their seconds, and the order of all tokens."""
    sampling = SamplingParams(0.9, seed=5)
    order: list[tuple[str, int]] = []
    prompts = random_prompts([5, 19, 11, 2, 8][:n_prompts], runner.vocab_size)

    def generation(name: str, own: Drafter | None) -> Generation:
        how: dict[str, Any] = {"drafter": own, "verification": mode, "sampling": sampling}
        how["progress"] = progress = Progress()
        progress.emitted = lambda n_tokens: order.append((name, n_tokens))
        return Generation(runner, prompts, max_new_tokens=LIMITS[:n_prompts], **how)

    def found(one: Generation) -> tuple[Any, ...]:
        stats = one.output.stats
        return one.output.tokens, stats.rows, [(each.busy, each.emitted, each.choice) for each in stats.rounds]

    alone = []
    for name, own in (("plain", None), ("drafted", drafter)):
        alone.append(generation(name, own))
        alone[-1].run()
    order.clear()
    in_turns = [generation("plain", None), generation("drafted", drafter)]
    usages = take_turns(runner, in_turns)
    assert all(usage.seconds > 0 for usage in usages)
    return {"alone": [found(one) for one in alone], "in turns": [found(one) for one in in_turns], "order": order}


@pytest.mark.parametrize(("kind", "mode"), [(0, "rejection"), (1, "coupled"), (2, "rejection")])
def test_each_pass_decodes_as_if_it_were_alone(kind: int, mode: str) -> None:
    """Rows end at different times; samples that are rejected differ from plain decoding's."""
    model = tiny_model()
    runner = ModelRunner(model, FullKVCache(model.config, 4, ROOM, dtype=model.dtype))
    seen = passes_of(runner, three_drafters(runner)[kind], mode, 4)
    assert seen["in turns"] == seen["alone"]
    plain, drafted = (tokens for tokens, *_ in seen["in turns"])
    assert [len(row) for row in plain] == LIMITS[:4] and (plain == drafted) == (mode != "rejection")
    names = [name for name, _ in seen["order"]]
    assert sum(a != b for a, b in pairwise(names)) >= 2 * max(LIMITS) // TURN - 2
