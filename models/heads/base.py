"""Heads with decoder layers: their shape, what they borrow from the target, and their vocabulary."""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kv_cache.views import Slots
from models.config import ModelConfig
from models.llama import Head, Transformer, attention_spec


@dataclass(frozen=True)
class HeadShape:
    """The shape of a head that continues the target's hidden states.

    config: the head's layers, with the target's vocabulary.
    draft_vocab_size: token ids of its output layer; None if it uses the target's output layer.
    inputs_of: the target's layers whose inputs the head reads, ascending, `target_dim` wide each; `n_layer` stands for
        the last layer's output. Empty: the head reads the last hidden state.
    has_embedding: False if it uses the target's embedding.
    mask_token: the token of positions that are drafted in parallel, if any are.
    windows: for each layer, the most tokens that a token sees, itself included; None: all. Empty: all, in every layer.
    """

    config: ModelConfig
    target_dim: int
    draft_vocab_size: int | None = None
    inputs_of: tuple[int, ...] = ()
    has_embedding: bool = True
    mask_token: int | None = None
    windows: tuple[int | None, ...] = ()

    @property
    def state_dim(self) -> int:
        """Width of the target's states that the head reads."""
        return self.target_dim * max(1, len(self.inputs_of))

    @property
    def most_drafts(self) -> int:
        """The most tokens that the head drafts."""
        return sys.maxsize

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Parts of the target that the head uses."""
        lacks = {"embedding": not self.has_embedding, "output layer": self.draft_vocab_size is None}
        return tuple(part for part, is_lacking in lacks.items() if is_lacking)


class TransformerHead(nn.Module):
    """Base of heads with decoder layers. `body` has the layers, the norm and the output layer.

    target_ids: the target's id of each id of the output layer, `[draft_vocab_size]` int64; None if they are equal.
    """

    shape: HeadShape
    target_ids: Tensor | None

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape, config = shape, shape.config
        self.body = Transformer(replace(config, tie_embeddings=True))
        if shape.draft_vocab_size is not None:
            self.body.output = Head(config.dim, shape.draft_vocab_size, bias=False)
        if not shape.has_embedding:
            del self.body.tok_embeddings
        self.register_buffer("target_ids", None, persistent=False)
        self._target: tuple[Transformer, ...] = ()

    def borrow(self, target: Transformer) -> None:
        """Use the target's embedding or output layer if the head has none."""
        self._target = (target,)  # in a tuple, so that it is no submodule

    @abstractmethod
    def fused(self, states: Tensor) -> Tensor:
        """Combine the target's states, `[..., state_dim]`, to the head's, `[..., dim]`."""

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the embeddings of `tokens [B, T]`, flattened to `[B * T, dim]`."""
        embedding = self.body.tok_embeddings if self.shape.has_embedding else self._target[0].tok_embeddings
        return embedding(tokens).flatten(0, 1).to(dtype)

    def see(self, positions: Tensor, cache: Slots, dtype: torch.dtype) -> Sequence[Any]:
        """Prepare each layer's attention for a block at `positions [B, T]`, once for layers with equal windows."""
        windows = self.shape.windows or (None,) * len(self.body.layers)
        prepared = {window: self.prepared(window, positions, cache, dtype) for window in {*windows}}
        return [prepared[window] for window in windows]

    def prepared(self, window: int | None, positions: Tensor, slots: Any, dtype: torch.dtype) -> Any:
        """Prepare attention over `slots` of tokens that see up to `positions [B, T]`, and `window` tokens at most."""
        spec = replace(attention_spec(self.body.config, dtype), sliding_window=window)
        return self.body.backend.prepare(spec, positions, slots)

    def draft_logits(self, states: Tensor) -> Tensor:
        """Return logits of the output layer's ids: `[..., dim] -> [..., draft_vocab_size]`."""
        if self.body.output is not None:
            return self.body.output(states)
        target = self._target[0]
        return target.logits(states.to(target.dtype))

    def logits(self, states: Tensor) -> Tensor:
        """Return logits of the target's ids, `[..., dim] -> [..., vocab_size]`."""
        return self.of_target(self.draft_logits(states))

    def of_target(self, known: Tensor) -> Tensor:
        """Return logits of the target's ids, `[..., draft_vocab_size] -> [..., vocab_size]`: minus infinity for ids
        that the head lacks."""
        if self.target_ids is None:
            return known
        logits = known.new_full((*known.shape[:-1], self.shape.config.vocab_size), float("-inf"))
        logits[..., self.target_ids] = known
        return logits
