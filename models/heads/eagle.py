"""EAGLE heads: one decoder layer, or few, over the target's hidden states and the tokens that followed them.

EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858) go on from the target's last hidden state and use its head; EAGLE-3
(2503.01840) reads the inputs of three of its layers, and has a head of its own, often of fewer tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kv_cache.views import Slots
from models.config import ModelConfig
from models.llama import Block, Head, Linear, Step, Transformer


@dataclass(frozen=True)
class EagleShape:
    """config: of the head's own layers, with the target's vocabulary. draft_vocab_size: tokens that its own output
    layer knows; None: it uses the target's. inputs_of: the layers of the target whose inputs it reads, ascending, all
    `target_dim` wide; none for EAGLE-1 and -2, which read the last hidden state. own_embedding: else the target's.

    Of EAGLE-3, norm_before_residual: the residual stream starts normalised; fc_norm: each input is normalised before
    `fc`; norm_before_fc: all of them at once; norm_output: the next step reads what the output layer does, normalised.
    """

    config: ModelConfig
    target_dim: int
    draft_vocab_size: int | None = None
    inputs_of: tuple[int, ...] = ()
    own_embedding: bool = True
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def state_dim(self) -> int:
        """Width of what it reads of the target."""
        return self.target_dim * max(1, len(self.inputs_of))


class PlainFirstBlock(Block):
    """EAGLE-1's: attention takes the residual stream as it is."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        del self.attention_norm

    def forward(self, x: Tensor, update: Tensor, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        attended = self.attention(x, step, layer)
        x, normed = step.pointwise.add_norm(x, attended, self.ffn_norm.weight, self.norm_eps)
        return x, self.feed_forward(normed, step)


class WideFirstBlock(Block):
    """EAGLE-3's: attention takes the tokens' embeddings, handed over as the first `update`, beside the stream."""

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
    """A state at position p stands for the tokens up to p; `advance` over it and the token at p + 1 gives a state for
    the tokens up to p + 1, whose `logits` are those of the token at p + 2. `fused` makes states of the target's.

    `body` has the layers, the norm and the output layer; where it lacks an embedding or an output layer, `target`'s
    are used, which `borrow` names. target_ids: which id of the target's each of the output layer's is,
    `[draft_vocab_size]` int64; None where all are the same.
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
        if not shape.own_embedding:
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
        """Use that model's embedding or output layer where there is no own one; they stay its own."""
        self._target = (target,)  # in a tuple: no submodule

    def fused(self, states: Tensor) -> Tensor:
        """The states `[..., dim]` that stand for the target's, `[..., state_dim]`."""
        if not self.is_third:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm:
            parts = states.split(self.shape.target_dim, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states)

    def advance(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: Slots) -> Tensor:
        """The states `[B, T, dim]` behind `states [B, T, dim]` and the tokens `[B, T]` that followed each; positions
        `[B, T]`: where they are kept, of which only the distances count."""
        embedding = self.body.tok_embeddings if self.shape.own_embedding else self._target[0].tok_embeddings
        x, embedded = states.flatten(0, 1), embedding(tokens).flatten(0, 1).to(states.dtype)
        if not self.is_third:
            x = self.fc(torch.cat([embedded, x], dim=-1))
        x, update, _ = self.body.run(x, embedded, positions, cache)
        out = (x + update).view(states.shape)
        return self.body.norm(out) if self.shape.norm_output else out

    def draft_logits(self, states: Tensor) -> Tensor:
        """Of the ids that the output layer knows: `[..., dim] -> [..., draft_vocab_size]`."""
        if self.is_third and not self.shape.norm_output:
            states = self.body.norm(states)
        if self.body.output is not None:
            return self.body.output(states)
        target = self._target[0]
        return target.logits(states.to(target.dtype))

    def logits(self, states: Tensor) -> Tensor:
        """Of the target's ids: minus infinity for those that the output layer does not know."""
        known = self.draft_logits(states)
        if self.target_ids is None:
            return known
        logits = known.new_full((*known.shape[:-1], self.shape.config.vocab_size), float("-inf"))
        logits[..., self.target_ids] = known
        return logits
