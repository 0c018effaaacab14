"""Drafting with heads: their proposals are those of the head alone over the target's states, without rounds or rows."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from common.errors import ConfigError
from engine import Decoder, ModelRunner, Request, SamplingParams, SelfSpeculation, generate
from engine.controller import PLAIN, RoundChoice
from engine.drafters.combined import Combined
from engine.drafters.dflash import DFlash
from engine.drafters.eagle import Eagle
from engine.drafters.medusa import Medusa
from engine.drafters.suffix import Suffix
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.quantized import QuantizedKVCache
from models.heads.dflash import DFlashHead
from models.heads.medusa import MedusaHeads
from tests.support.controllers import Scripted
from tests.support.drafters import watch
from tests.support.heads import MASK, random_dflash, random_eagle, random_medusa, with_head
from tests.support.policies import POLICIES, Size
from tests.support.tiny import TINY, decode, full_cache, random_prompts, tiny_model

DEEP = replace(TINY, n_layer=7)
MODEL = tiny_model(DEEP)
LENGTHS = [1, 9, 30, 2, 17]
LIMITS = [25, 9, 18, 30, 12]
GAMMA, SLOTS = 3, 3
HOT = [SamplingParams(temperature=16.0, seed=seed) for seed in range(len(LENGTHS))]  # so that much is accepted
HEAD, OTHER, TARGET, MOST = 0, 1, 2, 2 * GAMMA
CHANGING = [RoundChoice(HEAD, gamma) for gamma in (3, 1)] + [PLAIN, PLAIN, RoundChoice(OTHER, MOST)]
CHANGING += [RoundChoice(HEAD, 3), RoundChoice(TARGET, MOST), RoundChoice(HEAD, 0), RoundChoice(HEAD, 3)]
CHANGING += [RoundChoice(OTHER, 2), RoundChoice(HEAD, 2)]


@pytest.fixture(autouse=True)
def few_states_are_kept(monkeypatch):
    """The target recomputes some states of missed rounds, but not all."""
    monkeypatch.setattr("engine.drafters.hidden_states.KEPT", 3)
    monkeypatch.setattr("engine.drafters.hidden_states.LONGEST_BLOCK", MOST + 1)


def states_of(text: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Return the target's states `[T, ...]` of a text alone."""
    positions = torch.arange(len(text))[None]
    return MODEL.hidden_states(torch.tensor([text]), positions, full_cache(MODEL, 1, len(text)), layers)[1][0]


def run(drafter, changing: bool) -> list[list[int]]:
    """Return prompts with their answers, from rows that are refilled; `changing`: prompts run in parts, text drafts
    stand next to the head, and some rounds use another head, which drafts more and reads other layers, or the target,
    whose drafts are accepted."""
    prompts, how = random_prompts(LENGTHS), {"max_new_tokens": LIMITS, "sampling": HOT, "verification": "rejection"}
    runner, drafts = drafter._target, {"drafter": drafter}
    if changing:
        beside = Combined(runner, drafter, [Suffix(runner, GAMMA)], least_match=2)
        other = with_head("dflash", runner, lambda config: FullKVCache(config, SLOTS, 70, dtype=torch.float64), MOST)
        target = SelfSpeculation(runner, full_cache(MODEL, SLOTS), MOST)
        drafts = {"controller": Scripted([beside, other, target], CHANGING), "prefill_tokens": 8}
    with torch.inference_mode():
        out = generate(runner, prompts, **how, **drafts)
    assert 0.2 < out.stats.counts.acceptance_rate < 0.97, "or rollbacks are all alike"
    return [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]


CACHES = {
    "full": lambda shape: FullKVCache(shape, SLOTS, 70, dtype=torch.float64),
    "streaming": lambda shape: StreamingKVCache(shape, SLOTS, 70, 2, dtype=torch.float64),
    "positions in the cache": lambda shape: StreamingKVCache(shape, SLOTS, 70, 4, "cpu", torch.float64, True),
}


def logits_of_drafts(head, states: torch.Tensor, text: list[int], drafts: list[int]) -> Iterator[torch.Tensor]:
    """Yield the logits `[V]` of each draft after a text, of whose tokens but the last these are the target's states."""
    if isinstance(head, MedusaHeads):
        yield from (head[i](states[-1]) for i in range(len(drafts)))
        return
    n, fused, cache = len(states), head.fused(states)[None], FullKVCache(head.body.config, 1, 70, dtype=torch.float64)
    at = torch.arange(n + len(drafts) + 1)[None]
    if isinstance(head, DFlashHead):
        head.remember(fused, at[:, :n], cache)
        block = at[:, n : n + len(drafts) + (not head.shape.drafts_anchor)]
        drafting, memory = head.draft(torch.tensor(text[-1:]), block, cache), None
        for i, before in enumerate([text[-1], *drafts[:-1]]):
            known = head.draft_logits(drafting[:, i])
            if head.chain:
                known, memory = head.chain(known, drafting[:, i], torch.tensor([before]), memory)
            yield head.of_target(known)[0]
        return
    state = head.advance(fused, torch.tensor([text[1:]]), at[:, :n], cache)[:, -1:]
    for i, draft in enumerate(drafts, start=n):
        yield head.logits(state)[0, 0]
        if head.mask_hidden is None:
            state = head.advance(state, torch.tensor([[draft]]), at[:, i : i + 1], cache)
        else:
            state = head.advance(head.fused(head.mask_hidden), torch.tensor([[MASK]]), at[:, i : i + 1], cache)


@pytest.mark.parametrize(
    "kind,cache,changing,options",
    [
        ("medusa", None, True, {}),
        ("eagle-1", "full", True, {}),
        ("eagle-3", "full", False, {}),
        ("eagle-3", "streaming", True, {}),
        ("eagle-1", "positions in the cache", True, {}),
        ("P-EAGLE", "streaming", True, {}),
        ("P-EAGLE", "positions in the cache", True, {}),
        ("dflash", "full", False, {}),
        ("dflash, whole", "full", True, {"drafts_anchor": True}),
        ("dflash", "streaming", True, {"windows": (9, None)}),
        ("dflash, whole", "streaming", False, {"windows": (4, 7), "is_causal": False}),
        ("dflash", "positions in the cache", True, {"windows": (None, 5), "is_anchored": False}),
        ("dspark, whole", "streaming", True, {}),
        ("dspark, whole", "full", False, {"drafts_anchor": False, "markov_kind": "gated"}),
        ("dflash 2", "streaming", True, {}),
    ],
)
def test_drafts_are_those_of_the_head_over_the_targets_own_states(kind, cache, changing, options):
    """Over a cache that keeps everything. What heads compute is compared with others' code in tests/models/heads."""
    runner = ModelRunner(MODEL, full_cache(MODEL, SLOTS), prefill_chunk=8)
    if kind == "medusa":
        head = random_medusa(DEEP)
        drafter = Medusa(runner, head, GAMMA)
    else:
        drafter = with_head(kind, runner, CACHES[cache], GAMMA, **options)
        head = drafter._head
    seen = watch(drafter)
    texts, compared = run(drafter, changing), 0
    states = [states_of(text, drafter.hidden_buffer.layers) for text in texts]
    for request, length, current, drafts, probs in seen:
        text = texts[request][: length + 1]
        if length < len(texts[request]) - 1:  # else the row has ended, and fills a place
            assert text[-1] == current
            logits = torch.stack([*logits_of_drafts(head, states[request][:length], text, drafts)])
            drawn = probs.amax(dim=-1) < 1  # else copied from the text
            wanted = (logits / HOT[0].temperature).softmax(-1)
            torch.testing.assert_close(probs[drawn], wanted[drawn], rtol=0, atol=1e-5)
            compared += int(drawn.sum())
    assert compared > 40


def test_a_head_that_comes_back_runs_the_target_over_no_answer(monkeypatch):
    monkeypatch.setattr("engine.drafters.hidden_states.KEPT", 64)
    runner, prompts = ModelRunner(MODEL, full_cache(MODEL, SLOTS), prefill_chunk=8), random_prompts(LENGTHS)
    monkeypatch.setattr(runner, "recompute", recompute := Mock(wraps=runner.recompute))
    head = random_dflash(DEEP)
    run(DFlash(runner, head, CACHES["full"](head.body.config), GAMMA), changing=True)
    ran = [(text, at.stop) for _, text, at, _ in (call.args for call in recompute.call_args_list)]
    assert ran and all(text[:end] in [prompt[:end] for prompt in prompts] for text, end in ran)


@pytest.mark.parametrize("kind", [Medusa, Eagle, DFlash])
def test_a_prompt_that_comes_again_is_continued_from_its_own_state(kind):
    """Its row holds it whole, and the slots have states of the first answer."""
    runner = ModelRunner(MODEL, full_cache(MODEL, 1))
    head = {Medusa: random_medusa, Eagle: random_eagle, DFlash: random_dflash}[kind](DEEP)
    cache = () if kind is Medusa else (FullKVCache(head.body.config, 1, 70, dtype=torch.float64),)
    drafter = kind(runner, head, *cache, GAMMA)
    seen = watch(drafter)
    (prompt,) = random_prompts([9])

    class OnceForEach(Scripted):
        def choose(self, n_busy: int, n_joining: int, context: float) -> RoundChoice:
            return RoundChoice(0, GAMMA) if context == len(prompt) else PLAIN

    decoder = Decoder(
        runner, OnceForEach([drafter], [RoundChoice(0, GAMMA)]), reuses="prefixes", verification="rejection"
    )
    requests = [Request(prompt, 30, sampling=HOT[0], id=0, index=i) for i in range(2)]
    for request in requests:
        decode(decoder, request)
    first, again = seen
    assert requests[1].n_reused == len(prompt) and first[:4] == again[:4]
    torch.testing.assert_close(first[4], again[4], rtol=0, atol=1e-12)


def test_heads_that_do_not_fit_a_round_are_refused():
    heads = random_medusa(DEEP, n_head=2)
    runner = ModelRunner(MODEL, full_cache(MODEL, SLOTS))
    with pytest.raises(ConfigError, match="drafts fewer tokens than gamma"):
        Medusa(runner, heads, 3)
    head = random_eagle(DEEP)
    with pytest.raises(ConfigError, match="cache in 4 bits"):
        block = random_dflash(DEEP, windows=(4, None))
        DFlash(runner, block, QuantizedKVCache(block.body.config, SLOTS, 20, dtype=torch.float64), 3)
    size = Size(SLOTS, longest=20, n_kept=4, window=6, dtype=torch.float64)
    for cache in (policy.make(head.body.config, size) for policy in POLICIES.values() if policy.sample.selects):
        with pytest.raises(ConfigError, match="cannot select entries"):
            Eagle(runner, head, cache, 3)
