"""Medusa heads as they are published: numbered tensors."""

import re

from models.checkpoints.hf_rules import positive
from models.config import ModelConfig
from models.heads.files import HeadFiles, Kind
from models.heads.medusa import MedusaHeads, MedusaShape

NAMES = r"\d+\.\d+\.(linear\.)?(weight|bias)"


def medusa_shape(files: HeadFiles, target: ModelConfig) -> MedusaShape:
    """Return the shape of Medusa heads: as many as the file has, or as the config says if that is more. The config is
    often left at its default."""
    names = [name for name in files.tensors if re.fullmatch(NAMES, name)]
    in_file = 1 + max(int(name.split(".")[0]) for name in names)
    n_head = max(positive(files.values, "medusa_num_heads", files.where, in_file), in_file)
    n_layer = positive(files.values, "medusa_num_layers", files.where, 1)
    has_output = any(name.count(".") == 2 for name in names)
    return MedusaShape(n_head, n_layer, target.dim, target.vocab_size, has_output)


MEDUSA = Kind(NAMES, medusa_shape, MedusaHeads)
