"""Logits processors: changes that a request makes to its logits, by token id and by the text before each position.

Their order is vLLM's: bias, repetition penalty, frequency and presence penalties; bans outweigh all of these.
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


class ProcessedRequest(Protocol):
    """The part of a request that processors and masks read; `tokens` are its answer, which grows."""

    prompt: Sequence[int]
    tokens: list[int]
    stop_tokens: Collection[int]
    sampling: SamplingParams
    grammar: Grammar | None


class LogitsProcessors:
    """Changes logits by the parameters of B rows, and by their answers, in tensors that stay in place; the parameters
    of rows without edits change nothing.

    Of each row there are: the bias of each id; the repetition, frequency and presence penalties; the stop tokens, and
    how many tokens come before one; and banned sequences, each of which ends in the last column of `_bans [B,
    MOST_BANS, LONGEST_BAN]`. Of its answer: how often it has each id, plus IN_PROMPT for ids of the prompt of a row
    with a repetition penalty; its length; and its last tokens.
    """

    def __init__(self, n_rows: int, n_ids: int, device: Device) -> None:
        zeros = partial(torch.zeros, device=device)
        self._bias, self._penalties = zeros(n_rows, n_ids), zeros(n_rows, 3, dtype=torch.float64)
        self._ends, self._at_least = zeros(n_rows, n_ids, dtype=torch.bool), zeros(n_rows, dtype=torch.int64)
        self._bans = zeros(n_rows, MOST_BANS, LONGEST_BAN, dtype=torch.int64)
        self._seen, self._lengths = zeros(n_rows, n_ids, dtype=torch.int32), zeros(n_rows, dtype=torch.int64)
        self._last = zeros(n_rows, LONGEST_BAN - 1, dtype=torch.int64)
        self._requests, self._n_counted = list[ProcessedRequest](), list[int]()

    def follow(self, requests: list[ProcessedRequest]) -> None:
        """Update the first rows by the texts of their requests. Runs eagerly, never in a CUDA graph."""
        if self._requests != requests:
            self._begin(requests)
        answers = [request.tokens for request in requests]
        new = [tokens[n:] for tokens, n in zip(answers, self._n_counted, strict=True)]
        index = [(row, token) for row, tokens in enumerate(new) for token in tokens]
        rows, ids = torch.tensor(index, dtype=torch.int64, device=self._seen.device).reshape(-1, 2).T
        self._seen.index_put_((rows, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
        self._n_counted = [*map(len, answers)]
        last = [([NO_TOKEN] * LONGEST_BAN + tokens[1 - LONGEST_BAN :])[1 - LONGEST_BAN :] for tokens in answers]
        self._last[: len(last)], self._lengths[: len(last)] = torch.tensor(last), torch.tensor(self._n_counted)

    def _begin(self, requests: list[ProcessedRequest]) -> None:
        """Set the parameters of the first rows to those of their requests, and count nothing yet of the answers of new
        ones. The rows of others move: counting a long prompt over a large vocabulary takes longer than a round."""
        row_of = {id(request): row for row, request in enumerate(self._requests)}
        before = {row: row_of[id(request)] for row, request in enumerate(requests) if id(request) in row_of}
        moved = {row: old for row, old in before.items() if row != old}
        new = [row for row in range(len(requests)) if row not in before]
        self._n_counted = [self._n_counted[before[row]] if row in before else 0 for row in range(len(requests))]
        self._requests = requests
        for tensor in (self._bias, self._ends, self._seen):
            tensor[[*moved]] = tensor[[*moved.values()]]
            tensor[new] = 0
        bans = torch.full(self._bans.shape, NEVER)
        bans[..., -1] = 0  # an id, whose logit such a sequence does not change
        for row, request in enumerate(requests):
            for i, ids in enumerate(request.sampling.bad_words):
                bans[row, i] = torch.tensor([ANY] * (LONGEST_BAN - len(ids)) + [*ids])
            if row not in new:
                continue
            if biases := dict(request.sampling.logit_bias):
                self._bias[row, [*biases]] = torch.tensor([*biases.values()], device=self._bias.device)
            self._ends[row, [token for token in request.stop_tokens if 0 <= token < self._ends.shape[1]]] = True
            if request.sampling.repetition_penalty != 1:
                self._seen[row, request.prompt] = IN_PROMPT
        self._bans.copy_(bans)
        rules = [request.sampling for request in requests]
        penalties = [(rule.repetition_penalty, rule.frequency_penalty, rule.presence_penalty) for rule in rules]
        self._penalties[: len(rules)] = torch.tensor(penalties, dtype=torch.float64)
        self._at_least[: len(rules)] = torch.tensor([rule.min_tokens for rule in rules])

    def __call__(self, logits: Tensor, drafts: Tensor, ahead: int) -> Tensor:
        """Return the processed logits, in float32 or better (see `Batch.processed`)."""
        (n, n_step, _), step = logits.shape, torch.arange(logits.shape[1], device=logits.device)
        is_before = (step[:-1] < step[:, None]).int().expand(n, -1, -1)
        seen = self._seen[:n, None].expand(-1, n_step, -1)
        seen = seen.scatter_add(2, drafts[:, None].expand(-1, n_step, -1), is_before)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) + self._bias[:n, None]
        repetition, frequency, presence = self._penalties[:n, None, None].to(logits.dtype).unbind(-1)
        factor = torch.where(seen > 0, repetition, torch.ones_like(repetition))
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        n_seen = seen % IN_PROMPT
        logits = logits - frequency * n_seen - presence * (n_seen > 0)
        is_early = self._lengths[:n, None] + ahead + step < self._at_least[:n, None]
        logits = logits + BAN * (is_early[..., None] & self._ends[:n, None])
        last = torch.cat([self._last[:n], drafts], dim=1).unfold(1, LONGEST_BAN - 1, 1)
        ids, before = self._bans[:n, None, :, -1].expand(-1, n_step, -1), self._bans[:n, None, :, :-1]
        holds = ((before == last[:, :, None]) | (before == ANY)).all(dim=-1)
        return logits.scatter_add(2, ids, BAN * holds.to(logits.dtype))
