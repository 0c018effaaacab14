"""Edits: changes that a request's parameters make to the logits, by token id and by the text before each position.

The order is vLLM's: bias, repetition penalty, frequency and presence penalties; then bans, which nothing undoes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.requests import Request
from engine.sampling import LONGEST_BAN, MOST_BANS
from kv_cache.base import Device

# Added to an excluded logit. Finite: where all ids of a row are excluded, the distribution is still one.
BAN = -1e30
# Part of a `seen` number: the id occurs in the prompt. Above all numbers of occurrences.
IN_PROMPT = 1 << 24
# In the place of an id, within banned sequences: any token, or no token; and before an answer's first token.
ANY, NEVER, NOTHING = -1, -2, -3


class Edits:
    """The edits of B rows, in tensors that stay in place; a row without edits is not changed.

    bias `[B, V]`. seen `[B, V]` int32: how often each id occurs in the row's answer, plus `IN_PROMPT`. ends `[B, V]`:
    True for stop tokens. scales `[B, 3]`: repetition, frequency and presence penalty. bans `[B, MOST_BANS,
    LONGEST_BAN]`: sequences that end in the last column. numbers `[B, 2]`: tokens of the answer, and `min_tokens`.
    recent `[B, LONGEST_BAN - 1]`: the answer's last tokens. Texts are counted up to the current token.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [*tensors]
        self.bias, self.seen, self.ends, self.scales, self.bans, self.numbers, self.recent = self._tensors
        self._requests: list[Request] = []
        self._n_counted: list[int] = []  # by row, tokens of the answer that `seen` counts

    @classmethod
    def of_rows(cls, n_rows: int, n_ids: int, device: Device) -> Edits:
        shapes = (n_ids,), (n_ids,), (n_ids,), (3,), (MOST_BANS, LONGEST_BAN), (2,), (LONGEST_BAN - 1,)
        dtypes = torch.float32, torch.int32, torch.bool, torch.float64, torch.int64, torch.int64, torch.int64
        each = zip(shapes, dtypes, strict=True)
        return cls(torch.zeros(n_rows, *shape, dtype=dtype, device=device) for shape, dtype in each)

    def first(self, n: int) -> Edits:
        """Return the edits of the first n rows, in the same tensors."""
        return Edits(tensor[:n] for tensor in self._tensors)

    def begin(self, requests: Sequence[Request]) -> None:
        """Set each row's request. Runs eagerly, as `advance`."""
        self._requests, self._n_counted = [*requests], [0] * len(requests)
        for tensor in (self.bias, self.seen, self.ends):
            tensor.zero_()
        n_ids, device = self.bias.shape[1], self.bias.device
        bans = torch.full(self.bans.shape, NEVER)
        bans[..., -1] = 0  # an id, where a sequence that never occurs adds nothing
        for row, request in enumerate(requests):
            sampling = request.sampling
            if sampling.logit_bias:
                ids, values = zip(*sampling.logit_bias, strict=True)
                self.bias[row, torch.tensor(ids, device=device)] = torch.tensor(values, device=device)
            if sampling.repetition_penalty != 1:
                self.seen[row, torch.tensor(request.prompt, device=device)] = IN_PROMPT
            if sampling.min_tokens:
                ends = [token for token in request.stop_tokens if token < n_ids]
                self.ends[row, torch.tensor(ends, dtype=torch.int64, device=device)] = True
            for i, ids in enumerate(sampling.bad_words):
                bans[row, i] = torch.tensor([*[ANY] * (LONGEST_BAN - len(ids)), *ids])
        self.bans.copy_(bans)
        each = [request.sampling for request in requests]
        scales = [(row.repetition_penalty, row.frequency_penalty, row.presence_penalty) for row in each]
        self.scales.copy_(torch.tensor(scales, dtype=torch.float64))
        self.advance()

    def advance(self) -> None:
        """Count the tokens that the rows' requests have emitted since the last call."""
        answers = [request.tokens for request in self._requests]
        new = [tokens[n:] for tokens, n in zip(answers, self._n_counted, strict=True)]
        self._n_counted = [*map(len, answers)]
        width = max(map(len, new))
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in new], dtype=torch.int64)
        counts = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in new], dtype=torch.int32)
        self.seen.scatter_add_(1, ids.to(self.seen.device), counts.to(self.seen.device))
        before = [NOTHING] * (LONGEST_BAN - 1)
        self.recent.copy_(torch.tensor([(before + tokens[1 - LONGEST_BAN :])[1 - LONGEST_BAN :] for tokens in answers]))
        limits = [request.sampling.min_tokens for request in self._requests]
        self.numbers.copy_(torch.tensor([*zip(self._n_counted, limits, strict=True)]))

    def edited(self, logits: Tensor, drafts: Tensor, ahead: int = 0) -> Tensor:
        """Return the edited logits, in float32 or better (see `Batch.edited`)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) + self.bias[:, None]
        n_rows, n_step, _ = logits.shape
        step = torch.arange(n_step, device=logits.device)
        is_before = (step[: n_step - 1] < step[:, None]).int().expand(n_rows, -1, -1)
        index = drafts[:, None].expand(-1, n_step, -1)
        seen = self.seen[:, None].expand(-1, n_step, -1).scatter_add(2, index, is_before)
        repetition, frequency, presence = self.scales.to(logits.dtype)[:, None, None].unbind(-1)
        factor = torch.where(seen > 0, repetition, 1.0)
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        n_seen = seen % IN_PROMPT
        logits = logits - frequency * n_seen - presence * (n_seen > 0)
        n_answer, at_least = self.numbers[:, None].unbind(-1)
        logits = logits + BAN * ((n_answer + ahead + step < at_least)[..., None] & self.ends[:, None])
        # Step t follows the last tokens and t drafts; a ban holds where the tokens before its last are these.
        follows = torch.cat([self.recent, drafts], dim=1).unfold(1, LONGEST_BAN - 1, 1)[:, :, None]
        ids, begins = self.bans[:, None, :, -1].expand(-1, n_step, -1), self.bans[:, None, :, :-1]
        is_banned = ((begins == follows) | (begins == ANY)).all(dim=-1)
        return logits.scatter_add(2, ids, BAN * is_banned.to(logits.dtype))
