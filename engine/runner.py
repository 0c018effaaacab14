"""ModelRunner: a model and its cache; chunked prefill of a row, and steps of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_cache import KVCache, WriteThroughKVCache
from kv_cache.errors import ConfigError
from models import Transformer

# Long enough to keep matmuls busy, short enough that a chunk's mask and activations stay small.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Prefilled:
    """A prompt in its row: the logits `[V]` after its last token, and its first position that is not finite."""

    model: Transformer
    prompt: tuple[int, ...]
    logits: Tensor
    bad_position: int | None


def finite_rows(x: Tensor) -> Tensor:
    """Whether every entry along the last dimension is finite: `[..., V] -> [...]` bool, one pass over `x`."""
    return torch.isfinite(x.sum(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)))


class ModelRunner:
    """Runs `model` over `cache`. Every forward of the engine goes through here.

    A row that still begins with the prompt asked for is rolled back to it instead of being run again,
    so a baseline and a speculation decode from the same state.
    Errors: ConfigError if the cache is not of the model's dtype and shape.
    """

    def __init__(self, model: Transformer, cache: KVCache, prefill_chunk: int = PREFILL_CHUNK) -> None:
        self.model = model
        self.cache = cache
        self.prefill_chunk = prefill_chunk
        config, keys = model.config, cache.keys
        needed = (model.dtype, config.n_layer, config.n_kv_head, config.head_dim)
        given = (keys.dtype, keys.shape[0], keys.shape[2], keys.shape[4])
        if needed != given:
            raise ConfigError(
                "the cache does not fit the model",
                where="ModelRunner: (dtype, n_layer, n_kv_head, head_dim)",
                seen=given,
                required=needed,
                fix="build the cache from model.config, with dtype=model.dtype",
            )

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def prefill_row(self, row: int, prompt: Sequence[int], on_tokens: Callable[[int], None] | None = None) -> Prefilled:
        """Fill one row with `prompt` in chunks; `on_tokens` is told of each chunk's length."""
        positions = torch.arange(len(prompt), device=self.device)[None]
        if self._holds(row, prompt, positions):
            self.cache.view(slice(row, row + 1)).rollback(positions[:, -1] + 1)
            held = self.cache.notes[row]
            assert isinstance(held, Prefilled)
            return held
        self.cache.reset_row(row)
        tokens = torch.tensor(prompt, device=self.device)[None]
        finite = []
        for start in range(0, len(prompt), self.prefill_chunk):
            end = min(start + self.prefill_chunk, len(prompt))
            view = self.cache.view(slice(row, row + 1), end)
            hidden = self.model.hidden(tokens[:, start:end], positions[:, start:end], view)
            finite.append(finite_rows(hidden[0]))
            if on_tokens is not None:
                on_tokens(end - start)
        logits = self.model.logits(hidden[0, -1])
        finite[-1][-1] &= finite_rows(logits)
        bad = (~torch.cat(finite)).nonzero()
        done = Prefilled(self.model, tuple(prompt), logits, int(bad[0]) if len(bad) else None)
        self.cache.notes[row] = done
        return done

    def _holds(self, row: int, prompt: Sequence[int], positions: Tensor) -> bool:
        held = self.cache.notes.get(row)
        if not isinstance(held, Prefilled) or held.model is not self.model or held.prompt != tuple(prompt):
            return False
        return torch.equal(self.cache.positions[row : row + 1, : len(prompt)], positions)

    def release_row(self, row: int) -> None:
        """No longer count on what a row holds: it is about to be written over."""
        self.cache.notes.pop(row, None)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        extent: int,
        cache: KVCache | WriteThroughKVCache | None = None,
    ) -> Tensor:
        """Logits `[B, T, V]` of `tokens [B, T]` at `positions [B, T]`, all of them below `extent`.

        `cache` stands in for the runner's own where a verification also writes to a draft's cache.
        """
        return self.model(tokens, positions, (cache or self.cache).view(extent=extent))
