"""Edits of logits by lists, recomputed from the whole text for every token."""

import math
import random
from collections.abc import Collection, Sequence

import torch

from engine.evaluation.reference import NextLogits
from engine.sampling.distribution import SamplingParams


def edited_by_lists(
    logits: Sequence[float], prompt: Sequence[int], answer: list[int], how: SamplingParams, stops: Collection[int]
) -> list[float]:
    """Return the logits of the token that follows prompt and answer, -inf for ids that are excluded."""
    edited = []
    for id_, logit in enumerate(logits):
        logit += dict(how.logit_bias).get(id_, 0.0)
        if id_ in prompt or id_ in answer:
            logit = logit / how.repetition_penalty if logit > 0 else logit * how.repetition_penalty
        logit -= how.frequency_penalty * answer.count(id_)
        logit -= how.presence_penalty * (id_ in answer)
        ends_ban = any([*answer, id_][-len(ban) :] == [*ban] for ban in how.bad_words)
        is_early = id_ in stops and len(answer) < how.min_tokens
        edited.append(-math.inf if ends_ban or is_early else logit)
    return edited


def edited(
    next_logits: NextLogits, prompt: Sequence[int], how: SamplingParams, stops: Collection[int] = ()
) -> NextLogits:
    """Return a function that edits what `next_logits` gives for a text that begins with the prompt."""

    def after(text: list[int]) -> torch.Tensor:
        logits = next_logits(text)
        rest = text[len(prompt) :]
        return torch.tensor(edited_by_lists(logits.tolist(), prompt, rest, how, stops), dtype=logits.dtype)

    return after


def random_edits(rng: random.Random, vocab_size: int, by_text: bool) -> dict:
    """Return fields of `SamplingParams`, exact in float32; by_text: also those by which a token changes the next."""
    ids = rng.sample(range(vocab_size), 5)
    fields = {"logit_bias": {id_: rng.choice([-100.0, -0.5, 0.25, 3.0]) for id_ in ids[: rng.randint(0, 4)]}}
    if not by_text:
        return fields
    bans = [rng.choices(range(vocab_size), k=rng.randint(1, 2)) for _ in range(rng.choice([0, 1, 30]))]
    return fields | {
        "repetition_penalty": rng.choice([1.0, 0.5, 2.0, 4.0]),
        "frequency_penalty": rng.choice([0.0, 0.5, -0.25]),
        "presence_penalty": rng.choice([0.0, 2.0, -1.5]),
        "min_tokens": rng.choice([0, 2, 9]),
        "bad_words": [ban for ban in bans if len(ban) > 1 or ban[0] in ids],
    }
