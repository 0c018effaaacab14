"""Linear layers with weights packed for a CPU once: for `models.kernels.linear_cpp`, or in oneDNN's blocked layout."""

import torch
from torch import Tensor, nn

from models.experts import StackedExperts, looped
from models.kernels import linear_cpp
from models.kernels.row_bits import multiply_rows

# Only a hint for the choice of block sizes; the packed weight serves any number of rows.
TYPICAL_ROWS = 32


class PackedLinear(nn.Module):
    """`y = x W^T + b` for `weight [d_out, d_in]`, repacked. Equals nn.Linear up to rounding."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # oneDNN multiplies with a CPU's matrix tiles; the project's kernel does not.
        in_onednn = weight.dtype != torch.bfloat16 or torch.cpu._is_amx_tile_supported()
        self.d_out = len(weight)
        self._in_cpp = not in_onednn and linear_cpp.takes(weight)
        if self._in_cpp:
            packed, bias = linear_cpp.pack_bfloat16(weight.detach()), None if bias is None else bias.float()
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), TYPICAL_ROWS)
        self.register_buffer("weight", packed, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._in_cpp:
            return linear_cpp.linear(x, self.weight, 16, self.d_out, None, self.bias)
        kernel = type(self), self.d_out, self.bias is None
        return multiply_rows(self.multiply, x.reshape(-1, x.shape[-1]), kernel).view(*x.shape[:-1], self.d_out)

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x W^T + b` for `x [N, d_in]` by oneDNN."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


class PackedExperts(nn.Module):
    """`StackedExperts`, packed expert by expert."""

    def __init__(self, stacked: StackedExperts) -> None:
        super().__init__()
        self.experts = nn.ModuleList(PackedLinear(weight, None) for weight in stacked.weight.chunk(stacked.n_expert))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return looped(x, self.experts, counts)


def can_pack(device: torch.device | str, dtype: torch.dtype) -> bool:
    """True if this PyTorch build and processor have a packed kernel for weights of `dtype`."""
    if torch.device(device).type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    native_bfloat16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or native_bfloat16


def pack_linears(module: nn.Module) -> None:
    """Replace every packable nn.Linear and StackedExperts below `module` and release its weight."""
    for name, child in list(module.named_children()):
        if not isinstance(child, (nn.Linear, StackedExperts)) or not can_pack(child.weight.device, child.weight.dtype):
            pack_linears(child)
        elif isinstance(child, StackedExperts):
            setattr(module, name, PackedExperts(child))
        else:
            setattr(module, name, PackedLinear(child.weight, child.bias))
