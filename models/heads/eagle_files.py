"""EAGLE heads as their authors and `speculators` publish them."""

from typing import Any

from models.checkpoints.hf_rules import OBJECT, UNSET, check, only, positive
from models.config import ModelConfig, unsupported
from models.heads.eagle import EagleHead, EagleShape
from models.heads.files import LAYERS, LIST, HeadFiles, Kind, layer_ids, layers_config, mask_token, speculators_layers

# With any of these tensors, a head is taken for EAGLE-3.
EAGLE_3_TENSORS = {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight", "d2t", "t2d"}
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
RULES = {"speculators_model_type": only(None, "eagle3", "peagle"), "dflash_config": UNSET, LAYER_IDS: LIST}
RULES |= {"transformer_layer_config": OBJECT, "eagle_config": OBJECT} | dict.fromkeys(OPTIONS, only(None, True, False))


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
