"""EAGLE heads: a decoder layer or a few that draft from the target's hidden states and the tokens that followed them.

EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858) continue the target's last hidden state and use its output layer.
EAGLE-3 (2503.01840) reads the inputs of three of the target's layers. It has an output layer, often for fewer tokens.
P-EAGLE (2602.01469) is an EAGLE-3 that drafts all positions in parallel, after learned states.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kv_cache.views import Slots
from models.checkpoints.hf_rules import OBJECT, UNSET, check, only, positive
from models.config import ModelConfig, unsupported
from models.heads.base import HeadShape, TransformerHead
from models.heads.files import LAYERS, LIST, HeadFiles, Kind, layer_ids, layers_config, mask_token, speculators_layers
from models.llama import Block, Linear, Step

# With any of these tensors, a head is taken for EAGLE-3.
EAGLE_3_TENSORS = {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight", "d2t", "t2d"}
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
RULES = {"speculators_model_type": only(None, "eagle3", "peagle"), "dflash_config": UNSET, LAYER_IDS: LIST}
RULES |= {"transformer_layer_config": OBJECT, "eagle_config": OBJECT} | dict.fromkeys(OPTIONS, only(None, True, False))


@dataclass(frozen=True)
class EagleShape(HeadShape):
    """The shape of an EAGLE head; of EAGLE-1 and -2 if `inputs_of` is empty. The last four fields are EAGLE-3's.

    mask_token: P-EAGLE's, at every draft position but the first; the state there is learned, too.
    norm_before_residual: the residual stream starts normalised.
    norm_before_fc: the inputs are normalised together before `fc`. fc_norm: each input is normalised separately.
    norm_output: the next step reads the normalised state, like the output layer (EAGLE-3.1).
    """

    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


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
    """The first block of EAGLE-3: attention takes the tokens' embeddings (passed as `update`) next to the stream."""

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


class EagleHead(TransformerHead):
    """A head whose state at position p stands for the tokens up to p.

    `fused` turns the target's states into the head's. `advance` takes a state and the token at p + 1, and returns the
    state at p + 1, whose `logits` predict the token at p + 2.
    """

    shape: EagleShape

    def __init__(self, shape: EagleShape) -> None:
        super().__init__(shape)
        config, self.is_third = shape.config, bool(shape.inputs_of)
        first = WideFirstBlock(config, shape.norm_before_residual) if self.is_third else PlainFirstBlock(config)
        self.body.layers[0] = first
        if not self.is_third:
            del self.body.norm
        self.fc = Linear(shape.state_dim if self.is_third else 2 * config.dim, config.dim, bias=shape.fc_bias)
        n_norm = len(shape.inputs_of) if shape.fc_norm else 0
        self.fc_norm = nn.ModuleList(nn.RMSNorm(shape.target_dim, config.norm_eps) for _ in range(n_norm))
        self.input_norm = nn.RMSNorm(shape.state_dim, config.norm_eps) if shape.norm_before_fc else None
        self.mask_hidden = None
        if shape.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, shape.state_dim))

    def fused(self, states: Tensor) -> Tensor:
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
        x, embedded = states.flatten(0, 1), self.embed(tokens, states.dtype)
        if not self.is_third:
            x = self.fc(torch.cat([embedded, x], dim=-1))
        x, update, _ = self.body.run(x, embedded, self.body.begin(positions, cache, x.dtype, self.see))
        out = (x + update).view(states.shape)
        return self.body.norm(out) if self.shape.norm_output else out

    def draft_logits(self, states: Tensor) -> Tensor:
        return super().draft_logits(self.body.norm(states) if self.is_third and not self.shape.norm_output else states)


def eagle_shape(files: HeadFiles, target: ModelConfig) -> EagleShape:
    """Return the shape of an EAGLE head. Raises ConfigError, CheckpointError for a config that is not understood."""
    values, names, where = files.values, files.tensors.keys(), files.where
    check(values, RULES, where)
    if values.get("norm_before_fc") and values.get("fc_norm"):
        unsupported(f"{where}: fc_norm", "norm_before_fc, too", "the only norm of the inputs")
    if values.get("transformer_layer_config"):
        config, windows = speculators_layers(files)
    else:  # has layers of Llama without windows, whatever the config copies from the target's
        config, windows = layers_config(files, values, "llama", where), ()
    is_third = not EAGLE_3_TENSORS.isdisjoint(names)
    is_parallel = values.get("speculators_model_type") == "peagle" or "mask_hidden" in names
    # A head of another width, or with other ids, cannot borrow the target's embedding or output layer.
    n_draft = positive(values, "draft_vocab_size", where, config.vocab_size)
    is_wide = is_third and config.dim != target.dim
    has_output = is_wide or n_draft != config.vocab_size or not names.isdisjoint({"lm_head.weight", "d2t"})
    return EagleShape(
        config,
        positive(values, "target_hidden_size", where, config.dim) if is_third else config.dim,
        draft_vocab_size=n_draft if has_output else None,
        inputs_of=_inputs_of(files, target.n_layer) if is_third else (),
        has_embedding=is_wide or "embed_tokens.weight" in names,
        mask_token=mask_token(values, config.vocab_size, where) if is_parallel else None,
        windows=windows,
        fc_bias="fc.bias" in names,
        **dict[str, Any]((option, is_third and bool(values.get(option))) for option in OPTIONS),
    )


def _inputs_of(files: HeadFiles, n_layer: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs an EAGLE-3 head reads, ascending. Raises CheckpointError, ConfigError."""
    check(inner := files.values.get("eagle_config") or {}, RULES, f"{files.where}: eagle_config")
    layers = files.values.get(LAYER_IDS) or inner.get(LAYER_IDS) or [2, n_layer // 2, n_layer - 3]
    return layer_ids(layers, n_layer, f"{files.where}: {LAYER_IDS}")


EAGLE = Kind(LAYERS, eagle_shape, EagleHead)
