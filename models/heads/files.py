"""Files of a published head: tensors under common names, the values of config.json, and what all kinds read there."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import CheckpointError, flag, refuse
from models.checkpoints.config_changes import NO_CHANGES, ConfigChanges
from models.checkpoints.convert import SourceTensor
from models.checkpoints.hf_config import config_from_hf, read_config
from models.checkpoints.hf_rules import Values, check, of_type, only, positive
from models.checkpoints.manifest import CONFIG
from models.checkpoints.source_weights import open_weights
from models.config import ModelConfig, unsupported

# Files of weights in a head's folder, the first of which is read.
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LAYERS = r"layers\.\d+\..*"  # tensors of decoder layers
# Keys that heads read in another way than models do, or do not read.
PLAIN: dict[str, Any] = {"eos_token_id": None, "attention_bias": False, "mlp_bias": False}
PLAIN |= {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
LAYER_TYPES = ("full_attention", "sliding_attention")
LIST = of_type("a list or null", list, type(None))
FIX = f"name a head for this target ({flag('draft_model')}), downloaded whole, with its {CONFIG}"
unfit = partial(refuse, fix=FIX, error=CheckpointError)


@dataclass(frozen=True)
class HeadFiles:
    """A published head. path: the folder or file that was named; where: its config.json; changes: of its layers' keys
    there."""

    path: Path
    where: str
    values: Values
    tensors: Mapping[str, SourceTensor]
    changes: ConfigChanges


@dataclass(frozen=True)
class Kind:
    """A kind of heads. names: a pattern that some of its tensors match; ignored: copies of the target's tensors.

    shape: reads the head's shape, for a target. Raises ConfigError, CheckpointError. build: makes a head of a shape.
    """

    names: str
    shape: Callable[[HeadFiles, ModelConfig], Any]
    build: Callable[[Any], nn.Module]
    ignored: tuple[str, ...] = ()

    def on_meta(self, shape: Any) -> nn.Module:
        """Return a head of a shape on the meta device."""
        with torch.device("meta"):
            return self.build(shape)


def open_head(path: Path, changes: ConfigChanges = NO_CHANGES) -> HeadFiles:
    """Open a folder, or the weights in it. Reads headers. Raises CheckpointError, ConfigError. `midlayer` (EAGLE-3) and
    names below `model` are renamed to a common layout."""
    folder, names = (path, FILES) if path.is_dir() else (path.parent, (path.name,))
    for file in map(Path, names if path.exists() else ()):
        if found := open_weights(folder, file.stem, file.suffix):
            renamed = {re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model.")): x for name, x in found.items()}
            return HeadFiles(path, str(folder / CONFIG), read_config(folder / CONFIG), renamed, changes)
    what = "the folder has no weights of a head" if path.is_dir() else "there is no such head"
    unfit("draft_model", path, f"{' or '.join(FILES)}, or the folder of it", what)


def layers_config(files: HeadFiles, layers: Values, model_type: str, where: str) -> ModelConfig:
    """Return the shape of decoder layers of Llama or Qwen3; biases and norms go by the tensors. Raises ConfigError."""
    given = {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type}
    config = config_from_hf(files.changes.apply({**layers, **PLAIN, **given}, where), where=where)
    q, o, up = (f"layers.0.{name}_proj.bias" in files.tensors for name in ("self_attn.q", "self_attn.o", "mlp.up"))
    qk_norm = "layers.0.self_attn.q_norm.weight" in files.tensors
    return replace(config, qkv_bias=q, wo_bias=o, mlp_bias=up, qk_norm=qk_norm)


def speculators_layers(files: HeadFiles) -> tuple[ModelConfig, tuple[int | None, ...]]:
    """Return the shape and windows of the layers of a head in the layout of `speculators`. Raises ConfigError."""
    layers, where = files.values.get("transformer_layer_config") or {}, f"{files.where}: transformer_layer_config"
    check(layers, {"model_type": only(*ARCHITECTURES)}, where)
    config = layers_config(files, layers, layers.get("model_type", "qwen3"), where)
    return config, layer_windows(layers, config.n_layer, where)


def layer_windows(layers: Values, n_layer: int, where: str) -> tuple[int | None, ...]:
    """Return each layer's `sliding_window`, None for full attention; empty if all are full. Raises ConfigError."""
    types = layers.get("layer_types") or ["full_attention"] * n_layer
    if not isinstance(types, list) or len(types) != n_layer or not {*map(str, types)} <= {*LAYER_TYPES}:
        required = f"{' or '.join(LAYER_TYPES)} for each of {n_layer} layers"
        unsupported(f"{where}: layer_types", types, required)
    has_window = "sliding_attention" in types
    check(layers, {"use_sliding_window": only(None, has_window)}, where)  # without types, transformers makes some up
    window = positive(layers, "sliding_window", where) if has_window else None
    return tuple(window if kind == "sliding_attention" else None for kind in types) if has_window else ()


def layer_ids(ids: Any, last: int, where: str) -> tuple[int, ...]:
    """Return layers of the target, ascending. Raises CheckpointError unless they are different, from 0 to `last`."""
    if not ids or not all(type(i) is int and 0 <= i <= last for i in ids) or len({*ids}) < len(ids):
        unfit(where, ids, f"different layers of the target, 0 to {last}")
    return tuple(sorted(ids))


def mask_token(values: Values, vocab_size: int, where: str) -> int:
    """Return `mask_token_id`. Raises CheckpointError unless it is in the vocabulary."""
    token = values.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        unfit(f"{where}: mask_token_id", token, f"0 <= id < {vocab_size}")
    return token


def target_ids(files: HeadFiles, vocab_size: int, n_draft: int | None) -> Tensor | None:
    """Return the target's id of each of the head's `n_draft` ids, `[n_draft]` int64; None if they are equal. n_draft:
    None for the target's ids. Raises CheckpointError for another map, or none where ids differ."""
    n_draft, d2t = n_draft or vocab_size, files.tensors.get("d2t")
    if d2t is None and n_draft == vocab_size:
        return None
    if d2t and (d2t.shape, d2t.dtype) == ((n_draft,), torch.int64):
        ids = d2t.read() + torch.arange(n_draft)
        if bool(((ids >= 0) & (ids < vocab_size)).all()) and len(ids.unique()) == n_draft:
            return ids
    seen, required = f"d2t {d2t.shape}, {d2t.dtype}" if d2t else "no d2t", f"{n_draft} different ids below {vocab_size}"
    unfit(files.path, seen, required, "the head's vocabulary is no part of the target's")
