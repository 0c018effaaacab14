"""Medusa heads (arXiv 2401.10774): from a hidden state of the target, each guesses the token at another distance."""

import re
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoints.hf_rules import positive
from models.config import ModelConfig
from models.heads.files import HeadFiles, Kind
from models.llama import Head, Linear

NAMES = r"\d+\.\d+\.(linear\.)?(weight|bias)"


@dataclass(frozen=True)
class MedusaShape:
    """The shape of Medusa heads, of `n_layer` residual blocks each.

    most_drafts: the number of heads. state_dim: width of the target's states that the heads read. vocab_size: the
    target's. has_output: False if the heads use the target's output layer.
    """

    most_drafts: int
    n_layer: int
    state_dim: int
    vocab_size: int
    has_output: bool = True

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Parts of the target that the heads use."""
        return () if self.has_output else ("output layer",)


class ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Heads by draft position: head i guesses the token at position t + 2 + i from the target's hidden state at t.

    `heads[i](hidden [..., dim])` gives logits `[..., vocab_size]`, or the input of the target's output layer if the
    heads have none. The names of the state dict are the published ones.
    """

    def __init__(self, shape: MedusaShape) -> None:
        blocks = [[ResidualBlock(shape.state_dim) for _ in range(shape.n_layer)] for _ in range(shape.most_drafts)]
        outputs = [[Head(shape.state_dim, shape.vocab_size, bias=False)] if shape.has_output else [] for _ in blocks]
        super().__init__(nn.Sequential(*head, *output) for head, output in zip(blocks, outputs, strict=True))
        self.shape = shape


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
