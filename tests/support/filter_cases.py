"""Rows of logits whose filters are hard to get right, and which ids pass them: those of a sorted row."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.sampling.distribution import Distribution, SamplingParams

# Masses of equal ids never reach these.
FILTERS = [
    *(SamplingParams(1.0, top_p=top_p) for top_p in (1e-9, 0.3003, 0.9001, 0.99999)),
    *(SamplingParams(1.0, *filters) for filters in ((3, 0.5005), (2000, 0.9901), (7, 1.0), (10**6, 1.0))),
    SamplingParams(1.0),
]


def scaled_logits(vocab: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Two steps of a row for each of FILTERS, the largest logit 0: smooth, with few or many ties, all equal, with
    excluded ids, and of one id next to others without any mass."""
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(len(FILTERS), 2, vocab, generator=generator, dtype=torch.float64)
    excluded = normal.masked_fill(torch.rand(normal.shape, generator=generator) < 0.5, -math.inf)
    excluded[..., -1] = 0
    for logits in (normal * 3, normal.bfloat16(), normal.round(), normal * 0, excluded, normal**3 * 1e6):
        logits = logits.to(dtype)
        yield logits - logits.amax(dim=-1, keepdim=True)


def kept_by_sorting(scaled: Tensor) -> Tensor:
    """Return which ids FILTERS keep of each row, by a stable sort in descending order."""
    law = Distribution.of(FILTERS)
    top_k, top_p = law.top_k[:, None, None], law.top_p[:, None, None]
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    mass = values.double().softmax(dim=-1)
    kept = (torch.arange(scaled.shape[-1]) < top_k) & (mass.cumsum(dim=-1) - mass < top_p)
    return torch.zeros_like(kept).scatter(-1, order, kept)
