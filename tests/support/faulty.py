"""Verification that is wrong."""

import torch
from torch import Tensor

from engine import ModelRunner
from kv_cache import WriteThroughKVCache


def noise_like(logits: Tensor, size: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * (2 * torch.rand(logits.shape, generator=generator) - 1).to(logits.dtype)


class Faulty(ModelRunner):
    """A runner whose verifications are off by up to `size`; forwards of one token are right."""

    size = 3.0

    def step(self, tokens, positions, cache=None):
        logits = super().step(tokens, positions, cache)
        verifies = isinstance(cache, WriteThroughKVCache)
        return logits + noise_like(logits, self.size, cache.positions.shape[1]) if verifies else logits
