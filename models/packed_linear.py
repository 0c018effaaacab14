"""Linear layers whose weights are stored once in oneDNN's blocked layout: the CPU's fast path at small batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.llama import Transformer

# Only a hint for the choice of block sizes; the packed weight serves any number of rows.
TYPICAL_ROWS = 32


class PackedLinear(nn.Module):
    """`y = x W^T + b` for `weight [d_out, d_in]`, repacked. Same result as nn.Linear up to rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), TYPICAL_ROWS)
        self.register_buffer("weight", packed, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether this PyTorch build has the packed kernel for `weight`'s device and dtype."""
    supported = weight.device.type == "cpu" and weight.dtype == torch.float32
    return supported and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(module: nn.Module) -> None:
    """Replace every packable nn.Linear below `module`, releasing its original weight."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and can_pack(child.weight):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)


def pack_model(model: Transformer) -> None:
    """Pack all linear layers of a Transformer; a tied head gets a packed copy, the embedding stays."""
    if model.output is None and can_pack(model.tok_embeddings.weight):
        model.output = PackedLinear(model.tok_embeddings.weight, None)
    pack_linears(model)
