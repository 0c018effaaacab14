"""generate() emits whole sequences with the target's probabilities: every sequence enumerated, chi-square."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from engine import Decoder, ModelRunner, Request, generate
from engine.controller import PLAIN as PLAIN_STEP
from engine.controller import RoundChoice
from kv_cache import FullKVCache
from tests.support.controllers import Scripted
from tests.support.drafters import Drafters
from tests.support.policies import Size
from tests.support.table_law import (
    DRAFT,
    EDITED,
    FILTERED,
    INNER,
    N_NEW,
    N_REQUESTS,
    PLAIN,
    PROMPTS,
    ROOM,
    STOP,
    TARGET,
    TYPICAL,
    VOCAB,
    Group,
    enumerate_sequences,
    irregular_groups,
    joint_p_value,
    laws,
)
from tests.support.tiny import decode


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
        """Return tokens that follow, or as after 0 a split of what follows among others."""
        return {2: [1], 0: [2, 1]}.get(self.tokens[-1], []) if self.tokens else []

    def fill(self, masks: Tensor, drafts: Sequence[int]) -> None:
        for n in range(len(drafts) + 1):
            text = [*self.tokens, *drafts[:n]]
            masks[n] = sum(1 << token for token in self.allowed(text))
            if n < len(drafts) and drafts[n] not in self.allowed(text):
                return


def runner_and_drafters(n_rows: int, gamma: int) -> tuple[ModelRunner, Drafters]:
    runner = ModelRunner(TARGET, FullKVCache(TARGET.config, n_rows, ROOM, dtype=TARGET.dtype))
    rng, size = random.Random(gamma), Size(n_rows, ROOM, n_kept=1, window=gamma + 1, dtype=TARGET.dtype)
    texts = {i: rng.choices(range(VOCAB), k=rng.randint(0, N_NEW)) for i in range(N_REQUESTS)}
    return runner, Drafters(runner, gamma, size, DRAFT, INNER, texts=texts, dim=VOCAB, windows=(None, 3))


def sample(mode: str, kind: str, gamma: int, groups: list[Group], n_rows: int, seed: int):
    """Generate a request per group."""
    runner, new_drafter = runner_and_drafters(n_rows, gamma)
    if kind == "changing":
        drafters = [new_drafter(each) for each in ("full", "ngram", "streaming")]
        script = [PLAIN_STEP, RoundChoice(0, 1), RoundChoice(1, 2), RoundChoice(0, gamma), RoundChoice(2, gamma)]
        drafts = {"controller": Scripted(drafters, script)}
    else:
        drafts = {"drafter": new_drafter(kind)}
    sampling = [replace(way, seed=seed) for _, way in groups]
    prompts = [PROMPTS[prompt] for prompt, _ in groups]
    how = {"sampling": sampling, "verification": mode, "stop_tokens": [STOP]}
    return generate(runner, prompts, max_new_tokens=N_NEW, **drafts, **how)


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
    ("rejection", "changing", 3, 5, (PLAIN, FILTERED), 110),
    ("rejection", "medusa", 3, 3, (PLAIN, FILTERED), 111),
    ("rejection", "eagle-3, streaming", 3, 3, (PLAIN, FILTERED), 113),
    ("rejection", "P-EAGLE, streaming", 3, 3, (PLAIN, EDITED), 115),
    ("rejection", "dflash, whole, streaming", 3, 3, (PLAIN, FILTERED), 117),
    ("rejection", "dflash, whole, streaming: confidence", 3, 3, (PLAIN, EDITED), 119),
    ("rejection", "dspark, whole, streaming", 3, 3, (PLAIN, EDITED), 121),
    ("rejection", "speculated, ngram", 3, 3, (PLAIN, FILTERED), 123),
    ("rejection", "speculated, model", 3, 3, (PLAIN, FILTERED), 125),
    ("rejection", "full", 3, 3, (PLAIN, EDITED), 1 << 33),
    ("rejection", "ngram", 3, 3, (TYPICAL, EDITED), 133),
    ("rejection", "speculated, streaming", 3, 3, (PLAIN, EDITED), 135),
    ("coupled", "full", 3, 1, (TYPICAL, EDITED), 137),
    ("rejection", "ngram: heuristic", 2, 3, (PLAIN, FILTERED), 112),
    ("rejection", "full: confidence", 3, 3, (PLAIN, FILTERED), 113),
    ("rejection", "streaming: confidence, auto", 3, 25, (PLAIN,), 116),
]


@pytest.mark.parametrize("mode,kind,gamma,per_slot,ways,seed", CONFIGURATIONS)
def test_sequences_have_the_targets_joint_law(mode, kind, gamma, per_slot, ways, seed, record_property):
    n = max(N_REQUESTS, 700) if ":" in kind else N_REQUESTS  # what a schedule leaves out is found in more of them
    groups = irregular_groups(n, seed, ways)
    out = sample(mode, kind, gamma, groups, n // per_slot, seed)
    p_value, variation, by_chance = joint_p_value(groups, out.tokens, laws())
    agreement = neighbours_agreement(groups, out.tokens, laws())
    record_property("count: joint law, sampled sequences", n)
    record_property(f"p-value: joint law, {mode}, {kind} draft, gamma {gamma}, seed {seed}", p_value)
    record_property("max: joint law, total variation over what chance makes of it", variation / by_chance)
    assert p_value > 1e-4
    assert variation < 1.3 * by_chance
    assert abs(agreement) < 4.5, "requests share their random numbers"
    if gamma:
        assert 0.1 < out.stats.counts.acceptance_rate < 0.95, "too easy a draft, or too hard a one"
    if ":" in kind:
        assert 0 < out.stats.drafted < gamma * out.stats.counts.rounds, "a schedule that leaves nothing out"


@pytest.mark.parametrize("kind", ["full", "dflash, whole, streaming", "speculated, streaming"])
def test_grammars_mask_the_targets_joint_law(kind):
    """Every second request has a grammar, which also forces tokens; its neighbours keep their laws."""
    n = max(N_REQUESTS, 1000)
    runner, new_drafter = runner_and_drafters(n // 4, gamma=3)
    groups = [(i % len(PROMPTS), replace(PLAIN, seed=i % 2)) for i in range(n)]
    requests = [
        Request(PROMPTS[prompt], N_NEW, [STOP], way, i, grammar=Automaton() if way.seed else None)
        for i, (prompt, way) in enumerate(groups)
    ]
    decode(Decoder(runner, drafter=new_drafter(kind), verification="rejection"), *requests)
    each = {
        (p, way): enumerate_sequences(PROMPTS[p], way, Automaton.allowed if way.seed else None) for p, way in {*groups}
    }
    p_value, variation, by_chance = joint_p_value(groups, [request.tokens for request in requests], each)
    assert p_value > 1e-4 and variation < 1.3 * by_chance
    forced = sum(request.tokens[:-1].count(2) for request in requests if request.grammar)
    assert forced > 0 and sum(request.counts.accepted for request in requests if request.grammar) >= forced / 2
