"""Linear layers with weights packed for a CPU once: for `models.kernels.linear_cpp`, or in oneDNN's blocked layout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.experts import StackedExperts, looped
from models.kernels import linear_cpp
from models.kernels.row_bits import CHUNK, multiply_rows

# Only a hint for the choice of block sizes; the packed weight serves any number of rows.
TYPICAL_ROWS = 32


class PackedLinear(nn.Module):
    """`y = x W^T + b` for `weight [d_out, d_in]`, repacked. Equals nn.Linear up to rounding.

    With both weights, chunks of prompts run in oneDNN, and fewer rows in the project's kernel.
    """

    kernel_weight: Tensor | None
    onednn_weight: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight, self.d_out = weight.detach(), len(weight)
        kernel_weight, self.bits = _packed(weight)
        in_cpp = kernel_weight is not None
        self.is_packed_twice = in_cpp and packs_twice(weight.device, weight.dtype)
        in_onednn = not in_cpp or self.is_packed_twice
        bias_dtype = torch.float32 if in_cpp else weight.dtype
        bias = None if bias is None else bias.detach().to(bias_dtype, copy=True)
        onednn_weight = None
        if in_onednn:
            onednn_weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_ROWS)
        self.register_buffer("kernel_weight", kernel_weight, persistent=False)
        self.register_buffer("onednn_weight", onednn_weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.kernel_weight  # reading a buffer takes microseconds
        if packed is not None and (not self.is_packed_twice or x.numel() < CHUNK * x.shape[-1]):
            return linear_cpp.linear(x, packed, self.bits, self.d_out, None, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        kernel = type(self), self.d_out, self.bias is None
        return multiply_rows(self.multiply, rows, kernel).view(*x.shape[:-1], self.d_out)

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x W^T + b` for `x [N, d_in]` by oneDNN."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.onednn_weight, bias, "none", [], "")


def _packed(weight: Tensor) -> tuple[Tensor | None, int]:
    """Return a weight packed for the project's kernel and its bits, or None if oneDNN is to multiply it.

    Weights in float32 that 16 bits hold are stored in these, and multiplied in float32.
    """
    if not linear_cpp.takes_shape(weight.shape):
        return None, 0
    if weight.dtype == torch.float32 and linear_cpp.multiplies_floats():
        if (rounded := _rounded_exactly(weight)) is not None:
            return linear_cpp.pack_words(rounded, linear_cpp.FLOAT_BLOCK), 16
        return linear_cpp.pack_words(weight, linear_cpp.FLOAT_BLOCK), 32
    if weight.dtype == torch.bfloat16 and linear_cpp.multiplies_bfloat16():
        return linear_cpp.pack_words(weight), 16
    return None, 0


def _rounded_exactly(weight: Tensor) -> Tensor | None:
    """Return float32 weights in bfloat16; None if that rounds any of them."""
    rounded = weight.bfloat16()
    pieces = zip(weight.split(1024), rounded.split(1024), strict=True)  # a whole copy in float32 would be large
    return rounded if all(torch.equal(piece, half.float()) for piece, half in pieces) else None


class PaddedLinear(PackedLinear):
    """`PackedLinear` of any shape: zeros fill the last blocks of the project's kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._n_out, d_in = weight.shape
        missing, self._padding = -self._n_out % linear_cpp.BLOCK, -d_in % linear_cpp.BLOCK
        bias = None if bias is None else F.pad(bias.detach(), (0, missing))
        super().__init__(F.pad(weight.detach(), (0, self._padding, 0, missing)), bias)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(F.pad(x, (0, self._padding)) if self._padding else x)
        return y if self._n_out == self.d_out else y[..., : self._n_out].contiguous()


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Return the layer for `weight [d_out, d_in]`, padded if a kernel multiplies its dtype but not its shape."""
    needs_padding = _in_cpp(weight.dtype) and not linear_cpp.takes_shape(weight.shape)
    return PaddedLinear(weight, bias) if needs_padding else PackedLinear(weight, bias)


class PackedExperts(nn.Module):
    """`StackedExperts`, packed expert by expert."""

    def __init__(self, stacked: StackedExperts) -> None:
        super().__init__()
        self.experts = nn.ModuleList(map(packed_linear, stacked.weight.chunk(stacked.n_expert)))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return looped(x, self.experts, counts)


def can_pack(device: torch.device | str, dtype: torch.dtype) -> bool:
    """True if the project or this PyTorch build has a packed kernel for weights of `dtype` on this processor."""
    if torch.device(device).type != "cpu":
        return False
    if _in_cpp(dtype):
        return True
    in_onednn = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.backends.mkldnn.is_available() and in_onednn


def _in_cpp(dtype: torch.dtype) -> bool:
    """True if the project's kernel multiplies weights of `dtype` on this processor."""
    if dtype == torch.bfloat16:
        return linear_cpp.multiplies_bfloat16()
    return dtype == torch.float32 and linear_cpp.multiplies_floats()


def packs_twice(device: torch.device | str, dtype: torch.dtype) -> bool:
    """True if weights of `dtype` may be packed both for the project's kernel and for oneDNN, whose tiles are larger."""
    has_onednn = torch.device(device).type == "cpu" and torch.backends.mkldnn.is_available()
    return dtype == torch.bfloat16 and has_onednn and torch.cpu._is_amx_tile_supported()


def pack_linears(module: nn.Module) -> None:
    """Replace every packable nn.Linear and StackedExperts below `module` and release its weight."""
    for name, child in list(module.named_children()):
        if isinstance(child, StackedExperts) and can_pack(child.weight.device, child.weight.dtype):
            setattr(module, name, PackedExperts(child))
        elif isinstance(child, nn.Linear) and can_pack(child.weight.device, child.weight.dtype):
            setattr(module, name, packed_linear(child.weight, child.bias))
        else:
            pack_linears(child)
