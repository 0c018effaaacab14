"""Random scenarios: batches of unlike rows, decoded by the engine and by a reference that knows no cache."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine import ModelRunner, SamplingParams
from engine.controller import PLAIN, RoundChoice
from engine.drafters import Drafter
from engine.evaluation.reference import decode
from engine.generation import GenerateOutput
from kv_cache import FullKVCache
from models.config import RopeScaling
from tests.support.controllers import SCHEDULES, Scripted
from tests.support.drafters import GUESSES, TEXT_DRAFTERS, Drafters
from tests.support.edit_cases import edited, random_edits
from tests.support.heads import HEADS
from tests.support.policies import SELF_DRAFT_POLICIES, WITHOUT_QUERIES, Size, generate_selecting
from tests.support.tiny import TINY, recomputing, tiny_model
from tests.support.witness import WitnessModel, cut, next_logits

PACED = "paced"
SPECULATED = ("speculated, ngram", "speculated, streaming", "speculated, model")
COMBINED = ("combined, streaming", "combined, standalone, streaming")
DRAFTERS = ("none", *WITHOUT_QUERIES, *(f"standalone, {name}" for name in WITHOUT_QUERIES), *TEXT_DRAFTERS)
DRAFTERS += (PACED, *GUESSES, *COMBINED, *SPECULATED)
HEAD_DRAFTS = tuple(f"{kind}, streaming" for kind in HEADS)
# Drafters whose q is p, and those whose tokens in rejection mode the reference knows.
SEE_ALL = ("full", "standalone, full")
REFERENCED = ("none", *SEE_ALL)
# In rejection mode, what these rounds draw depends on the batch that they are for.
BY_BATCH = (PACED, "retrieval", *COMBINED)


class WitnessWorld:
    """A model, the dtype of entries of every cache, drafters beside those that work in every world, and what the model
    gives for a text without any cache."""

    model = WitnessModel()
    kv_dtype = model.dtype
    drafters = ()
    next_logits = staticmethod(next_logits)


QUERYING = tuple(name for name in SELF_DRAFT_POLICIES if name not in WITHOUT_QUERIES)
SHAPES = {
    "grouped heads": TINY,
    "one KV head": replace(TINY, n_kv_head=1),
    "three queries a group, tied": replace(TINY, n_head=6, n_kv_head=2, tie_embeddings=True),
    "sliding window": replace(TINY, n_kv_head=4, sliding_window=9),
    "experts": replace(TINY, n_expert=4, n_expert_per_token=2, normalise_experts=True, qk_norm=True),
    "biases, layers without rope": replace(
        TINY, qkv_bias=True, wo_bias=True, mlp_bias=True, unrotated_layers=(0,), rope_scaling=RopeScaling("linear", 4.0)
    ),
}


class LlamaWorld:
    """Has the fields of `WitnessWorld`."""

    drafters = (*QUERYING, *(f"standalone, {name}" for name in QUERYING), "medusa", *HEAD_DRAFTS)

    def __init__(self, shape: str, kv_dtype: torch.dtype = torch.float64) -> None:
        self.model = tiny_model(SHAPES[shape])
        self.kv_dtype, self.next_logits = kv_dtype, recomputing(self.model, kv_dtype)


World = WitnessWorld | LlamaWorld


@dataclass(frozen=True)
class Scenario:
    """A random batch: prompts of any lengths with limits, stops, sampling and ids, and a drafter."""

    mode: str
    drafter: str
    gamma: int
    budget: int
    n_sink: int
    prefill_chunk: int
    spare_room: int
    prompts: list[list[int]]
    limits: list[int]
    stops: list[list[int]]
    samplings: list[SamplingParams]
    ids: list[int]
    schedule: str

    @classmethod
    def random(cls, rng: random.Random, vocab_size: int, drafters: Sequence[str]) -> Scenario:
        drafter = rng.choice(drafters)
        mode = rng.choice(["greedy", "greedy", "coupled", "coupled" if drafter in BY_BATCH else "rejection"])
        n_prompts = rng.randint(1, 5)
        gamma, n_sink = rng.randint(0, 6), rng.randint(0, 4)
        scenario = cls(
            mode=mode,
            drafter=drafter,
            gamma=gamma,
            budget=n_sink + gamma + 1 + rng.choice([0, 1, 7, 50]),
            n_sink=n_sink,
            prefill_chunk=rng.choice([1, 3, 16, 64]),
            spare_room=rng.choice([0, 5]),
            prompts=[[rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))] for _ in range(n_prompts)],
            limits=[rng.randint(1, 16) for _ in range(n_prompts)],
            stops=[rng.sample(range(vocab_size), rng.choice([0, 0, 1, 2])) for _ in range(n_prompts)],
            samplings=[SamplingParams() if mode == "greedy" else random_sampling(rng) for _ in range(n_prompts)],
            ids=rng.sample(range(1000), n_prompts),
            # How far others draft changes what a row draws in rejection mode, too.
            schedule="" if mode == "rejection" else rng.choice(["", *SCHEDULES]),
        )
        if rng.random() < 0.5:
            return scenario
        # A full draft has the target's distribution, except for what its tokens of this round change.
        edits = [random_edits(rng, vocab_size, by_text=not drafter.endswith("full")) for _ in range(n_prompts)]
        each = zip(scenario.samplings, edits, strict=True)
        return replace(scenario, samplings=[replace(one, **rng.choice([more, {}])) for one, more in each])

    def futures(self, world: World) -> list[list[int]]:
        """Return what the reference emits after each prompt, stops aside: in rejection mode for drafters that see all
        that the target sees, so that q is p, else by plain decoding."""
        sees_all = self.drafter in SEE_ALL and self.mode == "rejection"
        mode = "coupled" if self.mode == "rejection" and self.drafter not in REFERENCED else self.mode
        laws = [
            edited(world.next_logits, *how) if how[1].edits else world.next_logits
            for how in zip(self.prompts, self.samplings, self.stops, strict=True)
        ]
        each = zip(laws, self.prompts, self.limits, self.samplings, self.ids, strict=True)
        return [
            decode(law, prompt, limit, sampling, mode, request, law if sees_all else None, self.gamma)
            for law, prompt, limit, sampling, request in each
        ]

    def n_slots(self) -> int:
        """Return how many tokens the longest row holds, after a whole round."""
        most = max(len(prompt) + limit for prompt, limit in zip(self.prompts, self.limits, strict=True))
        return most + self.gamma + 1 + self.spare_room

    def run(
        self, world: World, n_rows: int, futures: list[list[int]], order: list[int], repeats: int = 1
    ) -> list[GenerateOutput]:
        """The outputs with the prompts in that order; a repeated run finds rows that still hold their prompt."""
        cache = FullKVCache(world.model.config, n_rows, self.n_slots(), dtype=world.kv_dtype)
        runner = ModelRunner(world.model, cache, self.prefill_chunk)
        each = {"max_new_tokens": self.limits, "sampling": self.samplings, "request_ids": self.ids}
        each |= {"prompts": self.prompts, "stop_tokens": self.stops}
        ordered = {name: [values[i] for i in order] for name, values in each.items()}
        how = {**self.drafting(world, runner, futures), "verification": self.mode}
        return [generate_selecting(runner, **ordered, **how) for _ in range(repeats)]

    def drafting(self, world: World, runner: ModelRunner, futures: list[list[int]]) -> dict[str, Any]:
        """Return the drafter, or the controller, of a runner."""
        texts = dict(zip(self.ids, futures, strict=True))
        size = Size(runner.max_batch, runner.cache.capacity, self.n_sink, self.budget - self.n_sink, world.kv_dtype)
        new_drafter = Drafters(runner, self.gamma, size, texts=texts)

        def named(kind: str) -> Drafter | None:
            if self.spare_room and re.search(rf"\b({'|'.join(HEADS)}|standalone), streaming$", kind):
                kind += ", positions in the cache"
            return new_drafter(f"{kind}: {self.schedule}")

        if self.drafter != PACED:
            return {"drafter": named(self.drafter), "controller": None}
        rng, choices = random.Random(runner.cache.capacity), [PLAIN]
        kinds = rng.sample([kind for kind in (*DRAFTERS, *world.drafters) if kind not in ("none", PACED)], 3)
        for _ in range(50):
            other = rng.choice([PLAIN, *(RoundChoice(drafter, rng.randint(0, self.gamma)) for drafter in range(3))])
            # Runs of the same choice, so that some drafters miss more than a block.
            choices.append(rng.choice([other, choices[-1]]))
        return {"drafter": None, "controller": Scripted([named(kind) for kind in kinds], choices)}


def random_sampling(rng: random.Random) -> SamplingParams:
    how = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 2.0, 5.0]),
        top_k=rng.choice([0, 0, 1, 4, 100]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        seed=rng.randrange(2**63),
    )
    return replace(how, min_p=(0.0, 0.0, 0.1)[how.seed % 3], typical_p=(1.0, 1.0, 0.8)[how.seed // 3 % 3])


def check_counts(scenario: Scenario, out: GenerateOutput) -> None:
    """Every token is counted once, rows add up to the total, and the reasons are those of the tokens."""
    for tokens, stop, reason, row in zip(out.tokens, scenario.stops, out.finish_reasons, out.stats.rows, strict=True):
        assert reason == ("stop" if tokens[-1] in stop else "length")
        assert len(tokens) == 1 + row.emitted
        assert row.accepted <= row.emitted <= row.accepted + row.rounds
        assert row.accepted <= row.verified <= row.drafted <= scenario.gamma * row.rounds
        assert row.accepted_at == sorted(row.accepted_at, reverse=True)
        assert all(a <= v for a, v in zip(row.accepted_at, row.verified_at, strict=True))
    assert sum(r.emitted for r in out.stats.rounds) == sum(len(t) - 1 for t in out.tokens)
    assert out.stats.drafted == sum(row.drafted for row in out.stats.rows)
    # A draft that sees what the target sees is the target: nothing is ever rejected.
    knows_all = scenario.drafter == "oracle" and scenario.mode != "rejection"
    if scenario.drafter.endswith("full") or knows_all:
        assert out.stats.counts.acceptance_rate in (None, 1.0)
    assert not (knows_all and scenario.gamma) or all(row.drafted for row in out.stats.rows if row.rounds)


def run_scenarios(world: World, seeds: Iterable[int], name: str, record_property: Callable[[str, int], None]) -> None:
    """Run one random scenario per seed in that world, and record how many were held to which standard."""
    ran = [run_scenario(world, seed) for seed in seeds]
    counts = Counter(scenario.mode for scenario in ran)
    record_property(f"count: {name} scenarios equal to the reference", counts["greedy"] + counts["coupled"])
    record_property(f"count: {name} scenarios in rejection mode, equal in another batch", counts["rejection"])
    for drafter, n in Counter(scenario.drafter for scenario in ran).items():
        record_property(f"count: scenarios of drafter {drafter}", n)


def run_scenario(world: World, seed: int, referenced: str | None = None) -> Scenario:
    """Run a random scenario in that world and compare it; return it. referenced: a drafter to run instead, in
    rejection mode."""
    rng = random.Random(seed)
    scenario = Scenario.random(rng, world.model.config.vocab_size, (*DRAFTERS, *world.drafters))
    if referenced:
        samplings = [random_sampling(rng) for _ in scenario.prompts]
        scenario = replace(scenario, drafter=referenced, mode="rejection", samplings=samplings, schedule="")
    given = list(range(len(scenario.prompts)))
    futures = scenario.futures(world)
    n_slots = rng.randint(1, 4)
    expected = [cut(future, stop) for future, stop in zip(futures, scenario.stops, strict=True)]
    outputs = scenario.run(world, n_slots, futures, given, repeats=1 + seed % 2)
    if scenario.mode == "rejection" and scenario.drafter not in REFERENCED:
        some = rng.sample(given, rng.randint(1, len(given)))
        (again,) = scenario.run(world, rng.randint(1, 5), futures, some)
        # Sampled rows have no reference but themselves in another batch; greedy ones do.
        again_of = dict(zip(some, again.tokens, strict=True))
        for i in given:
            if not scenario.samplings[i].greedy:
                expected[i] = again_of.get(i, outputs[0].tokens[i])
    for out in outputs:
        assert out.tokens == expected, (
            f"seed {seed}: {scenario.mode}, {scenario.drafter}, gamma {scenario.gamma}, {scenario.schedule}"
        )
        check_counts(scenario, out)
    return scenario
