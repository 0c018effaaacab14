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
from tests.support import table_law as law
from tests.support.controllers import Scripted
from tests.support.drafters import Drafters
from tests.support.policies import Size
from tests.support.tiny import decode


class Automaton:
    """A grammar of four ids: none follows itself, and 1 follows 2."""

    error = ""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @staticmethod
    def allowed(tokens: Sequence[int]) -> list[int]:
        last = tokens[-1] if tokens else None
        return [1] if last == 2 else [token for token in range(law.VOCAB) if token != last]

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
    runner = ModelRunner(law.TARGET, FullKVCache(law.TARGET.config, n_rows, law.ROOM, dtype=law.TARGET.dtype))
    rng, size = random.Random(gamma), Size(n_rows, law.ROOM, n_kept=1, window=gamma + 1, dtype=law.TARGET.dtype)
    texts = {i: rng.choices(range(law.VOCAB), k=rng.randint(0, law.N_NEW)) for i in range(law.N_REQUESTS)}
    return runner, Drafters(runner, gamma, size, law.DRAFT, law.INNER, texts=texts, dim=law.VOCAB, windows=(None, 3))


def sample(mode: str, kind: str, gamma: int, groups: list[law.Group], n_rows: int, seed: int):
    """Generate a request per group."""
    runner, new_drafter = runner_and_drafters(n_rows, gamma)
    if kind == "changing":
        drafters = [new_drafter(each) for each in ("full", "ngram", "streaming")]
        script = [PLAIN_STEP, RoundChoice(0, 1), RoundChoice(1, 2), RoundChoice(0, gamma), RoundChoice(2, gamma)]
        drafts = {"controller": Scripted(drafters, script)}
    else:
        drafts = {"drafter": new_drafter(kind)}
    sampling = [replace(way, seed=seed) for _, way in groups]
    prompts = [law.PROMPTS[prompt] for prompt, _ in groups]
    how = {"sampling": sampling, "verification": mode, "stop_tokens": [law.STOP]}
    return generate(runner, prompts, max_new_tokens=law.N_NEW, **drafts, **how)


def neighbours_agreement(groups: list[law.Group], outputs: list[list[int]], laws) -> float:
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
    ("rejection", "none", 0, 3, (law.PLAIN,), 101),
    ("rejection", "changing", 3, 5, (law.PLAIN, law.FILTERED), 110),
    ("rejection", "medusa", 3, 3, (law.PLAIN, law.FILTERED), 111),
    ("rejection", "eagle-3, streaming", 3, 3, (law.PLAIN, law.FILTERED), 113),
    ("rejection", "P-EAGLE, streaming", 3, 3, (law.PLAIN, law.EDITED), 115),
    ("rejection", "dflash, whole, streaming: confidence", 3, 3, (law.PLAIN, law.EDITED), 119),
    ("rejection", "dspark, whole, streaming", 3, 3, (law.PLAIN, law.EDITED), 121),
    ("rejection", "speculated, ngram", 3, 3, (law.PLAIN, law.FILTERED), 123),
    ("rejection", "speculated, model", 3, 3, (law.PLAIN, law.FILTERED), 125),
    ("rejection", "full", 3, 3, (law.PLAIN, law.EDITED), 1 << 33),
    ("rejection", "ngram", 3, 3, (law.TYPICAL, law.EDITED), 133),
    ("rejection", "speculated, streaming", 3, 3, (law.PLAIN, law.EDITED), 135),
    ("coupled", "full", 3, 1, (law.TYPICAL, law.EDITED), 137),
    ("rejection", "ngram: heuristic", 2, 3, (law.PLAIN, law.FILTERED), 112),
    ("rejection", "full: confidence", 3, 3, (law.PLAIN, law.FILTERED), 113),
    ("rejection", "streaming: confidence, auto", 3, 25, (law.PLAIN,), 116),
]


@pytest.mark.parametrize("mode,kind,gamma,per_slot,ways,seed", CONFIGURATIONS)
def test_sequences_have_the_targets_joint_law(mode, kind, gamma, per_slot, ways, seed, record_property):
    # What a schedule leaves out is found in more requests.
    n = max(law.N_REQUESTS, 700) if ":" in kind else law.N_REQUESTS
    groups = law.irregular_groups(n, seed, ways)
    out = sample(mode, kind, gamma, groups, n // per_slot, seed)
    p_value, variation, by_chance = law.joint_p_value(groups, out.tokens, law.laws())
    agreement = neighbours_agreement(groups, out.tokens, law.laws())
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


@pytest.mark.parametrize("kind", ["full", "dflash, whole, streaming"])
def test_grammars_mask_the_targets_joint_law(kind):
    """Every second request has a grammar, which also forces tokens; its neighbours keep their laws."""
    n = max(law.N_REQUESTS, 1000)
    runner, new_drafter = runner_and_drafters(n // 4, gamma=3)
    groups = [(i % len(law.PROMPTS), replace(law.PLAIN, seed=i % 2)) for i in range(n)]
    requests = [
        Request(law.PROMPTS[prompt], law.N_NEW, [law.STOP], way, i, grammar=Automaton() if way.seed else None)
        for i, (prompt, way) in enumerate(groups)
    ]
    decode(Decoder(runner, drafter=new_drafter(kind), verification="rejection"), *requests)
    enumerate_ = law.enumerate_sequences
    each = {(p, w): enumerate_(law.PROMPTS[p], w, Automaton.allowed if w.seed else None) for p, w in {*groups}}
    p_value, variation, by_chance = law.joint_p_value(groups, [request.tokens for request in requests], each)
    assert p_value > 1e-4 and variation < 1.3 * by_chance
    forced = sum(request.tokens[:-1].count(2) for request in requests if request.grammar)
    assert forced > 0 and sum(request.counts.accepted for request in requests if request.grammar) >= forced / 2
