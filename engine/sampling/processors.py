"""Edits: changes that a request's parameters make to its logits, by token id and by the text before each position.

The order is vLLM's: bias, repetition penalty, frequency and presence penalties; bans outweigh all of these.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling.distribution import LONGEST_BAN, MOST_BANS, SamplingParams
from engine.sampling.grammars import Grammar
from kv_cache.base import Device

BAN = -1e30  # added to excluded logits; finite, so that a row whose ids are all excluded still has a distribution
IN_PROMPT = 1 << 24  # added to the count of an id that the prompt has, and above all counts
ANY, NEVER, NO_TOKEN = -1, -2, -3  # in the place of ids, in bans and before an answer


class Edited(Protocol):
    """The part of a request that edits and masks read; `tokens` are its answer, which grows."""

    prompt: Sequence[int]
    tokens: list[int]
    stop_tokens: Collection[int]
    sampling: SamplingParams
    grammar: Grammar | None


class Edits:
    """The edits of B rows, in tensors that stay in place. Those of a row without edits change nothing.

    bias `[B, V]`. seen `[B, V]` int32: how often an answer has each id, plus `IN_PROMPT`. ends `[B, V]`: True for stop
    tokens. scales `[B, 3]`: repetition, frequency and presence penalty. bans `[B, MOST_BANS, LONGEST_BAN]`: sequences,
    which end in the last column. numbers `[B, 2]`: tokens of the answer, and `min_tokens`. recent `[B, LONGEST_BAN -
    1]`: an answer's last tokens.
    """

    def __init__(self, n_rows: int, n_ids: int, device: Device) -> None:
        new, ints = partial(torch.zeros, device=device), partial(torch.zeros, device=device, dtype=torch.int64)
        self.bias, self.ends = new(n_rows, n_ids), new(n_rows, n_ids, dtype=torch.bool)
        self.seen, self.scales = new(n_rows, n_ids, dtype=torch.int32), new(n_rows, 3, dtype=torch.float64)
        self.bans, self.numbers = ints(n_rows, MOST_BANS, LONGEST_BAN), ints(n_rows, 2)
        self.recent, self._requests, self._n_counted = ints(n_rows, LONGEST_BAN - 1), list[Edited](), list[int]()

    def follow(self, requests: list[Edited]) -> None:
        """Update the state of the first rows by the texts of their requests. Runs eagerly, never in a CUDA graph."""
        if self._requests != requests:
            self._requests, self._n_counted = requests, [0] * len(requests)
            self._begin(requests)
        answers = [request.tokens for request in requests]
        new = [tokens[n:] for tokens, n in zip(answers, self._n_counted, strict=True)]
        index = [(row, token) for row, tokens in enumerate(new) for token in tokens]
        rows, ids = torch.tensor(index, dtype=torch.int64, device=self.seen.device).reshape(-1, 2).T
        self.seen.index_put_((rows, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
        self._n_counted = [*map(len, answers)]
        last = [([NO_TOKEN] * LONGEST_BAN + tokens[1 - LONGEST_BAN :])[1 - LONGEST_BAN :] for tokens in answers]
        self.recent[: len(last)] = torch.tensor(last)
        numbers = [(len(request.tokens), request.sampling.min_tokens) for request in requests]
        self.numbers[: len(last)] = torch.tensor(numbers)

    def _begin(self, requests: list[Edited]) -> None:
        for tensor in (self.bias, self.seen, self.ends):
            tensor.zero_()
        bans = torch.full(self.bans.shape, NEVER)
        bans[..., -1] = 0  # an id, whose logit such a sequence does not change
        for row, request in enumerate(requests):
            sampling = request.sampling
            if biases := dict(sampling.logit_bias):
                self.bias[row, [*biases]] = torch.tensor([*biases.values()], device=self.bias.device)
            if sampling.repetition_penalty != 1:
                self.seen[row, request.prompt] = IN_PROMPT
            if sampling.min_tokens:
                self.ends[row, [token for token in request.stop_tokens if token < self.ends.shape[1]]] = True
            for i, ids in enumerate(sampling.bad_words):
                bans[row, i] = torch.tensor([ANY] * (LONGEST_BAN - len(ids)) + [*ids])
            scales = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
            self.scales[row] = torch.tensor(scales, dtype=torch.float64)
        self.bans.copy_(bans)

    def edited(self, logits: Tensor, drafts: Tensor, ahead: int) -> Tensor:
        """Return the edited logits, in float32 or better (see `Batch.edited`)."""
        (n, n_step, _), step = logits.shape, torch.arange(logits.shape[1], device=logits.device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) + self.bias[:n, None]
        is_before = (step[:-1] < step[:, None]).int().expand(n, -1, -1)
        seen = self.seen[:n, None].expand(-1, n_step, -1)
        seen = seen.scatter_add(2, drafts[:, None].expand(-1, n_step, -1), is_before)
        repetition, frequency, presence = self.scales[:n, None, None].to(logits.dtype).unbind(-1)
        factor = torch.where(seen > 0, repetition, torch.ones_like(repetition))
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        n_seen = seen % IN_PROMPT
        logits = logits - frequency * n_seen - presence * (n_seen > 0)
        n_answer, at_least = self.numbers[:n, None].unbind(-1)
        logits = logits + BAN * ((n_answer + ahead + step < at_least)[..., None] & self.ends[:n, None])
        # A ban holds at a step if the tokens before its last are the end of the answer and of the drafts before.
        text = torch.cat([self.recent[:n], drafts], dim=1).unfold(1, LONGEST_BAN - 1, 1)[:, :, None]
        ids, before = self.bans[:n, None, :, -1].expand(-1, n_step, -1), self.bans[:n, None, :, :-1]
        holds = ((before == text) | (before == ANY)).all(dim=-1)
        return logits.scatter_add(2, ids, BAN * holds.to(logits.dtype))
