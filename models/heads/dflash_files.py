"""DFlash heads as their authors (arXiv 2602.06036) and `speculators` publish them."""

from dataclasses import replace
from typing import Any

from models.checkpoints.hf_rules import OBJECT, UNSET, Rule, Values, check, only, positive
from models.config import ModelConfig, unsupported
from models.heads.dflash import DFlashHead, DFlashShape
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

LAYER_IDS, FLAGS = "aux_hidden_state_layer_ids", ("sliding_window_non_causal", "sample_from_anchor")
RULES = {"speculators_model_type": only(None, "dflash"), "dflash_config": OBJECT}
SPECULATORS: dict[str, Rule] = {"transformer_layer_config": OBJECT, "dflash_config": UNSET, LAYER_IDS: LIST}
SPECULATORS |= dict.fromkeys(FLAGS, only(None, True, False))
# The authors' options stand in `dflash_config` or beside it. Those that change embeddings or logits have one value.
OPTIONS = {"target_layer_ids": LIST, "final_logit_softcapping": only(None, 0, 0.0)}
OPTIONS |= dict.fromkeys(("output_multiplier", "input_embedding_scale"), only(None, 1, 1.0))
SIZES = ("mask_token_id", "block_size", "num_target_layers")
AUTHORS = {"architectures": only(None, ["DFlashDraftModel"]), "model_type": only(None, "qwen3"), **OPTIONS}
AUTHORS |= dict.fromkeys(("transformer_layer_config", LAYER_IDS), UNSET) | dict.fromkeys(FLAGS, only(None, False))


def dflash_shape(files: HeadFiles, target: ModelConfig) -> DFlashShape:
    """Return the shape of a DFlash head, which borrows the target's embedding, and its output layer for all its ids.

    Raises ConfigError, CheckpointError for a config that is not understood or does not fit the target.
    """
    check(files.values, RULES, files.where)
    if files.values.get("speculators_model_type"):
        return _of_speculators(files, target.n_layer)
    if files.values.get("dflash_config") is not None:
        return _of_authors(files, target.n_layer)
    unfit(files.where, "no dflash_config", "the layout of dflash")


def _of_speculators(files: HeadFiles, n_layer: int) -> DFlashShape:
    values, where = files.values, files.where
    check(values, SPECULATORS, where)
    config, windows = speculators_layers(files)
    n_draft = positive(values, "draft_vocab_size", where, config.vocab_size)
    is_non_causal, drafts_anchor = (bool(values.get(name)) for name in FLAGS)
    ids = layer_ids(values.get(LAYER_IDS) or [2, n_layer // 2, n_layer - 3], n_layer, f"{where}: {LAYER_IDS}")
    n_output = None if n_draft == config.vocab_size else n_draft
    masks = {"is_causal": not is_non_causal, "drafts_anchor": drafts_anchor}
    return _shape(config, values, where, 8, draft_vocab_size=n_output, inputs_of=ids, windows=windows, **masks)


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


DFLASH = Kind(LAYERS, dflash_shape, DFlashHead, ignored=("embed_tokens.weight", "lm_head.weight"))
