"""Medusa heads (arXiv 2401.10774): each guesses the token at one distance, from one hidden state of the target."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from models.llama import Head, Linear


@dataclass(frozen=True)
class MedusaShape:
    """Shape of Medusa heads: n_layer residual blocks each; dim and vocab_size are the target's. own_output: False if
    the heads use the target's output layer."""

    n_head: int
    n_layer: int
    dim: int
    vocab_size: int
    own_output: bool = True


class ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Heads, of which number i guesses the token at position t + 2 + i from the target's hidden state at position t.
    The names of the state dict are the published ones. `heads[i](hidden [..., dim])` gives logits `[..., vocab_size]`,
    or without output layers the input of the target's."""

    def __init__(self, shape: MedusaShape) -> None:
        blocks = [[ResidualBlock(shape.dim) for _ in range(shape.n_layer)] for _ in range(shape.n_head)]
        own = shape.own_output
        outputs = [[Head(shape.dim, shape.vocab_size, bias=False)] if own else [] for _ in blocks]
        super().__init__(nn.Sequential(*head, *output) for head, output in zip(blocks, outputs, strict=True))
        self.shape = shape
