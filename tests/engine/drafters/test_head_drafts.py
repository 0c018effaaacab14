"""Drafting with heads: their proposals are those of plain heads over the target's states."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from common.errors import ConfigError
from engine import Decoder, ModelRunner, Request, SamplingParams, generate
from engine.controller import PLAIN, RoundChoice
from engine.drafters.combined import Combined
from engine.drafters.dflash import DFlash
from engine.drafters.eagle import Eagle
from engine.drafters.hidden_states import HiddenStateBuffer
from engine.drafters.medusa import Medusa
from engine.drafters.suffix import Suffix
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.quantized import QuantizedKVCache
from models.heads.loading import find_head
from tests.support.block_heads import MASK, plain_block, whole_dflash, with_head
from tests.support.controllers import Scripted
from tests.support.policies import POLICIES, Size
from tests.support.published_heads import (
    PlainEagle,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    plain_medusa,
    random_dflash,
    random_eagle,
    random_medusa,
    save_head,
)
from tests.support.tiny import TINY, continue_by_recomputing, decode, full_cache, random_prompts, tiny_model

DEEP = replace(TINY, n_layer=7)
MODEL = tiny_model(DEEP)
LENGTHS = [1, 9, 30, 2, 17]
LIMITS = [25, 9, 18, 30, 12]
GAMMA, SLOTS = 3, 3
HOT = [SamplingParams(temperature=16.0, seed=seed) for seed in range(len(LENGTHS))]  # so that much is accepted
HEAD, OTHER, MOST = 0, 1, 2 * GAMMA
CHANGING = [RoundChoice(HEAD, gamma) for gamma in (3, 1)] + [PLAIN, PLAIN, RoundChoice(OTHER, MOST)]
CHANGING += [RoundChoice(HEAD, 3), RoundChoice(HEAD, 0), RoundChoice(OTHER, 2), RoundChoice(HEAD, 2)]


@pytest.fixture(autouse=True)
def few_states_are_kept(monkeypatch):
    """The target recomputes some states of missed rounds, but not all."""
    monkeypatch.setattr("engine.drafters.hidden_states.KEPT", 3)
    monkeypatch.setattr("engine.drafters.hidden_states.LONGEST_BLOCK", MOST + 1)


def states_of(text: list[int], layers: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the target's states `[T, ...]` of a text alone."""
    positions = torch.arange(len(text))[None]
    return MODEL.hidden_states(torch.tensor([text]), positions, full_cache(MODEL, 1, len(text)), layers)[1][0]


def watched(kind: type, *arguments):
    """Return a drafter, and a list of its proposals: request, length, current token, drafts, their distributions."""
    seen: list[tuple[int, int, int, list[int], torch.Tensor]] = []

    class Watched(kind):
        requests: ClassVar[dict[int, int]] = {}

        def follow(self, rows):
            super().follow(rows)
            self.requests |= {row: request for row, request, *_ in rows}

        def propose(self, batch, verification, gamma):
            drafts = super().propose(batch, verification, gamma)
            for place, row in enumerate(batch.rows.tolist()):
                if gamma and row in self.requests and not batch.idle[place]:
                    state = self.requests[row], int(batch.lengths[place]), int(batch.current[place])
                    seen.append((*state, drafts.tokens[place].tolist(), drafts.probs[place]))
            return drafts

    return Watched(*arguments), seen


def run(drafter, changing: bool) -> list[list[int]]:
    """Return prompts with their answers, from rows that are refilled; `changing`: prompts run in parts, text drafts
    stand next to the head, and some rounds use another head, which drafts more and reads other layers."""
    prompts, how = random_prompts(LENGTHS), {"max_new_tokens": LIMITS, "sampling": HOT, "verification": "rejection"}
    runner, drafts = drafter._target, {"drafter": drafter}
    if changing:
        beside = Combined(runner, drafter, [Suffix(runner, GAMMA)], least_match=2)
        other = with_head("dflash", runner, lambda config: FullKVCache(config, SLOTS, 70, dtype=torch.float64), MOST)
        drafts = {"controller": Scripted([beside, other], CHANGING), "prefill_tokens": 8}
    with torch.inference_mode():
        out = generate(runner, prompts, **how, **drafts)
    assert 0.2 < out.stats.counts.acceptance_rate < 0.97, "or rollbacks are all alike"
    return [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]


def check_proposals(texts, seen, expected) -> None:
    """expected: the logits of each draft, by a request's text, the length known and the drafts before it."""
    compared = 0
    for request, length, current, drafts, probs in seen:
        if length < len(texts[request]) - 1:  # else the row has ended, and fills a place
            assert texts[request][length] == current
            logits = torch.stack(list(expected(request, length, drafts)))
            drawn = probs.amax(dim=-1) < 1  # else copied from the text
            probs_of_head = (logits / HOT[0].temperature).softmax(-1)
            torch.testing.assert_close(probs[drawn], probs_of_head[drawn], rtol=0, atol=1e-5)
            compared += int(drawn.sum())
    assert compared > 40


@pytest.mark.parametrize("changing", [False, True])
def test_medusas_drafts_come_from_the_last_accepted_tokens_state(tmp_path, changing):
    tensors = medusa_tensors(DEEP)
    path = save_head(tmp_path, tensors, {"medusa_num_layers": 2}, "medusa_lm_head.safetensors")
    heads = find_head(path, "medusa", DEEP).load(device="cpu", dtype=torch.float64)
    drafter, seen = watched(Medusa, ModelRunner(MODEL, full_cache(MODEL, SLOTS), prefill_chunk=8), heads, GAMMA)
    texts = run(drafter, changing)
    states = [states_of(text) for text in texts]
    check_proposals(
        texts, seen, lambda r, n, drafts: [plain_medusa(tensors, i, states[r][n - 1]) for i in range(len(drafts))]
    )


CACHES = {
    "full": lambda shape: FullKVCache(shape, SLOTS, 70, dtype=torch.float64),
    "streaming": lambda shape: StreamingKVCache(shape, SLOTS, 70, 2, dtype=torch.float64),
    "positions in the cache": lambda shape: StreamingKVCache(shape, SLOTS, 70, 4, "cpu", torch.float64, True),
}


@pytest.mark.parametrize(
    "version,cache,changing",
    [
        (1, "full", False),
        (1, "full", True),
        (3, "full", False),
        (3, "streaming", True),
        (1, "positions in the cache", True),
        (3, "positions in the cache", False),
        ("parallel", "full", False),
        ("parallel", "streaming", True),
        ("parallel", "positions in the cache", True),
    ],
)
def test_eagles_drafts_go_on_from_the_targets_own_states(tmp_path, version, cache, changing):
    """Drafts, over a cache that keeps everything, equal those of a head that ran over the target's states alone."""
    is_parallel, version = version == "parallel", 1 if version == 1 else 3
    options = {"bias": True} if version == 1 else {"n_draft": 40}
    tensors = eagle_tensors(DEEP, version, **options)
    values = {} if version == 1 else {"draft_vocab_size": 40}
    if is_parallel:
        tensors["mask_hidden"] = torch.randn(1, 1, 3 * DEEP.dim, dtype=torch.float64)
        values["mask_token_id"] = MASK
    path = save_head(tmp_path, tensors, eagle_config(DEEP, version, **values))
    head = find_head(path, "eagle", DEEP).load(device="cpu", dtype=torch.float64)
    mask = tensors.get("mask_hidden")
    runner = ModelRunner(MODEL, full_cache(MODEL, SLOTS), prefill_chunk=8)
    drafter, seen = watched(Eagle, runner, head, CACHES[cache](head.body.config), GAMMA)
    texts = run(drafter, changing)
    layers = drafter.hidden_buffer.layers
    assert layers == (() if version == 1 else (2, 3, 4))
    plain = []  # of each text, the head and its state after every token
    for text in texts:
        head, so_far = PlainEagle(tensors, version), []
        for state, token in zip(states_of(text, layers), text[1:], strict=False):
            out = head.step(head.fused(state), token)
            so_far.append((deepcopy(head.entries), out))
        plain.append(so_far)

    def expected(request: int, length: int, drafts: list[int]) -> Iterator[torch.Tensor]:
        head = PlainEagle(tensors, version)
        entries, state = plain[request][length - 1]
        head.entries = [[*layer] for layer in entries]
        for _ in drafts:
            if version == 1:
                yield MODEL.logits(state)
            else:
                logits = torch.full((DEEP.vocab_size,), float("-inf"), dtype=torch.float64)
                logits[tensors["t2d"]] = head.logits(state)
                yield logits
            draft = drafts[len(head.entries[0]) - len(entries[0])]
            state = head.step(state, draft) if mask is None else head.step(head.fused(mask[0, 0]), MASK)

    check_proposals(texts, seen, expected)


@pytest.mark.parametrize(
    "cache,changing,make,options",
    [
        ("full", False, random_dflash, {}),
        ("full", True, whole_dflash, {"drafts_anchor": True}),
        ("streaming", True, random_dflash, {"windows": (9, None)}),
        ("streaming", False, whole_dflash, {"windows": (4, 7), "is_causal": False}),
        ("positions in the cache", True, random_dflash, {"windows": (None, 5), "is_anchored": False}),
    ],
)
def test_dflashs_drafts_read_the_targets_own_states(cache, changing, make, options):
    """Drafts, over a cache that keeps everything, equal those of a block after the states of its text alone."""
    head = make(DEEP, **options)
    runner = ModelRunner(MODEL, full_cache(MODEL, SLOTS), prefill_chunk=8)
    drafter, seen = watched(DFlash, runner, head, CACHES[cache](head.body.config), GAMMA)
    texts = run(drafter, changing)
    fused = [head.fused(states_of(text, head.shape.inputs_of)) for text in texts]
    embedding = head.body.tok_embeddings.weight if head.shape.has_embedding else MODEL.tok_embeddings.weight

    def expected(request: int, length: int, drafts: list[int]) -> torch.Tensor:
        current = texts[request][length]
        return head.logits(plain_block(head, embedding, fused[request][:length], current, len(drafts)))

    check_proposals(texts, seen, expected)


def test_a_head_that_comes_back_runs_the_target_over_no_answer(monkeypatch):
    monkeypatch.setattr("engine.drafters.hidden_states.KEPT", 64)
    recompute, prompts, ran = ModelRunner.recompute, random_prompts(LENGTHS), []

    def watched_recompute(runner, row, text, at, layers):
        ran.append((text, at.stop))
        return recompute(runner, row, text, at, layers)

    monkeypatch.setattr(ModelRunner, "recompute", watched_recompute)
    runner = ModelRunner(MODEL, full_cache(MODEL, SLOTS), prefill_chunk=8)
    head = random_dflash(DEEP)
    run(DFlash(runner, head, CACHES["full"](head.body.config), GAMMA), changing=True)
    assert ran and all(text[:end] in [prompt[:end] for prompt in prompts] for text, end in ran)


def test_a_prompt_that_is_prefilled_in_parts_is_begun_once(monkeypatch):
    """Its last token runs again for its state; the last tokens of its parts do not."""
    begin, begun = HiddenStateBuffer.begin, list[int]()

    def watched_begin(hidden_buffer, row, text):
        begun.append(len(text))
        begin(hidden_buffer, row, text)

    monkeypatch.setattr(HiddenStateBuffer, "begin", watched_begin)
    runner = ModelRunner(MODEL, full_cache(MODEL, SLOTS), prefill_chunk=8)
    head = random_eagle(DEEP)
    decoder = Decoder(runner, drafter=Eagle(runner, head, CACHES["full"](head.body.config), GAMMA), prefill_tokens=8)
    first, second = (Request(prompt, 20) for prompt in random_prompts([9, 30]))
    decoder.submit(first)
    decoder.step(), decoder.step()
    decode(decoder, second)
    assert begun == [9, 30] and second.tokens == continue_by_recomputing(MODEL, second.prompt, 20)


@pytest.mark.parametrize("kind", [Medusa, Eagle, DFlash])
def test_a_prompt_that_comes_again_is_continued_from_its_own_state(kind):
    """Its row holds it whole, and the slots have states of the first answer."""
    runner = ModelRunner(MODEL, full_cache(MODEL, 1))
    head = {Medusa: random_medusa, Eagle: random_eagle, DFlash: random_dflash}[kind](DEEP)
    cache = () if kind is Medusa else (FullKVCache(head.body.config, 1, 70, dtype=torch.float64),)
    drafter, seen = watched(kind, runner, head, *cache, GAMMA)
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
    with pytest.raises(ConfigError, match="no room for a verification block"):
        Eagle(runner, head, StreamingKVCache(head.body.config, SLOTS, 5, 2, dtype=torch.float64), 3)
    with pytest.raises(ConfigError, match="room for 6 tokens"):
        Eagle(
            runner,
            random_eagle(DEEP, mask_token=MASK),
            StreamingKVCache(head.body.config, SLOTS, 7, 2, dtype=torch.float64),
            3,
        )
    with pytest.raises(ConfigError, match="drafts fewer tokens than gamma"):
        block = random_dflash(DEEP, block_size=3)
        DFlash(runner, block, FullKVCache(block.body.config, SLOTS, 20, dtype=torch.float64), 3)
    with pytest.raises(ConfigError, match="cache in 4 bits"):
        block = random_dflash(DEEP, windows=(4, None))
        DFlash(runner, block, QuantizedKVCache(block.body.config, SLOTS, 20, dtype=torch.float64), 3)
    size = Size(SLOTS, longest=20, n_kept=4, window=6, dtype=torch.float64)
    for cache in (policy.make(head.body.config, size) for policy in POLICIES.values() if policy.sample.selects):
        with pytest.raises(ConfigError, match="cannot select entries"):
            Eagle(runner, head, cache, 3)
    other = ModelRunner(MODEL, full_cache(MODEL, SLOTS))
    cache = FullKVCache(head.body.config, SLOTS, 20, dtype=torch.float64)
    for drafter in (Medusa(runner, heads, 2), Eagle(runner, head, cache, 2)):
        with pytest.raises(ConfigError, match="another runner"):
            generate(other, [[1, 2]], max_new_tokens=2, drafter=drafter)
    with pytest.raises(ConfigError, match="exceeds the draft's KV cache"):
        generate(runner, [[1] * 15], max_new_tokens=4, drafter=Eagle(runner, head, cache, 2))
