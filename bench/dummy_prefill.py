"""Fills a cache with random KV entries in place of a prefill, where only costs are measured."""

from collections.abc import Sequence

import torch

from engine.runner import ModelRunner
from kv_cache import KVCache
from kv_cache.base import Prefilled
from models.llama import logits_dtype


@torch.inference_mode()
def fill_with_noise(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> None:
    """Fill every row with random keys and values at the positions of its prompt, as if that had been prefilled."""
    cache, model = runner.cache, runner.model
    randomise(cache.view(extent=max(map(len, prompts))))
    dtype = logits_dtype(model.dtype, cache.device)
    for row, prompt in enumerate(prompts):
        cache.reset_row(row)
        cache.positions[row, : len(prompt)] = torch.arange(len(prompt), device=cache.device)
        logits = torch.randn(model.config.vocab_size, device=cache.device, dtype=dtype)
        cache.prefilled[row] = Prefilled(model, tuple(prompt), logits, None)


def randomise(cache: KVCache) -> None:
    """Fill every slot with random keys and values; 8-bit entries are drawn a row of a layer at a time, in float32."""
    if cache.scales is None:
        cache.entries.normal_()
        return
    for layer in cache.entries:
        for row in layer.unbind(1):
            row.copy_(torch.randn(row.shape, device=row.device))
    cache.scales.fill_(1)
