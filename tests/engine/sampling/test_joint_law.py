"""generate() emits whole sequences with the target's probabilities: every sequence enumerated, chi-square."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from engine import Decoder, ModelRunner, Request, SelfSpeculation, StandaloneDraft, generate
from engine.drafters import Drafter
from engine.drafters.medusa import Medusa
from engine.drafters.ngram import NGram
from engine.drafters.saved_text import SavedText
from engine.drafters.speculated import Speculated
from engine.pacing import PLAIN as PLAIN_STEP
from engine.pacing import Choice
from engine.sampling.distribution import SamplingParams, logits_to_probs
from kv_cache import FullKVCache, StreamingKVCache
from tests.support.block_heads import HEADS, with_head
from tests.support.edit_cases import edited
from tests.support.pacings import Scripted, scheduled
from tests.support.published_heads import random_medusa
from tests.support.statistics_tools import chi_square, total_variation, upper_tail
from tests.support.tiny import decode
from tests.support.witness import FakeConfig, FakeModel

VOCAB, N_NEW, STOP = 4, 4, 3
ROOM = 16
N_REQUESTS = 20_000 if "LAW_PAIRS" in os.environ else 1_000
PROMPTS = ([2], [1, 0, 3, 1, 1, 2], [0, 1, 0])
PLAIN = SamplingParams(temperature=0.9)
FILTERED = SamplingParams(temperature=1.2, top_k=3, top_p=0.95)
TYPICAL = SamplingParams(temperature=1.5, min_p=0.1, typical_p=0.8)
EDITS = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 1.5, "logit_bias": {2: 1.0}}
EDITED = SamplingParams(temperature=0.9, **EDITS, min_tokens=2, bad_words=[[0, 1], [2, 2, 0], [1, 3]])


class TableModel(FakeModel):
    """A model whose logits are looked up by a code of all that a query sees: each context has a law of its own."""

    config = FakeConfig(VOCAB, max_context=ROOM)
    dtype = torch.float64

    def __init__(self, seed: int, near: TableModel | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.codes = torch.randint(1 << 40, (ROOM, VOCAB), generator=generator)
        self.table = 1.5 * torch.randn(4099, VOCAB, generator=generator, dtype=torch.float64)
        if near:
            # Its laws differ everywhere, but are alike where it sees the same context.
            self.codes, self.table = near.codes, near.table + 0.7 * self.table

    def hidden(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        held, at, visible = self.look(tokens, positions, cache)
        return self.table[(self.codes[at, held] * visible).sum(-1) % len(self.table)]

    def hidden_states(self, tokens: Tensor, positions: Tensor, cache, layers=()) -> tuple[Tensor, Tensor]:
        """Return hidden states, which are the logits, also as the inputs that a head reads."""
        hidden = self.hidden(tokens, positions, cache)
        return hidden, hidden.repeat(1, 1, max(1, len(layers)))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits_after(self, tokens: list[int]) -> Tensor:
        """Return the logits behind a token list, without a cache or a batch."""
        return self.table[sum(int(self.codes[i, token]) for i, token in enumerate(tokens)) % len(self.table)]


Group = tuple[int, SamplingParams]  # a prompt's index, and how it is sampled
TARGET = TableModel(seed=1)
DRAFT = TableModel(seed=2, near=TARGET)
INNER = TableModel(seed=3, near=DRAFT)


class Automaton:
    """A grammar of four ids: none follows itself, and 1 follows 2."""

    error = ""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @staticmethod
    def allowed(tokens: Sequence[int]) -> list[int]:
        last = tokens[-1] if tokens else None
        return [1] if last == 2 else [token for token in range(VOCAB) if token != last]

    def advance(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def forced(self) -> list[int]:
        """Return tokens that follow, or as behind 0 a split of what follows among others."""
        return {2: [1], 0: [2, 1]}.get(self.tokens[-1], []) if self.tokens else []

    def fill(self, masks: Tensor, drafts: Sequence[int]) -> None:
        for n in range(len(drafts) + 1):
            text = [*self.tokens, *drafts[:n]]
            masks[n] = sum(1 << token for token in self.allowed(text))
            if n < len(drafts) and drafts[n] not in self.allowed(text):
                return


def enumerate_sequences(prompt: list[int], params: SamplingParams, masked=False) -> dict[tuple[int, ...], float]:
    """Every output that decoding can give, with its probability."""
    next_logits = edited(TARGET.logits_after, prompt, params, [STOP])
    complete, open_ends = {}, {(): 1.0}
    while open_ends:
        tokens, mass = open_ends.popitem()
        logits = next_logits([*prompt, *tokens])
        if masked:
            excluded = [token for token in range(VOCAB) if token not in Automaton.allowed(tokens)]
            logits = logits.index_fill(0, torch.tensor(excluded, dtype=torch.int64), -math.inf)
        law = logits_to_probs(logits, params).tolist()
        for token, probability in enumerate(law):
            longer = (*tokens, token)
            ended = token == STOP or len(longer) == N_NEW
            (complete if ended else open_ends)[longer] = mass * probability
    return complete


@pytest.fixture(scope="module")
def laws():
    """The enumerated law of each prompt and each way to sample."""
    ways = PLAIN, FILTERED, TYPICAL, EDITED
    return {(i, s): enumerate_sequences(p, s) for i, p in enumerate(PROMPTS) for s in ways}


def make_drafter(kind: str, runner: ModelRunner, gamma: int) -> Drafter | None:
    """Make a drafter of that kind; behind a colon stands its schedule."""
    n_slots, config, dtype = runner.cache.max_batch, TARGET.config, TARGET.dtype
    kind, _, schedule = kind.partition(": ")
    if schedule:
        return scheduled(make_drafter(kind, runner, gamma), schedule, n_slots)
    if kind == "none":
        return None
    if kind == "ngram":
        return NGram(runner, gamma)
    if kind == "saved text":
        rng = random.Random(gamma)
        texts = {i: rng.choices(range(VOCAB), k=rng.randint(0, N_NEW)) for i in range(N_REQUESTS)}
        return SavedText(runner, texts, gamma)
    if kind == "medusa":
        return Medusa(runner, random_medusa(config, VOCAB), gamma)
    if kind in HEADS:
        options = {"windows": (None, 3)} if kind.startswith("dflash") else {}
        new_cache = partial(StreamingKVCache, max_batch=n_slots, budget=2 * gamma + 1, n_sink=1, dtype=dtype)
        return with_head(kind, runner, new_cache, gamma, dim=VOCAB, **options)
    if kind.startswith("speculated"):
        middle, inner = (StreamingKVCache(config, n_slots, gamma + 1 + n, 1, dtype=dtype) for n in (3, 1))
        outer, own = SelfSpeculation(runner, middle, gamma, DRAFT), SelfSpeculation(runner, inner, 2, INNER)
        small = StreamingKVCache(config, n_slots, gamma + 2, 1, dtype=dtype)
        inners = {"streaming": own, "ngram": NGram(runner, 2), "model": StandaloneDraft(ModelRunner(INNER, small), 2)}
        return Speculated(outer, inners[kind.rpartition(", ")[2]])
    if kind == "full":
        return SelfSpeculation(runner, FullKVCache(config, n_slots, ROOM, dtype=dtype), gamma, DRAFT)
    return SelfSpeculation(runner, StreamingKVCache(config, n_slots, gamma + 2, 1, dtype=dtype), gamma, DRAFT)


def sample(mode: str, kind: str, gamma: int, groups: list[Group], n_slots: int, seed: int):
    """Generate a request per group."""
    runner = ModelRunner(TARGET, FullKVCache(TARGET.config, n_slots, ROOM, dtype=TARGET.dtype))
    pacing = None
    if kind == "changing":
        drafters = [make_drafter(one, runner, gamma) for one in ("full", "ngram", "streaming")]
        pacing = Scripted(drafters, [PLAIN_STEP, Choice(0, 1), Choice(1, 2), Choice(0, gamma), Choice(2, gamma)])
    drafts = {"pacing": pacing} if pacing else {"drafter": make_drafter(kind, runner, gamma)}
    sampling = [replace(way, seed=seed) for _, way in groups]
    prompts = [PROMPTS[prompt] for prompt, _ in groups]
    how = {"sampling": sampling, "verification": mode, "stop_tokens": [STOP]}
    return generate(runner, prompts, max_new_tokens=N_NEW, **drafts, **how)


def irregular_groups(n: int, seed: int, ways: tuple[SamplingParams, ...]) -> list[Group]:
    """Prompts and ways to sample, interleaved in runs of 1 to 4, so that many neighbours have one law."""
    rng, groups = random.Random(seed), []
    while len(groups) < n:
        groups += [(rng.randrange(len(PROMPTS)), rng.choice(ways))] * rng.randint(1, 4)
    return groups[:n]


def joint_p_value(groups: list[Group], outputs: list[list[int]], laws) -> tuple[float, float, float]:
    """Return the p-value and the total variation of all groups together, and the variation that chance alone gives."""
    statistic, freedom, variation, by_chance = 0.0, 0, 0.0, 0.0
    for group, law in laws.items():
        seen = Counter(tuple(tokens) for other, tokens in zip(groups, outputs, strict=True) if other == group)
        if n := seen.total():
            assert seen.keys() <= law.keys(), "a sequence of another length, or beyond its stop token"
            counts = torch.tensor([seen[tokens] for tokens in law])
            probs = torch.tensor(list(law.values()), dtype=torch.float64)
            part, degrees = chi_square(counts, probs * n)
            statistic, freedom = statistic + part, freedom + degrees
            share = n / len(groups)
            variation += share * total_variation(counts, probs)
            # The mean of |count - expected| / n of a binomial count is about sqrt(2 p (1 - p) / (pi n)).
            by_chance += share * float((2 * probs * (1 - probs) / (math.pi * n)).sqrt().sum()) / 2
    return upper_tail(statistic, freedom), variation, by_chance


def neighbours_agreement(groups: list[Group], outputs: list[list[int]], laws) -> float:
    """By how many standard deviations more (or fewer) neighbours of one law agree than independent ones do."""
    surplus, variance = 0.0, 0.0
    for i in range(1, len(groups)):
        if groups[i] == groups[i - 1]:
            chance = sum(p * p for p in laws[groups[i]].values())
            surplus += (outputs[i] == outputs[i - 1]) - chance
            variance += chance * (1 - chance)
    return surplus / math.sqrt(variance)


CONFIGURATIONS = [
    # mode, drafter, gamma, prompts per slot, ways to sample, seed
    ("rejection", "none", 0, 3, (PLAIN,), 101),
    ("rejection", "streaming", 2, 4, (PLAIN,), 103),
    ("rejection", "full", 3, 3, (PLAIN,), 1 << 33),
    ("rejection", "ngram", 2, 3, (PLAIN, FILTERED), 106),
    ("rejection", "saved text", 2, 3, (PLAIN,), 109),
    ("rejection", "changing", 3, 5, (PLAIN, FILTERED), 110),
    ("rejection", "medusa", 3, 3, (PLAIN, FILTERED), 111),
    ("rejection", "eagle-3", 3, 3, (PLAIN, FILTERED), 113),
    ("rejection", "P-EAGLE", 3, 3, (PLAIN, EDITED), 115),
    ("rejection", "dflash, whole", 3, 3, (PLAIN, FILTERED), 117),
    ("rejection", "dflash, whole: confidence", 3, 3, (PLAIN, EDITED), 119),
    ("rejection", "speculated, streaming", 3, 3, (PLAIN, FILTERED), 121),
    ("rejection", "speculated, ngram", 3, 3, (PLAIN, FILTERED), 123),
    ("rejection", "speculated, model", 3, 3, (PLAIN, FILTERED), 125),
    ("coupled", "none", 0, 1, (PLAIN, FILTERED), 107),
    ("rejection", "full", 3, 3, (PLAIN, EDITED), 131),
    ("rejection", "ngram", 3, 3, (TYPICAL, EDITED), 133),
    ("rejection", "speculated, streaming", 3, 3, (PLAIN, EDITED), 135),
    ("coupled", "full", 3, 1, (TYPICAL, EDITED), 137),
    ("rejection", "ngram: heuristic", 2, 3, (PLAIN, FILTERED), 112),
    ("rejection", "full: confidence", 3, 3, (PLAIN, FILTERED), 113),
    ("rejection", "streaming: confidence, auto", 3, 25, (PLAIN,), 116),
]


@pytest.mark.parametrize("mode,kind,gamma,per_slot,ways,seed", CONFIGURATIONS)
def test_sequences_have_the_targets_joint_law(laws, mode, kind, gamma, per_slot, ways, seed, record_property):
    groups = irregular_groups(N_REQUESTS, seed, ways)
    out = sample(mode, kind, gamma, groups, N_REQUESTS // per_slot, seed)
    p_value, variation, by_chance = joint_p_value(groups, out.tokens, laws)
    agreement = neighbours_agreement(groups, out.tokens, laws)
    record_property("count: joint law, sampled sequences", N_REQUESTS)
    record_property(f"p-value: joint law, {mode}, {kind} draft, gamma {gamma}, seed {seed}", p_value)
    record_property("max: joint law, total variation over what chance makes of it", variation / by_chance)
    assert p_value > 1e-4
    assert variation < 1.3 * by_chance
    assert abs(agreement) < 4.5, "requests share their random numbers"
    if gamma:
        assert 0.1 < out.stats.counts.acceptance_rate < 0.95, "too easy a draft, or too hard a one"
    if ":" in kind:
        assert 0 < out.stats.drafted < gamma * out.stats.counts.rounds, "a schedule that leaves nothing out"


@pytest.mark.parametrize(
    "kind,gamma", [("full", 3), ("streaming", 2), ("ngram", 3), ("dflash, whole", 3), ("speculated, streaming", 3)]
)
def test_grammars_mask_the_targets_joint_law(kind, gamma):
    """Every second request has a grammar, which also forces tokens; its neighbours keep their laws."""
    n = N_REQUESTS
    runner = ModelRunner(TARGET, FullKVCache(TARGET.config, n // 4, ROOM, dtype=TARGET.dtype))
    groups = [(i % len(PROMPTS), replace(PLAIN, seed=i % 2)) for i in range(n)]
    requests = [
        Request(PROMPTS[prompt], N_NEW, [STOP], way, i, grammar=Automaton() if way.seed else None)
        for i, (prompt, way) in enumerate(groups)
    ]
    drafter = make_drafter(kind, runner, gamma)
    decode(Decoder(runner, drafter=drafter, verification="rejection"), *requests)
    laws = {(p, way): enumerate_sequences(PROMPTS[p], way, bool(way.seed)) for p, way in {*groups}}
    p_value, variation, by_chance = joint_p_value(groups, [request.tokens for request in requests], laws)
    assert p_value > 1e-4 and variation < 1.3 * by_chance
    forced = sum(request.tokens[:-1].count(2) for request in requests if request.grammar)
    assert forced > 0 and sum(request.counts.accepted for request in requests if request.grammar) >= forced / 2
