"""Published heads: find them, check them against the target that they were trained for, and load them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError, flag
from models.checkpoints.convert import DTYPES, Part, SourceTensor, check_names, match_parts, read_stacked, source_parts
from models.checkpoints.manifest import CONFIG
from models.checkpoints.model_source import ModelSource
from models.checkpoints.source_weights import open_tensors
from models.config import ModelConfig, read_config
from models.heads.eagle import EagleHead, EagleShape
from models.heads.medusa import MedusaHeads, MedusaShape
from models.hf_config import positive
from models.packed_linear import pack_linears
from models.quantize import quantize_linears

# Stems and suffixes of files of weights.
FILES = [("medusa_lm_head", ".safetensors"), ("medusa_lm_head", ".pt"), ("model", ".safetensors")]
FILES += [("pytorch_model", ".bin")]
LAYOUTS = {"medusa": "Medusa's", "eagle": "EAGLE-1's, -2's or -3's"}
# Maps of vocabularies (d2t: the target's id minus the head's; t2d: which of the target's ids the head has), and tensors
# that training leaves beside the head.
NO_WEIGHTS = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")
# A file with one of these tensors is EAGLE-3's, and needs the others.
OF_EAGLE_3 = {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight", "d2t", "t2d"}
# An EAGLE head has layers of Llama without windows, whatever its config.json copies from its target's.
AS_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": None}
AS_LLAMA |= {"attention_bias": False, "sliding_window": None, "layer_types": None}
FIX = f"name a head for this target ({flag('draft_model')}), downloaded whole, with its own {CONFIG}"


@dataclass(frozen=True, kw_only=True)
class HeadSource(ModelSource):
    """A head that can be loaded; `config` is of an EAGLE head's layers, of Medusa heads the target's."""

    shape: MedusaShape | EagleShape

    @property
    def has_text(self) -> bool:
        """False: a head has no tokenizer, its tokens are the target's."""
        return False

    @property
    def most_drafts(self) -> int:
        return self.shape.n_head if isinstance(self.shape, MedusaShape) else super().most_drafts

    @property
    def borrowed(self) -> tuple[str, ...]:
        if isinstance(self.shape, MedusaShape):
            return () if self.shape.own_output else ("output layer",)
        lacks = {"embedding": not self.shape.own_embedding, "output layer": self.shape.draft_vocab_size is None}
        return tuple(part for part, is_lacking in lacks.items() if is_lacking)

    @property
    def n_weights(self) -> int:
        return sum(x.numel() for x in _on_meta(self.shape).parameters())

    def load(self, **how: Any) -> Any:
        """Load a MedusaHeads or an EagleHead, whole on every rank. how: device, dtype, prepack and quantize (of an
        EAGLE head's layers) of `load_model`; the rest is ignored."""
        device, dtype = how["device"], how["dtype"]
        tensors = _open(Path(self.path))
        head = _on_meta(self.shape).eval().requires_grad_(False)
        matched = match_parts(Path(self.path), tensors, head_parts(self.shape), NO_WEIGHTS, FIX)
        weights = {name: read_stacked(name, stacked, dtype).to(device) for name, stacked in matched.items()}
        head.load_state_dict(weights, assign=True)
        if isinstance(head, EagleHead):
            ids = _target_ids(tensors, self.config.vocab_size, head.shape.draft_vocab_size)
            head.target_ids = None if ids is None else ids.to(device)
            if how.get("quantize"):
                quantize_linears(head.body.layers, how["quantize"])
        if how.get("prepack", True):
            pack_linears(head)
        return head


def find_head(path: str, kind: str, target: ModelConfig) -> HeadSource:
    """Find the head of a kind at `path`, a folder or the weights in one. Reads headers, and the maps of vocabularies.
    Raises CheckpointError for files that are missing or damaged, another layout, and whatever does not fit `target`."""
    weights, tensors = Path(path), _open(Path(path))
    folder = weights if weights.is_dir() else weights.parent
    values = read_config(folder / CONFIG)
    names = tensors.keys()
    is_medusa = bool(names) and all(re.fullmatch(r"\d+\.\d+\.(linear\.)?(weight|bias)", name) for name in names)
    layout = "medusa" if is_medusa else "eagle" if {"fc.weight", "layers.0.self_attn.q_proj.weight"} & names else None
    if layout != kind:
        seen = f"{LAYOUTS[layout]} layout" if layout else ", ".join(sorted(names)[:4])
        raise CheckpointError("the head has another layout", weights, seen, f"{LAYOUTS[kind]} layout", FIX)
    make = _medusa_shape if is_medusa else _eagle_shape
    shape = make(folder / CONFIG, values, tensors, target)
    parts = head_parts(shape)
    if isinstance(shape, EagleShape):
        maps = set() if shape.draft_vocab_size in (None, shape.config.vocab_size) else {"d2t"}
        check_names(weights, tensors, {name for stacked in parts.values() for name, _ in stacked} | maps, FIX)
        _check_sizes(folder / CONFIG, values, shape, target)
        _target_ids(tensors, target.vocab_size, shape.draft_vocab_size)
    match_parts(weights, tensors, parts, NO_WEIGHTS, FIX)
    config = shape.config if isinstance(shape, EagleShape) else target
    return HeadSource(path, "head", config, folder.resolve().name, shape=shape)


def head_parts(shape: MedusaShape | EagleShape) -> dict[str, tuple[Part, ...]]:
    """Return the published tensors, with shapes, that are stacked on dim 0 to each tensor of a head's state dict."""
    stacks = source_parts(replace(shape.config, tie_embeddings=False)) if isinstance(shape, EagleShape) else {}
    parts = dict[str, tuple[Part, ...]]()
    for name, x in _on_meta(shape).state_dict().items():
        own = name.removeprefix("body.")
        stacked, rest = stacks.get(own, ((own, ()),)), tuple(x.shape[1:])
        rows = [x.shape[0]] if len(stacked) == 1 else [size[0] for _, size in stacked]
        parts[name] = tuple(
            (part.removeprefix("model."), (n, *rest)) for (part, _), n in zip(stacked, rows, strict=True)
        )
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


def _open(path: Path) -> dict[str, SourceTensor]:
    """Return tensors by name; `midlayer` (EAGLE-3) and names below `model` are renamed to a common layout."""
    if not path.exists():
        raise CheckpointError("there is no such head", flag("draft_model"), path, "a folder, or the weights in it", FIX)
    folder, names = (path, FILES) if path.is_dir() else (path.parent, [(path.stem, path.suffix)])
    tensors = open_tensors(folder, names, (*DTYPES, torch.int64, torch.bool))
    return {re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model.")): x for name, x in tensors.items()}


def _on_meta(shape: MedusaShape | EagleShape) -> MedusaHeads | EagleHead:
    with torch.device("meta"):
        return MedusaHeads(shape) if isinstance(shape, MedusaShape) else EagleHead(shape)


def _medusa_shape(
    where: Path, values: Mapping[str, Any], tensors: Mapping[str, SourceTensor], target: ModelConfig
) -> MedusaShape:
    """Return the shape of Medusa heads: as many as the file has, or more if the config, often left at its default, says
    so."""
    in_file = 1 + max(int(name.split(".")[0]) for name in tensors)
    n_head = max(positive(values, "medusa_num_heads", str(where), in_file), in_file)
    n_layer = positive(values, "medusa_num_layers", str(where), 1)
    own_output = any(name.count(".") == 2 for name in tensors)
    return MedusaShape(n_head, n_layer, target.dim, target.vocab_size, own_output)


def _eagle_shape(
    where: Path, values: Mapping[str, Any], tensors: Mapping[str, SourceTensor], target: ModelConfig
) -> EagleShape:
    own = values.get("transformer_layer_config") or values
    if not isinstance(own, dict):
        raise CheckpointError("the head's layers are not described", where, repr(own)[:80], "a JSON object", FIX)
    config = ModelConfig.from_hf({**own, **AS_LLAMA}, where=str(where))
    config = replace(config, qkv_bias="layers.0.self_attn.q_proj.bias" in tensors)
    names, vocab_size = tensors.keys(), config.vocab_size
    is_third = not OF_EAGLE_3.isdisjoint(names)
    # A head of another width, or with other ids, cannot borrow the target's embedding or output layer.
    n_draft = positive(values, "draft_vocab_size", str(where), vocab_size)
    is_wide = is_third and config.dim != target.dim
    own_embedding = is_wide or "embed_tokens.weight" in names
    own_output = is_wide or n_draft != vocab_size or not names.isdisjoint({"lm_head.weight", "d2t"})
    flags = {}
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if not isinstance(given := values.get(key), (bool, type(None))):
            what, seen = "a setting of the head is no truth value", repr(given)[:80]
            raise CheckpointError(what, f"{where}: {key}", seen, "true or false", FIX)
        flags[key] = bool(given)
    return EagleShape(
        config,
        target.dim,
        draft_vocab_size=n_draft if own_output else None,
        inputs_of=_inputs_of(where, values, target.n_layer) if is_third else (),
        own_embedding=own_embedding,
        fc_bias="fc.bias" in tensors,
        **(flags if is_third else {}),
    )


def _check_sizes(where: Path, values: Mapping[str, Any], shape: EagleShape, target: ModelConfig) -> None:
    """Raise CheckpointError if the head is of another width or vocabulary than the target."""
    config, is_whole = shape.config, shape.own_embedding and shape.draft_vocab_size is not None
    key, width = "hidden_size", config.dim
    if shape.inputs_of and is_whole:
        key, width = "target_hidden_size", values.get("target_hidden_size") or config.dim
    sizes = (("vocab_size", config.vocab_size, target.vocab_size), (key, width, target.dim))
    for key, seen, required in sizes:
        if seen != required:
            raise CheckpointError(f"the head's {key} is not the target's", where, repr(seen), required, FIX)


def _inputs_of(where: Path, values: Mapping[str, Any], n_layer: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    nested = values.get("eagle_config")
    given = values.get(key) or (nested.get(key) if isinstance(nested, dict) else None) or [2, n_layer // 2, n_layer - 3]
    layers = given if isinstance(given, list) else [given]
    if not all(type(i) is int and 0 <= i <= n_layer for i in layers) or len({*layers}) < len(layers):
        required = f"different layers of the target, 0 to {n_layer}"
        raise CheckpointError("the head reads layers that the target has not", f"{where}: {key}", given, required, FIX)
    return tuple(sorted(layers))


def _target_ids(tensors: Mapping[str, SourceTensor], vocab_size: int, n_draft: int | None) -> Tensor | None:
    """Return the target's id of each of the head's ids, `[draft_vocab_size]` int64; None if they are equal. n_draft:
    how many ids the head has, None for the target's. Raises CheckpointError for a map that gives no such ids."""
    n_draft, given = n_draft or vocab_size, tensors.get("d2t")
    if given is None:
        return None
    offsets = given.read()
    ids = offsets + torch.arange(n_draft) if offsets.shape == (n_draft,) else torch.tensor([-1])
    is_index = ids.dtype == torch.int64 and bool(((ids >= 0) & (ids < vocab_size)).all())
    if not is_index or len(ids.unique()) < n_draft:
        seen, required = f"d2t {tuple(offsets.shape)}, {offsets.dtype}", f"{n_draft} different ids below {vocab_size}"
        raise CheckpointError("the head's vocabulary is no part of the target's", given.file, seen, required, FIX)
    return ids
