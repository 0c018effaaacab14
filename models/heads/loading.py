"""Published heads: find them, check them against the target that they were trained for, and load them."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError, flag
from models.checkpoints.convert import Part, SourceTensor, check_names, match_parts, read_stacked, source_parts
from models.checkpoints.manifest import CONFIG
from models.checkpoints.model_source import ModelSource
from models.checkpoints.source_weights import open_weights
from models.config import ModelConfig, read_config
from models.heads.eagle import EagleHead, EagleShape
from models.heads.medusa import MedusaHeads, MedusaShape
from models.hf_config import positive
from models.hf_rules import OBJECT, check, of_type, only
from models.packed_linear import pack_linears
from models.quantize import quantize_linears

Values = Mapping[str, Any]
Tensors = Mapping[str, SourceTensor]
# Files of weights in a head's folder, the first of which is read.
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
# Maps of vocabularies (d2t: the target's id minus the head's; t2d: which of the target's ids the head has), and tensors
# that training leaves beside the head.
NO_WEIGHTS = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")
# With any of these tensors, a head is taken for EAGLE-3.
EAGLE_3_TENSORS = {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight", "d2t", "t2d"}
# An EAGLE head has layers of Llama without windows, whatever its config.json copies from its target's.
AS_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": None}
AS_LLAMA |= {"attention_bias": False, "mlp_bias": False, "sliding_window": None, "layer_types": None}
# What an EAGLE head's config.json may say, beside its layers.
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
RULES = {"transformer_layer_config": OBJECT, "eagle_config": OBJECT, LAYER_IDS: of_type("a list", list, type(None))}
RULES |= dict.fromkeys(OPTIONS, only(None, True, False))
FIX = f"name a head for this target ({flag('draft_model')}), downloaded whole, with its {CONFIG}"


@dataclass(frozen=True, kw_only=True)
class HeadSource(ModelSource):
    """A head that can be loaded. `config` describes an EAGLE head's layers; Medusa heads have the target's."""

    shape: MedusaShape | EagleShape

    @property
    def n_weights(self) -> int:
        return sum(x.numel() for x in _on_meta(self.shape).parameters())

    def load(self, **options: Any) -> Any:
        """Load a MedusaHeads or an EagleHead, whole on every rank. options: device, dtype, prepack and quantize (of an
        EAGLE head's layers) of `load_model`."""
        device, dtype, quantize = options["device"], options["dtype"], options.get("quantize")
        tensors = _open(Path(self.path))
        head = _on_meta(self.shape).eval().requires_grad_(False)
        matched = match_parts(Path(self.path), tensors, head_parts(self.shape), NO_WEIGHTS, FIX)
        weights = {name: read_stacked(name, stacked, dtype).to(device) for name, stacked in matched.items()}
        head.load_state_dict(weights, assign=True)
        if isinstance(head, EagleHead):
            ids = _target_ids(tensors, self.config.vocab_size, head.shape.draft_vocab_size)
            head.target_ids = None if ids is None else ids.to(device)
            if quantize:
                quantize_linears(head.body.layers, quantize)
        if options.get("prepack", True):
            pack_linears(head)
        return head


def find_head(path: str, kind: str, target: ModelConfig) -> HeadSource:
    """Find the head of a kind at `path`, a folder or the weights in one. Reads headers, and the maps of vocabularies.
    Raises CheckpointError for files that are missing or damaged, another layout, and whatever does not fit `target`."""
    weights, tensors = Path(path), _open(Path(path))
    folder = weights if weights.is_dir() else weights.parent
    where, values = str(folder / CONFIG), read_config(folder / CONFIG)
    is_medusa = all(re.fullmatch(r"\d+\.\d+\.(linear\.)?(weight|bias)", name) for name in tensors)
    if is_medusa != (kind == "medusa"):
        seen, required = "Medusa's layout" if is_medusa else f"tensors such as {min(tensors)}", f"the layout of {kind}"
        raise CheckpointError("the head has another layout", weights, seen, required, FIX)
    shape = _medusa_shape(where, values, tensors, target) if is_medusa else _eagle_shape(where, values, tensors, target)
    match_parts(weights, tensors, head_parts(shape), NO_WEIGHTS, FIX)
    config, n_head = (target, shape.n_head) if isinstance(shape, MedusaShape) else (shape.config, sys.maxsize)
    name, borrowed = folder.resolve().name, shape.borrowed
    return HeadSource(path, "head", config, name, most_drafts=n_head, borrowed=borrowed, shape=shape)


def head_parts(shape: MedusaShape | EagleShape) -> dict[str, tuple[Part, ...]]:
    """Return the published tensors, with shapes, that are stacked on dim 0 to each tensor of a head's state dict."""
    stacks = source_parts(replace(shape.config, tie_embeddings=False)) if isinstance(shape, EagleShape) else {}
    parts = dict[str, tuple[Part, ...]]()
    for name, x in _on_meta(shape).state_dict().items():
        plain = name.removeprefix("body.")
        stacked = stacks.get(plain, ((plain, ()),))
        rows = [x.shape[0]] if len(stacked) == 1 else [size[0] for _, size in stacked]
        names = (part.removeprefix("model.") for part, _ in stacked)
        parts[name] = tuple((part, (n, *x.shape[1:])) for part, n in zip(names, rows, strict=True))
    return parts


def published(head: MedusaHeads | EagleHead) -> dict[str, Tensor]:
    """Return a head's tensors by the names under which heads are published."""
    state, tensors = head.state_dict(), dict[str, Tensor]()
    for name, stacked in head_parts(head.shape).items():
        rows = [size[0] for _, size in stacked]
        tensors |= {part: x for (part, _), x in zip(stacked, state[name].split(rows), strict=True)}
    if isinstance(head, EagleHead) and head.target_ids is not None:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.shape.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, 1)
    return tensors


def _open(path: Path) -> Tensors:
    """Return tensors by name; `midlayer` (EAGLE-3) and names below `model` are renamed to a common layout."""
    folder, names = (path, FILES) if path.is_dir() else (path.parent, (path.name,))
    for file in map(Path, names if path.exists() else ()):
        if tensors := open_weights(folder, file.stem, file.suffix):
            return {re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model.")): x for name, x in tensors.items()}
    required = f"{' or '.join(FILES)}, or the folder of it"
    raise CheckpointError("there is no such head", flag("draft_model"), path, required, FIX)


def _on_meta(shape: MedusaShape | EagleShape) -> MedusaHeads | EagleHead:
    with torch.device("meta"):
        return MedusaHeads(shape) if isinstance(shape, MedusaShape) else EagleHead(shape)


def _medusa_shape(where: str, values: Values, tensors: Tensors, target: ModelConfig) -> MedusaShape:
    """Return the shape of Medusa heads: as many as the file has, or as the config says if that is more. The config is
    often left at its default."""
    in_file = 1 + max(int(name.split(".")[0]) for name in tensors)
    n_head = max(positive(values, "medusa_num_heads", where, in_file), in_file)
    n_layer = positive(values, "medusa_num_layers", where, 1)
    has_output = any(name.count(".") == 2 for name in tensors)
    return MedusaShape(n_head, n_layer, target.dim, target.vocab_size, has_output)


def _eagle_shape(where: str, values: Values, tensors: Tensors, target: ModelConfig) -> EagleShape:
    """Return the shape of an EAGLE head. Raises ConfigError for a config.json that is not understood, CheckpointError
    for missing tensors, then for another width or vocabulary than the target's."""
    check(values, RULES, where)
    layers = values.get("transformer_layer_config") or values
    config = ModelConfig.from_hf({**layers, **AS_LLAMA}, where=where)
    config = replace(config, qkv_bias="layers.0.self_attn.q_proj.bias" in tensors)
    names, is_third = tensors.keys(), not EAGLE_3_TENSORS.isdisjoint(tensors)
    # A head of another width, or with other ids, cannot borrow the target's embedding or output layer.
    n_draft = positive(values, "draft_vocab_size", where, config.vocab_size)
    is_wide = is_third and config.dim != target.dim
    has_output = is_wide or n_draft != config.vocab_size or not names.isdisjoint({"lm_head.weight", "d2t"})
    shape = EagleShape(
        config,
        target.dim,
        draft_vocab_size=n_draft if has_output else None,
        inputs_of=_inputs_of(where, values, target.n_layer) if is_third else (),
        has_embedding=is_wide or "embed_tokens.weight" in names,
        fc_bias="fc.bias" in names,
        **dict[str, Any]((option, is_third and bool(values.get(option))) for option in OPTIONS),
    )
    required = {part for parts in head_parts(shape).values() for part, _ in parts}
    check_names(Path(where).parent, tensors, required | ({"d2t"} if n_draft != config.vocab_size else set()), FIX)
    width = "target_hidden_size" if is_third else "hidden_size"
    sizes = ("vocab_size", config.vocab_size, target.vocab_size), (width, values.get(width) or config.dim, target.dim)
    for key, seen, expected in sizes:
        if seen != expected:
            raise CheckpointError(f"the head's {key} is not the target's", where, repr(seen), expected, FIX)
    _target_ids(tensors, target.vocab_size, shape.draft_vocab_size)
    return shape


def _inputs_of(where: str, values: Values, n_layer: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs an EAGLE-3 head reads, ascending. Raises CheckpointError, ConfigError."""
    check(inner := values.get("eagle_config") or {}, RULES, f"{where}: eagle_config")
    layers = values.get(LAYER_IDS) or inner.get(LAYER_IDS) or [2, n_layer // 2, n_layer - 3]
    if not all(type(i) is int and 0 <= i <= n_layer for i in layers) or len({*layers}) < len(layers):
        what, required = "the head reads layers that the target lacks", f"different layers, 0 to {n_layer}"
        raise CheckpointError(what, f"{where}: {LAYER_IDS}", layers, required, FIX)
    return tuple(sorted(layers))


def _target_ids(tensors: Tensors, vocab_size: int, n_draft: int | None) -> Tensor | None:
    """Return the target's id of each of the head's `n_draft` ids, `[n_draft]` int64; None if they are equal. n_draft:
    None for the target's ids. Raises CheckpointError for another map."""
    n_draft, d2t = n_draft or vocab_size, tensors.get("d2t")
    if d2t is None:
        return None
    if (d2t.shape, d2t.dtype) == ((n_draft,), torch.int64):
        ids = d2t.read() + torch.arange(n_draft)
        if bool(((ids >= 0) & (ids < vocab_size)).all()) and len(ids.unique()) == n_draft:
            return ids
    seen, required = f"d2t {d2t.shape}, {d2t.dtype}", f"{n_draft} different ids below {vocab_size}"
    raise CheckpointError("the head's vocabulary is no part of the target's", d2t.file, seen, required, FIX)
