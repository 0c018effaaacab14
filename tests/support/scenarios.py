"""Random scenarios: batches of unlike rows, decoded by the engine and by a reference that knows no cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from engine import ModelRunner, SamplingParams, SelfSpeculation, StandaloneDraft
from engine.batch import Batch
from engine.drafters import RowUpdate
from engine.drafters.combined import Combined
from engine.drafters.markov import Markov, NGramTable
from engine.drafters.medusa import Medusa
from engine.drafters.ngram import NGram
from engine.drafters.ngram_cache import NGramCache
from engine.drafters.saved_text import SavedText
from engine.drafters.speculated import Speculated
from engine.drafters.suffix import Suffix
from engine.evaluation.reference import decode
from engine.generation import GenerateOutput
from engine.pacing import PLAIN, Choice
from engine.sampling.noise import Stream, uniform
from kv_cache import FullKVCache
from tests.support.block_heads import HEADS, with_head
from tests.support.edit_cases import edited, random_edits
from tests.support.pacings import SCHEDULES, scheduled
from tests.support.policies import POLICIES, WITHOUT_QUERIES, Size, generate_selecting
from tests.support.published_heads import random_medusa
from tests.support.witness import cut

KINDS = ("oracle", "reject", "upto", "ragged", "random")


class Guesses(SavedText):
    """An oracle that errs in a controlled way: it knows each request's future and proposes a part of it, by `kind`.

    All of it ("oracle"), nothing but errors ("reject"), a right beginning of random length and errors behind it
    ("upto"; "ragged" also drops a random number of the last drafts), or noise ("random"). Guesses for a request at a
    position do not depend on the batch.
    """

    def __init__(
        self, runner, texts: Mapping[int, Sequence[int]], gamma: int, kind: str, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__(runner, texts, gamma)
        self.kind, self.vocab_size = kind, vocab_size
        self.seed = torch.tensor(seed)
        self.requests = torch.zeros(runner.cache.max_batch, dtype=torch.int64)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        super().follow(rows)
        for row, request, *_ in rows:
            self.requests[row] = request

    def guess(self, batch: Batch, gamma: int) -> tuple[Tensor, Tensor]:
        (tokens, n_tokens), of = super().guess(batch, gamma), (self.requests[batch.rows], batch.lengths)
        if self.kind == "random":
            return self._below(self.vocab_size, *of, gamma), n_tokens
        n_right = {"oracle": gamma, "reject": 0}.get(self.kind)
        right = self._below(gamma + 1, *of, 1) if n_right is None else n_right
        wrong = (tokens + 1) % self.vocab_size
        tokens = torch.where(torch.arange(gamma) < right, tokens, wrong)
        if self.kind == "ragged":
            n_tokens = torch.minimum(n_tokens, self._below(gamma + 1, of[0], of[1] + 1000, 1)[:, 0])
        return tokens, n_tokens

    def _below(self, bound: int, requests: Tensor, lengths: Tensor, n: int) -> Tensor:
        numbers = uniform(self.seed, requests, lengths, Stream.DRAFT, max(n, 1))[:, :n]
        return (numbers * bound).long()


PACED = "paced"
# What needs no model, made of a runner and gamma.
TEXT_DRAFTERS = {
    "ngram": NGram,
    "ngram, first match": partial(NGram, match="first"),
    "suffix": Suffix,
    "cache": NGramCache,
    "markov": lambda runner, gamma: Markov(runner, gamma, counted(runner.vocab_size)),
}
SPECULATED = ("speculated, ngram", "speculated, streaming", "speculated, model")
COMBINED = ("combined, streaming", "combined, standalone, streaming")
DRAFTERS = ("none", *WITHOUT_QUERIES, *(f"standalone, {name}" for name in WITHOUT_QUERIES), *TEXT_DRAFTERS)
DRAFTERS += (PACED, *KINDS, *COMBINED, *SPECULATED)
HEAD_DRAFTS = tuple(f"{kind}, streaming" for kind in HEADS)
# Drafters whose q is p, and those whose tokens in rejection mode the reference knows.
SEE_ALL = ("full", "standalone, full")
REFERENCED = ("none", *SEE_ALL)
# In rejection mode, what these rounds draw depends on the batch that they are for.
BY_BATCH = (PACED, "cache", "retrieval", *COMBINED)


def counted(vocab_size: int) -> NGramTable:
    """A table of what follows what in random text."""
    rng, table = random.Random(vocab_size), NGramTable(2)
    table.learn([rng.randrange(vocab_size) for _ in range(400)])
    return table


class World(Protocol):
    """A model, and what it gives for a text without any cache."""

    model: Any
    # Of the entries of every cache.
    kv_dtype: torch.dtype
    # Beside the drafters that work in every world.
    drafters: tuple[str, ...]

    def next_logits(self, text: list[int]) -> torch.Tensor: ...


@dataclass(frozen=True)
class Scenario:
    """A random batch: prompts of any lengths with limits, stops, sampling and ids of their own, and a drafter."""

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
        """Return what the reference emits behind each prompt, stops aside: in rejection mode for drafters that see all
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

    def run(
        self, world: World, n_slots: int, futures: list[list[int]], order: list[int], repeats: int = 1
    ) -> list[GenerateOutput]:
        """The outputs with the prompts in that order; a repeated run finds rows that still hold their prompt."""
        room = max(len(p) + n for p, n in zip(self.prompts, self.limits, strict=True))
        room += self.gamma + 1 + self.spare_room
        cache = FullKVCache(world.model.config, n_slots, room, dtype=world.kv_dtype)
        runner = ModelRunner(world.model, cache, self.prefill_chunk)
        paced = self.drafter == PACED
        drafter = None if paced else self._scheduled(self.drafter, runner, room, futures)
        pacing = self._random_pacing(world, runner, room, futures) if paced else None
        own = {"max_new_tokens": self.limits, "sampling": self.samplings, "request_ids": self.ids}
        own |= {"prompts": self.prompts, "stop_tokens": self.stops}
        ordered = {name: [values[i] for i in order] for name, values in own.items()}
        common = {"drafter": drafter, "pacing": pacing, "verification": self.mode}
        return [generate_selecting(runner, **ordered, **common) for _ in range(repeats)]

    def _random_pacing(self, world: World, runner: ModelRunner, room: int, futures: list[list[int]]) -> RandomPacing:
        rng = random.Random(room)
        kinds = rng.sample([kind for kind in (*DRAFTERS, *world.drafters) if kind not in ("none", PACED)], 3)
        return RandomPacing([self._scheduled(kind, runner, room, futures) for kind in kinds], self.gamma, rng)

    def _scheduled(self, kind: str, runner: ModelRunner, room: int, futures: list[list[int]]):
        drafter = self._drafter(kind, runner, room, futures)
        return drafter and scheduled(drafter, self.schedule, runner.cache.max_batch)

    def _drafter(self, kind: str, runner: ModelRunner, room: int, futures: list[list[int]]):
        config, n_slots, dtype = runner.model.config, runner.cache.max_batch, runner.cache.keys.dtype
        if kind == "none":
            return None
        if kind in TEXT_DRAFTERS:
            return TEXT_DRAFTERS[kind](runner, self.gamma)
        if kind == "medusa":
            return Medusa(runner, random_medusa(config), self.gamma)
        if kind in KINDS:
            return Guesses(runner, dict(zip(self.ids, futures, strict=True)), self.gamma, kind, config.vocab_size)
        if kind in COMBINED:
            texts = [make(runner, self.gamma) for make in (Suffix, NGramCache)]
            return Combined(runner, self._drafter(kind.partition(", ")[2], runner, room, futures), texts, 2)
        if kind in SPECULATED:
            outer = self._drafter("streaming", runner, room, futures)
            # Windows that hold a round, less sinks than the outer draft's.
            own = POLICIES["streaming"].make(config, Size(n_slots, room, self.n_sink // 2, self.gamma + 3, dtype))
            inner = {
                "ngram": lambda: NGram(runner, 2),
                "streaming": lambda: SelfSpeculation(runner, own, 2),
                "model": lambda: StandaloneDraft(ModelRunner(runner.model, own, self.prefill_chunk), 2),
            }
            return Speculated(outer, inner[kind.rpartition(", ")[2]]())
        head, _, policy = kind.rpartition(", ")
        if (kind == "standalone, streaming" or head in HEADS) and self.spare_room > 0:
            policy = "streaming, positions in the cache"
        window = max(self.budget - self.n_sink, 2 * self.gamma * (head == "P-EAGLE"))
        size = Size(n_slots, room, self.n_sink, window, dtype)
        if head in HEADS:
            return with_head(head, runner, lambda shape: POLICIES[policy].make(shape, size), self.gamma)
        cache = POLICIES[policy].make(config, size)
        if kind.startswith("standalone"):
            # The target's own weights, over a cache that it has to fill itself.
            return StandaloneDraft(ModelRunner(runner.model, cache, self.prefill_chunk), self.gamma)
        return SelfSpeculation(runner, cache, self.gamma)


class RandomPacing:
    """Any drafter, none of them now and then, with any gamma, from round to round."""

    def __init__(self, drafters: list, max_gamma: int, rng: random.Random) -> None:
        self.drafters, self.max_gamma, self._rng = tuple(drafters), max_gamma, rng
        self.choices: list[Choice] = []

    def choose(self, n_busy: int, n_joining: int, context: float) -> Choice:
        drafter = self._rng.choice([None, *range(len(self.drafters))])
        # Runs of the same choice, so that some drafters fall behind by more than a block.
        if not self.choices or self._rng.random() < 0.5:
            self.choices.append(PLAIN if drafter is None else Choice(drafter, self._rng.randint(0, self.max_gamma)))
        return self.choices[-1]

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        assert choice == self.choices[-1] and all(0 <= n <= choice.gamma for n in accepted)


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
    if scenario.drafter.endswith("full") or (scenario.drafter == "oracle" and scenario.mode != "rejection"):
        assert out.stats.counts.acceptance_rate in (None, 1.0)


def run_scenarios(world: World, seeds: Iterable[int], name: str, record_property: Callable[[str, int], None]) -> None:
    """Run one random scenario per seed in that world, and record how many were held to which standard."""
    counts = Counter(run_scenario(world, seed) for seed in seeds)
    record_property(f"count: {name} scenarios equal to the reference", counts["greedy"] + counts["coupled"])
    record_property(f"count: {name} scenarios in rejection mode, equal in another batch", counts["rejection"])


def run_scenario(world: World, seed: int, referenced: str | None = None) -> str:
    """Run a random scenario in that world and compare it; return its mode. referenced: a drafter to run instead, in
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
    outputs = scenario.run(world, n_slots, futures, given, repeats=2)
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
    return scenario.mode
