"""EAGLE heads: a decoder layer or a few that draft from the target's hidden states and the tokens that followed them.

EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858) continue the target's last hidden state and use its output layer.
EAGLE-3 (2503.01840) reads the inputs of three of the target's layers. It has an output layer, often for fewer tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kv_cache.views import Slots
from models.config import ModelConfig
from models.llama import Block, Head, Linear, Step, Transformer


@dataclass(frozen=True)
class EagleShape:
    """The shape of an EAGLE head. The last four fields are EAGLE-3's.

    config: the head's layers, with the target's vocabulary.
    draft_vocab_size: token ids of its output layer; None if it uses the target's output layer.
    inputs_of: the target's layers whose inputs the head reads, ascending; empty for EAGLE-1 and -2, which read the last
        hidden state. All are `target_dim` wide.
    has_embedding: False if it uses the target's embedding.
    norm_before_residual: the residual stream starts normalised.
    norm_before_fc: the inputs are normalised together before `fc`. fc_norm: each input is normalised separately.
    norm_output: the next step reads the normalised state, like the output layer.
    """

    config: ModelConfig
    target_dim: int
    draft_vocab_size: int | None = None
    inputs_of: tuple[int, ...] = ()
    has_embedding: bool = True
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def state_dim(self) -> int:
        """Width of the target's states that the head reads."""
        return self.target_dim * max(1, len(self.inputs_of))

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Parts of the target that the head uses."""
        lacks = {"embedding": not self.has_embedding, "output layer": self.draft_vocab_size is None}
        return tuple(part for part, is_lacking in lacks.items() if is_lacking)


class PlainFirstBlock(Block):
    """The first block of EAGLE-1: attention takes the residual stream without a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        del self.attention_norm

    def forward(self, x: Tensor, update: Tensor, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        attended = self.attention(x, step, layer)
        x, normed = step.pointwise.add_norm(x, attended, self.ffn_norm.weight, self.norm_eps)
        return x, self.feed_forward(normed, step)


class WideFirstBlock(Block):
    """The first block of EAGLE-3: attention takes the tokens' embeddings (passed as `update`) beside the stream."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__(config)
        self.hidden_norm = nn.RMSNorm(config.dim, config.norm_eps)
        n_qkv = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        self.attention.wqkv = Linear(2 * config.dim, n_qkv, bias=config.qkv_bias)
        self._norm_before_residual = norm_before_residual

    def forward(self, x: Tensor, update: Tensor, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(x)
        both = torch.cat([self.attention_norm(update), normed], dim=-1)
        x = normed if self._norm_before_residual else x
        x, normed = step.pointwise.add_norm(x, self.attention(both, step, layer), self.ffn_norm.weight, self.norm_eps)
        return x, self.feed_forward(normed, step)


class EagleHead(nn.Module):
    """A head whose state at position p stands for the tokens up to p.

    `fused` turns the target's states into the head's. `advance` takes a state and the token at p + 1, and returns the
    state at p + 1, whose `logits` predict the token at p + 2. `body` has the layers, the norm and the output layer.
    target_ids: the target's id of each id of the output layer, `[draft_vocab_size]` int64; None if they are equal.
    """

    target_ids: Tensor | None

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        config, self.shape, self.is_third = shape.config, shape, bool(shape.inputs_of)
        self.body = Transformer(replace(config, tie_embeddings=True))
        first = WideFirstBlock(config, shape.norm_before_residual) if self.is_third else PlainFirstBlock(config)
        self.body.layers[0] = first
        if shape.draft_vocab_size is not None:
            self.body.output = Head(config.dim, shape.draft_vocab_size, bias=False)
        if not shape.has_embedding:
            del self.body.tok_embeddings
        if not self.is_third:
            del self.body.norm
        self.fc = Linear(shape.state_dim if self.is_third else 2 * config.dim, config.dim, bias=shape.fc_bias)
        n_norm = len(shape.inputs_of) if shape.fc_norm else 0
        self.fc_norm = nn.ModuleList(nn.RMSNorm(shape.target_dim, config.norm_eps) for _ in range(n_norm))
        self.input_norm = nn.RMSNorm(shape.state_dim, config.norm_eps) if shape.norm_before_fc else None
        self.register_buffer("target_ids", None, persistent=False)
        self._target: tuple[Transformer, ...] = ()

    def borrow(self, target: Transformer) -> None:
        """Use the target's embedding or output layer if the head has none."""
        self._target = (target,)  # in a tuple, so that it is no submodule

    def fused(self, states: Tensor) -> Tensor:
        """Combine the target's states, `[..., state_dim]`, to the head's, `[..., dim]`."""
        if not self.is_third:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm:
            parts = states.split(self.shape.target_dim, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states)

    def advance(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Slots) -> Tensor:
        """Return the next states `[B, T, dim]` for `states [B, T, dim]` and the tokens `[B, T]` that followed each.
        positions: `[B, T]`, at which the cache keeps them; only their distances count."""
        embedding = self.body.tok_embeddings if self.shape.has_embedding else self._target[0].tok_embeddings
        x, embedded = states.flatten(0, 1), embedding(tokens).flatten(0, 1).to(states.dtype)
        if not self.is_third:
            x = self.fc(torch.cat([embedded, x], dim=-1))
        x, update, _ = self.body.run(x, embedded, positions, cache)
        out = (x + update).view(states.shape)
        return self.body.norm(out) if self.shape.norm_output else out

    def draft_logits(self, states: Tensor) -> Tensor:
        """Return logits of the output layer's ids: `[..., dim] -> [..., draft_vocab_size]`."""
        if self.is_third and not self.shape.norm_output:
            states = self.body.norm(states)
        if self.body.output is not None:
            return self.body.output(states)
        target = self._target[0]
        return target.logits(states.to(target.dtype))

    def logits(self, states: Tensor) -> Tensor:
        """Return logits of the target's ids, `[..., vocab_size]`: minus infinity for ids that the head lacks."""
        known = self.draft_logits(states)
        if self.target_ids is None:
            return known
        logits = known.new_full((*known.shape[:-1], self.shape.config.vocab_size), float("-inf"))
        logits[..., self.target_ids] = known
        return logits
