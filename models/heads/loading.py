"""Published heads: find them, check them against the target that they were trained for, and load them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.checkpoints.config_changes import NO_CHANGES, ConfigChanges
from models.checkpoints.convert import Part, match_parts, read_stacked, source_parts
from models.checkpoints.model_source import ModelSource
from models.config import ModelConfig
from models.heads.base import HeadShape, TransformerHead
from models.heads.dflash import DFLASH
from models.heads.eagle import EAGLE
from models.heads.files import FIX, Kind, open_head, target_ids, unfit
from models.heads.medusa import MEDUSA
from models.kernels.packed_linear import pack_linears
from models.kernels.quantize import linear_bytes, quantize_linears

# Maps of vocabularies (d2t: the target's id minus the head's; t2d: which of the target's ids the head has), and tensors
# that training leaves next to the head.
NO_WEIGHTS = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")
KINDS = {"medusa": MEDUSA, "eagle": EAGLE, "dflash": DFLASH}


@dataclass(frozen=True, kw_only=True)
class HeadSource(ModelSource):
    """A head that can be loaded. `config`: of its decoder layers, or the target's if it has none."""

    kind: Kind
    shape: Any

    def n_bytes(self, dtype: torch.dtype, quantize: str | None, of_step: bool = False) -> int:
        """Return the bytes of its weights; of_step: without tables of embeddings, which a step does not read."""
        head = self.kind.on_meta(self.shape)

        def count(kind: Any, inside: nn.Module) -> int:
            return sum(part.weight.numel() for part in inside.modules() if isinstance(part, kind))

        n_linear = count(nn.Linear, head.body.layers) if quantize and isinstance(head, TransformerHead) else 0
        n_other = sum(x.numel() for x in head.parameters()) - n_linear - of_step * count(nn.Embedding, head)
        return n_other * dtype.itemsize + (linear_bytes(n_linear, quantize) if quantize else 0)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, tensor.read()) for name, tensor in open_head(Path(self.path)).tensors.items())

    def load(self, **options: Any) -> Any:
        """Load the head, whole on every rank. options: device, dtype, prepack and quantize (of decoder layers) of
        `load_model`."""
        device, dtype, quantize = options["device"], options["dtype"], options.get("quantize")
        files = open_head(Path(self.path))
        head = self.kind.on_meta(self.shape).eval().requires_grad_(False)
        matched = match_parts(files.path, files.tensors, head_parts(head), (*NO_WEIGHTS, *self.kind.ignored), FIX)
        weights = {name: read_stacked(name, stacked, dtype).to(device) for name, stacked in matched.items()}
        head.load_state_dict(weights, assign=True)
        if isinstance(head, TransformerHead):
            ids = target_ids(files, self.config.vocab_size, self.shape.draft_vocab_size)
            head.target_ids = None if ids is None else ids.to(device)
            if quantize:
                quantize_linears(head.body.layers, quantize)
        if options.get("prepack", True):
            pack_linears(head)
        return head


def find_head(path: str, kind: str, target: ModelConfig, changes: ConfigChanges = NO_CHANGES) -> HeadSource:
    """Find the head of a kind at `path`, a folder or the weights in one. Reads headers, and the maps of vocabularies.
    changes: of the keys of its layers' config.
    Raises CheckpointError for files that are missing or damaged, another layout, and whatever does not fit `target`;
    ConfigError for a config.json that is not understood."""
    files, known = open_head(Path(path), changes), KINDS[kind]
    if not any(re.fullmatch(known.names, name) for name in files.tensors):
        unfit(Path(path), f"tensors such as {min(files.tensors)}", f"in the layout of {kind}")
    shape, config = known.shape(files, target), target
    if isinstance(shape, HeadShape):
        config = shape.config
        width = "hidden_size or target_hidden_size", shape.target_dim, target.dim
        for name, size, expected in (("vocab_size", config.vocab_size, target.vocab_size), width):
            if size != expected:
                unfit(f"{files.where}: {name}", size, f"the target's, {expected}")
        target_ids(files, target.vocab_size, shape.draft_vocab_size)
    match_parts(files.path, files.tensors, head_parts(known.on_meta(shape)), (*NO_WEIGHTS, *known.ignored), FIX)
    name, is_changed = Path(files.where).parent.resolve().name, changes != NO_CHANGES
    limits: dict[str, Any] = {"most_drafts": shape.most_drafts, "borrowed": shape.borrowed}
    return HeadSource(path, "head", config, name, is_changed=is_changed, kind=known, shape=shape, **limits)


def head_parts(head: nn.Module) -> dict[str, tuple[Part, ...]]:
    """Return the published tensors, with shapes, that are stacked on dim 0 to each tensor of a head's state dict."""
    stacks = dict[str, tuple[Part, ...]]()
    if isinstance(head, TransformerHead):
        stacks = source_parts(replace(head.body.config, tie_embeddings=False))
    parts = dict[str, tuple[Part, ...]]()
    for name, x in head.state_dict().items():
        plain = name.removeprefix("body.")
        stacked = stacks.get(plain, ((plain, ()),))
        rows = [x.shape[0]] if len(stacked) == 1 else [size[0] for _, size in stacked]
        names = (part.removeprefix("model.") for part, _ in stacked)
        parts[name] = tuple((part, (n, *x.shape[1:])) for part, n in zip(names, rows, strict=True))
    return parts


def published(head: nn.Module) -> dict[str, Tensor]:
    """Return a head's tensors by the names under which heads are published."""
    state, tensors = head.state_dict(), dict[str, Tensor]()
    for name, stacked in head_parts(head).items():
        rows = [size[0] for _, size in stacked]
        tensors |= {part: x for (part, _), x in zip(stacked, state[name].split(rows), strict=True)}
    if isinstance(head, TransformerHead) and head.target_ids is not None:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.body.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, 1)
    return tensors
