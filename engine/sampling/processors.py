"""Logits processors: changes that a request makes to its logits, by token id and by the text before each position.

Their order is vLLM's: bias, repetition penalty, frequency and presence penalties; bans outweigh all of these.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

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


class Texts(NamedTuple):
    """The answer before each of T steps in n rows.

    seen: `[n, T, V]` int32, how often it has each id, plus IN_PROMPT for ids of the prompt of a row with a repetition
    penalty. lengths: `[n, T]` int64. last: `[n, T, LONGEST_BAN - 1]` int64, its last tokens.
    """

    seen: Tensor
    lengths: Tensor
    last: Tensor


class LogitsProcessor(Protocol):
    """Changes logits by parameters of B rows, in tensors that stay in place; those of other rows change nothing."""

    def begin(self, requests: Sequence[ProcessedRequest]) -> None:
        """Set the parameters of the first rows."""

    def __call__(self, logits: Tensor, texts: Texts) -> Tensor:
        """Return the changed `logits [n, T, V]`."""


class Bias:
    """Adds a number to the logits of some ids."""

    def __init__(self, n_rows: int, n_ids: int, device: Device) -> None:
        self._bias = torch.zeros(n_rows, n_ids, device=device)

    def begin(self, requests: Sequence[ProcessedRequest]) -> None:
        self._bias.zero_()
        for row, request in enumerate(requests):
            if biases := dict(request.sampling.logit_bias):
                self._bias[row, [*biases]] = torch.tensor([*biases.values()], device=self._bias.device)

    def __call__(self, logits: Tensor, texts: Texts) -> Tensor:
        return logits + self._bias[: len(logits), None]


class Penalties:
    """Divides or multiplies logits of ids of prompt and answer; subtracts for an id of the answer, and for each time
    that it occurs."""

    def __init__(self, n_rows: int, n_ids: int, device: Device) -> None:
        self._scales = torch.zeros(n_rows, 3, dtype=torch.float64, device=device)

    def begin(self, requests: Sequence[ProcessedRequest]) -> None:
        rules = [request.sampling for request in requests]
        scales = [(rule.repetition_penalty, rule.frequency_penalty, rule.presence_penalty) for rule in rules]
        self._scales[: len(scales)] = torch.tensor(scales, dtype=torch.float64)

    def __call__(self, logits: Tensor, texts: Texts) -> Tensor:
        repetition, frequency, presence = self._scales[: len(logits), None, None].to(logits.dtype).unbind(-1)
        factor = torch.where(texts.seen > 0, repetition, torch.ones_like(repetition))
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        n_seen = texts.seen % IN_PROMPT
        return logits - frequency * n_seen - presence * (n_seen > 0)


class MinTokens:
    """Excludes stop tokens from the first tokens of an answer."""

    def __init__(self, n_rows: int, n_ids: int, device: Device) -> None:
        self._ends = torch.zeros(n_rows, n_ids, dtype=torch.bool, device=device)
        self._at_least = torch.zeros(n_rows, dtype=torch.int64, device=device)

    def begin(self, requests: Sequence[ProcessedRequest]) -> None:
        self._ends.zero_()
        for row, request in enumerate(requests):
            self._ends[row, [token for token in request.stop_tokens if token < self._ends.shape[1]]] = True
        self._at_least[: len(requests)] = torch.tensor([request.sampling.min_tokens for request in requests])

    def __call__(self, logits: Tensor, texts: Texts) -> Tensor:
        n = len(logits)
        is_early = texts.lengths < self._at_least[:n, None]
        return logits + BAN * (is_early[..., None] & self._ends[:n, None])


class BadWords:
    """Excludes an id where it would end a sequence that is banned. Each sequence ends in the last column of `_bans [B,
    MOST_BANS, LONGEST_BAN]`."""

    def __init__(self, n_rows: int, n_ids: int, device: Device) -> None:
        self._bans = torch.zeros(n_rows, MOST_BANS, LONGEST_BAN, dtype=torch.int64, device=device)

    def begin(self, requests: Sequence[ProcessedRequest]) -> None:
        bans = torch.full(self._bans.shape, NEVER)
        bans[..., -1] = 0  # an id, whose logit such a sequence does not change
        for row, request in enumerate(requests):
            for i, ids in enumerate(request.sampling.bad_words):
                bans[row, i] = torch.tensor([ANY] * (LONGEST_BAN - len(ids)) + [*ids])
        self._bans.copy_(bans)

    def __call__(self, logits: Tensor, texts: Texts) -> Tensor:
        n, n_step, _ = logits.shape
        ids, before = self._bans[:n, None, :, -1].expand(-1, n_step, -1), self._bans[:n, None, :, :-1]
        holds = ((before == texts.last[:, :, None]) | (before == ANY)).all(dim=-1)
        return logits.scatter_add(2, ids, BAN * holds.to(logits.dtype))


PROCESSORS: tuple[Callable[[int, int, Device], LogitsProcessor], ...] = (Bias, Penalties, MinTokens, BadWords)


class LogitsProcessors:
    """All processors in their order, and the answers of B rows that they go by, in tensors that stay in place."""

    def __init__(self, n_rows: int, n_ids: int, device: Device) -> None:
        self._processors = [new(n_rows, n_ids, device) for new in PROCESSORS]
        self._seen = torch.zeros(n_rows, n_ids, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self._last = torch.zeros(n_rows, LONGEST_BAN - 1, dtype=torch.int64, device=device)
        self._requests, self._n_counted = list[ProcessedRequest](), list[int]()

    def follow(self, requests: list[ProcessedRequest]) -> None:
        """Update the first rows by the texts of their requests. Runs eagerly, never in a CUDA graph."""
        if self._requests != requests:
            self._requests, self._n_counted = requests, [0] * len(requests)
            for processor in self._processors:
                processor.begin(requests)
            self._seen.zero_()
            for row, request in enumerate(requests):
                if request.sampling.repetition_penalty != 1:
                    self._seen[row, request.prompt] = IN_PROMPT
        answers = [request.tokens for request in requests]
        new = [tokens[n:] for tokens, n in zip(answers, self._n_counted, strict=True)]
        index = [(row, token) for row, tokens in enumerate(new) for token in tokens]
        rows, ids = torch.tensor(index, dtype=torch.int64, device=self._seen.device).reshape(-1, 2).T
        self._seen.index_put_((rows, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
        self._n_counted = [*map(len, answers)]
        last = [([NO_TOKEN] * LONGEST_BAN + tokens[1 - LONGEST_BAN :])[1 - LONGEST_BAN :] for tokens in answers]
        self._last[: len(last)], self._lengths[: len(last)] = torch.tensor(last), torch.tensor(self._n_counted)

    def __call__(self, logits: Tensor, drafts: Tensor, ahead: int) -> Tensor:
        """Return the processed logits, in float32 or better (see `Batch.processed`)."""
        (n, n_step, _), step = logits.shape, torch.arange(logits.shape[1], device=logits.device)
        is_before = (step[:-1] < step[:, None]).int().expand(n, -1, -1)
        seen = self._seen[:n, None].expand(-1, n_step, -1)
        seen = seen.scatter_add(2, drafts[:, None].expand(-1, n_step, -1), is_before)
        last = torch.cat([self._last[:n], drafts], dim=1).unfold(1, LONGEST_BAN - 1, 1)
        texts = Texts(seen, self._lengths[:n, None] + ahead + step, last)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        for processor in self._processors:
            logits = processor(logits, texts)
        return logits
