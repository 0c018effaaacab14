"""DFlash heads: a few layers that draft a whole block in one forward (arXiv 2602.06036).

DSpark heads also have a bias by the token before each draft. DFlash 2 heads score the likeliest ids by that token, and
their layers have convolutions. A block's drafts are then drawn one after another (layouts: speculators 0.9).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kv_cache.views import SeenSlots, Slots
from models.checkpoints.hf_rules import OBJECT, UNSET, Rule, Values, check, only, positive
from models.config import ModelConfig, unsupported
from models.heads.base import HeadShape, TransformerHead
from models.heads.block_chain import BlockChain, CandidateSelector, ConvolvedBlock, MarkovHead
from models.heads.files import (
    LAYERS,
    LIST,
    HeadFiles,
    Kind,
    layer_ids,
    layer_windows,
    layers_config,
    mask_token,
    speculators_layers,
    unfit,
)
from models.llama import Block, Linear

LAYER_IDS, FLAGS = "aux_hidden_state_layer_ids", ("sliding_window_non_causal", "sample_from_anchor")
RULES = {"speculators_model_type": only(None, "dflash", "dspark", "dflash2"), "dflash_config": OBJECT}
SPECULATORS: dict[str, Rule] = {"transformer_layer_config": OBJECT, "dflash_config": UNSET, LAYER_IDS: LIST}
SPECULATORS |= dict.fromkeys(FLAGS, only(None, True, False))
SPECULATORS |= {"markov_head_type": only(None, "vanilla", "gated", "rnn")}
# The flag that is true by default in each layout.
USUALLY = {"dflash2": "sliding_window_non_causal", "dspark": "sample_from_anchor"}
# The authors' options stand in `dflash_config` or next to it. Those that change embeddings or logits have one value.
OPTIONS = {"target_layer_ids": LIST, "final_logit_softcapping": only(None, 0, 0.0)}
OPTIONS |= dict.fromkeys(("output_multiplier", "input_embedding_scale"), only(None, 1, 1.0))
SIZES = ("mask_token_id", "block_size", "num_target_layers")
AUTHORS = {"architectures": only(None, ["DFlashDraftModel"]), "model_type": only(None, "qwen3"), **OPTIONS}
AUTHORS |= dict.fromkeys(("transformer_layer_config", LAYER_IDS), UNSET) | dict.fromkeys(FLAGS, only(None, False))


@dataclass(frozen=True)
class DFlashShape(HeadShape):
    """The shape of a DFlash head, whose `mask_token` is set.

    block_size: tokens of a block in training: the current token, and masks after it.
    drafts_anchor: the state at the current token drafts, too, so that a block needs a mask less
        (`sample_from_anchor`).
    is_causal: in layers with a window, a token of the block sees no later token.
    is_anchored: in layers with a window, every token of the block sees the last `window` tokens before the block,
        next to the block; else it sees `window` tokens up to itself.
    markov_rank, markov_kind: of a DSpark head; 0: there is no bias.
    selector_rank, selector_top_k, n_tap, conv_group: of a DFlash 2 head, with `n_tap` taps of each convolution and
        channels that share a part of the kernel; 0: there is no selector, and there are no convolutions.
    """

    block_size: int = 16
    drafts_anchor: bool = False
    is_causal: bool = True
    is_anchored: bool = True
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    selector_rank: int = 0
    selector_top_k: int = 16
    n_tap: int = 0
    conv_group: int = 16

    @property
    def most_drafts(self) -> int:
        """The most tokens that a block drafts."""
        return self.block_size - (not self.drafts_anchor)


class DFlashHead(TransformerHead):
    """A head whose layers read the text as keys and values made of the target's states, and draft at mask tokens.

    `fused` turns the target's states into the head's, `remember` writes their entries, and `draft` runs a block after
    them: every token sees the text before the block and the whole block, also what is after it. `chain` makes the
    logits of a draft depend on the token before it; None: they do not.
    """

    shape: DFlashShape

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape)
        config = shape.config
        self.fc = Linear(shape.state_dim, config.dim, bias=False)
        self.hidden_norm = nn.RMSNorm(config.dim, config.norm_eps)
        if shape.n_tap:
            blocks = (ConvolvedBlock(config, shape.n_tap, shape.conv_group) for _ in range(config.n_layer))
            self.body.layers = nn.ModuleList(blocks)
        if shape.markov_rank:
            sizes = config.vocab_size, shape.draft_vocab_size or config.vocab_size, shape.markov_rank, config.dim
            self.markov_head = MarkovHead(*sizes, shape.markov_kind)
        if shape.selector_rank:
            sizes = config.vocab_size, config.dim, shape.selector_rank, shape.selector_top_k
            self.candidate_selector = CandidateSelector(*sizes)

    @property
    def chain(self) -> BlockChain | None:
        return getattr(self, "markov_head", None) or getattr(self, "candidate_selector", None)

    def fused(self, states: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(states))

    def remember(self, fused: Tensor, positions: Tensor, cache: Slots) -> None:
        """Write every layer's entries of the text's tokens at `positions [B, T]`. fused: `[B, T, dim]`."""
        step = self.body.begin(positions, cache, fused.dtype, see=lambda *_: ())
        for index, layer in enumerate(self.body.layers):
            assert isinstance(layer, Block)
            layer.attention.write(fused.flatten(0, 1), step, index)

    def draft(self, tokens: Tensor, positions: Tensor, cache: Slots) -> Tensor:
        """Run a block of the current `tokens [B]` and masks at `positions [B, T]`, ascending by 1.

        The cache has the entries of the text before the block; those of the block are written after them. Returns the
        normalised states `[B, n, dim]` that draft: n is T, or T - 1 without `drafts_anchor`.
        """
        assert self.shape.mask_token is not None
        block = torch.full_like(positions, self.shape.mask_token)
        block[:, 0] = tokens
        x = self.embed(block, self.hidden_norm.weight.dtype)
        step = self.body.begin(positions, cache, x.dtype, see=self.see)
        x, update, _ = self.body.run(x, torch.zeros_like(x), step)
        hidden = self.body.norm(x + update).view(*positions.shape, -1)
        return hidden if self.shape.drafts_anchor else hidden[:, 1:]

    def prepared(self, window: int | None, positions: Tensor, slots: Slots, dtype: torch.dtype) -> Any:
        """Prepare attention of a block: by the positions of the slots, since the block is not causal."""
        shape, seen, newest = self.shape, slots.positions, positions[:, -1:].expand_as(positions)
        if window and shape.is_causal:
            newest = positions
        if window and shape.is_anchored:
            seen, window = seen.masked_fill(seen < positions[:, :1] - window, -1), None
        return super().prepared(window, newest, SeenSlots(seen, slots.rows), dtype)


def dflash_shape(files: HeadFiles, target: ModelConfig) -> DFlashShape:
    """Return the shape of a DFlash head, which borrows the target's embedding, and its output layer for all its ids.
    Raises ConfigError, CheckpointError for a config that is not understood or does not fit the target."""
    check(files.values, RULES, files.where)
    if files.values.get("speculators_model_type"):
        return _of_speculators(files, target.n_layer)
    if files.values.get("dflash_config") is not None:
        return _of_authors(files, target.n_layer)
    unfit(files.where, "no dflash_config", "the layout of dflash")


def _of_speculators(files: HeadFiles, n_layer: int) -> DFlashShape:
    values, where, kind = files.values, files.where, files.values["speculators_model_type"]
    check(values, SPECULATORS, where)
    config, windows = speculators_layers(files)
    n_draft = positive(values, "draft_vocab_size", where, config.vocab_size)
    given = (USUALLY.get(kind) == name if values.get(name) is None else values[name] for name in FLAGS)
    is_non_causal, drafts_anchor = map(bool, given)
    ids = layer_ids(values.get(LAYER_IDS) or [2, n_layer // 2, n_layer - 3], n_layer, f"{where}: {LAYER_IDS}")
    n_output = None if n_draft == config.vocab_size else n_draft
    fields: dict[str, Any] = {"is_causal": not is_non_causal, "drafts_anchor": drafts_anchor}
    if kind == "dspark" and values.get("markov_rank") != 0:
        fields |= {"markov_rank": positive(values, "markov_rank", where, 256)}
        fields |= {"markov_kind": values.get("markov_head_type") or "vanilla"}
        if fields["markov_kind"] == "rnn" and not drafts_anchor:
            unsupported(f"{where}: sample_from_anchor", "false with markov_head_type rnn", "true")
    if kind == "dflash2":
        if n_output is not None:
            unsupported(f"{where}: draft_vocab_size", n_draft, f"all ids of the target, {config.vocab_size}")
        usual = {"selector_rank": 256, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}
        sizes = {name: positive(values, name, where, size) for name, size in usual.items()}
        fields |= {"n_tap": sizes.pop("conv_kernel_size"), "conv_group": sizes.pop("conv_group_size"), **sizes}
        if config.dim % fields["conv_group"]:
            unsupported(f"{where}: conv_group_size", fields["conv_group"], f"a divisor of hidden_size, {config.dim}")
    return _shape(config, values, where, 8, draft_vocab_size=n_output, inputs_of=ids, windows=windows, **fields)


def _of_authors(files: HeadFiles, n_layer: int) -> DFlashShape:
    where, inner = f"{files.where}: dflash_config", files.values["dflash_config"]
    values = {**files.values, **inner}
    check(values, AUTHORS, files.where)
    if unknown := sorted(inner.keys() - {*OPTIONS, *SIZES}):
        unsupported(where, ", ".join(unknown), f"only {', '.join((*SIZES, *OPTIONS))}")
    if (depth := values.get("num_target_layers") or n_layer) != n_layer:
        unfit(f"{files.where}: num_target_layers", depth, f"the target's, {n_layer}")
    config = layers_config(files, {**values, "is_causal": True}, "qwen3", files.where)
    windows = layer_windows(values, config.n_layer, files.where)
    # Layers with a window are causal, others are not; a single value for both would change the layers of a kind.
    kinds = {window is not None for window in windows or (None,)}
    check(values, {"is_causal": only(None, *(kinds if len(kinds) == 1 else ()))}, files.where)
    # The outputs of layers are read. The last layer's would be normalised in transformers.
    ids = _spread(config.n_layer, n_layer) if (ids := values.get("target_layer_ids")) is None else ids
    read = layer_ids(ids, n_layer - 2, f"{where}: target_layer_ids")
    if list(read) != ids:
        unfit(f"{where}: target_layer_ids", ids, "in ascending order")
    inputs_of = tuple(i + 1 for i in read)
    return _shape(config, values, where, 16, inputs_of=inputs_of, windows=windows, is_anchored=False)


def _spread(n_head_layer: int, n_layer: int) -> list[int]:
    """Return the layers that a head reads by default: as many as it has, from the target's second to third last."""
    if n_head_layer == 1:
        return [n_layer // 2]
    return [round(1 + i * (n_layer - 4) / (n_head_layer - 1)) for i in range(n_head_layer)]


def _shape(config: ModelConfig, values: Values, where: str, usual_block: int, **fields: Any) -> DFlashShape:
    block_size, mask = positive(values, "block_size", where, usual_block), mask_token(values, config.vocab_size, where)
    if block_size < 2:
        unsupported(f"{where}: block_size", block_size, "2 or more tokens")
    fields |= {"has_embedding": False, "block_size": block_size, "mask_token": mask}
    return DFlashShape(replace(config, qk_norm=True), config.dim, **fields)


# A DSpark head's confidence is not read: rows stop by the probability of drafts (`--gamma_schedule confidence`).
IGNORED = ("embed_tokens.weight", "lm_head.weight", "confidence_head.proj.weight", "confidence_head.proj.bias")
DFLASH = Kind(LAYERS, dflash_shape, DFlashHead, ignored=IGNORED)
