"""Linear layers with weights in 8 or 4 bits, over PyTorch's kernels, or `linear_cpp` on a CPU that runs it.

int8: a scale per output. Each token's activations are rounded to 8 bits with a scale per token, because the integer
kernels of CPUs (oneDNN) and GPUs (cuBLAS) multiply 8 bits by 8 bits. Sums are exact integers, so a token's bits do not
depend on the other tokens.

int4: a scale and a lowest value per group of 32 inputs (`low + scale * q`, q in 0..15). Activations are in bfloat16
(tinygemm on a CPU; on a GPU a Triton kernel, and dequantised weights for many rows), or in 8 bits in `linear_cpp`. A
group spans its smallest to its largest weight. GGUF's Q4_1 is made in this way, so a checkpoint that was expanded from
it gets its codes back; only the scales are rounded, to bfloat16.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import refuse
from common.launch import missing_launcher, run, works
from kv_cache.entries import quantize
from models.kernels import linear_cpp
from models.kernels.row_bits import multiply_rows
from models.names import SCHEMES

GROUP = 32
OPTIONS = "--quantize or --draft_weights"
INT4_LEVELS = 15
OLDEST_CAPABILITY = (8, 0)
UNIT = 4 * GROUP  # inputs whose codes a GPU's kernel reads together
INT4_DTYPE = torch.bfloat16  # of activations
INT4_ALLOWED = 1e-2  # relative error of products; rounding of bfloat16 weights is the same on both sides
FEWEST_CUDA_ROWS = 17  # cuBLAS does not multiply fewer rows in 8 bits


class QuantizedLinear(nn.Module):
    """`y = x W^T + b` with a quantised `W [d_out, d_in]`. result_dtype: of `y`, by the dtype and the device of `x`."""

    weight: Tensor
    bias: Tensor | None
    bits: int
    scale: Tensor | None
    result_dtype: Callable[[torch.dtype, torch.device], torch.dtype]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.result_dtype = lambda dtype, device: dtype
        self._on_cpu, self._d_out = runs_on_cpu(weight), len(weight)
        self._in_cpp = self._on_cpu and linear_cpp.takes_shape(weight.shape)
        bias = bias.float() if bias is not None and self._in_cpp else bias
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self._in_cpp:
            return linear_cpp.linear(x, self.weight, self.bits, self._d_out, self.scale, self.bias)
        dtype = self.result_dtype(x.dtype, x.device)
        rows, multiply = x.reshape(-1, x.shape[-1]), partial(self.multiply, dtype=dtype)
        kernel = type(self), self._d_out
        y = (multiply_rows(multiply, rows, kernel) if self._on_cpu else multiply(rows)).to(dtype)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], y.shape[-1])

    @abstractmethod
    def multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `x W^T` for `x [N, d_in]`, in `dtype` or in what PyTorch's kernel returns."""


class Int8Linear(QuantizedLinear):
    """W in int8, and x rounded to 8 bits: a scale per row of each."""

    bits = 8
    scale: Tensor
    zero: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        q, self.scale = quantize(weight.detach(), torch.int8)
        if self._in_cpp:
            self.register_buffer("weight", linear_cpp.pack_int8(q))
            return
        self.register_buffer("weight", torch.ops.onednn.qlinear_prepack(q, None) if self._on_cpu else q.t())
        self.register_buffer("zero", torch.zeros_like(self.scale, dtype=torch.int32))

    def multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self._on_cpu:
            q, row_scale = round_to_uint8(x)
            weights = self.weight, self.scale, self.zero
            qlinear = torch.ops.onednn.qlinear_pointwise
            return qlinear(q, 1.0, 128, *weights, None, 1.0, 0, torch.float32, "none", [], "") * row_scale
        if kernels := triton_kernels(x.device.type, self.bits):
            q, row_scale = run(kernels.plan_rows(x, FEWEST_CUDA_ROWS))
            return run(kernels.plan_products(torch._int_mm(q, self.weight), self.scale, row_scale, dtype))
        q, row_scale = quantize(x, torch.int8)
        padded = F.pad(q, (0, 0, 0, max(0, FEWEST_CUDA_ROWS - len(q))))
        return torch._int_mm(padded, self.weight)[: len(q)] * self.scale * row_scale[:, None]


class Int4Linear(QuantizedLinear):
    """W in 4 bits, d_in a multiple of GROUP; x and the products in bfloat16, or x in 8 bits."""

    bits = 4
    grids: Tensor
    arrived: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        q, scale, low = quantize_groups(weight)
        if self._in_cpp:
            self.register_buffer("weight", linear_cpp.pack_int4(q, scale, low + 8 * scale))
            return
        # A weight is (q - 8) * scale + zero.
        grids = torch.stack([scale, low + 8 * scale], dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()
        if self._on_cpu:
            self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1))
            self.register_buffer("grids", grids)
            return
        packed, grids = pack_int4(q, grids)
        self.register_buffer("weight", packed)
        self.register_buffer("grids", grids)
        self.register_buffer("arrived", torch.zeros(len(q) // 64, dtype=torch.int32, device=q.device), persistent=False)

    def multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(INT4_DTYPE).contiguous()
        if self._on_cpu:
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, GROUP, self.grids)
        kernels, packed = triton_kernels(x.device.type, self.bits), (self.weight, self.grids)
        if kernels and len(x) <= kernels.MOST_ROWS:
            return run(kernels.plan_product(x, *packed, self.arrived, dtype))
        weights = run(kernels.plan_weights(*packed, x.shape[1])) if kernels else dequantize(*packed, x.shape[1])
        return F.linear(x, weights.to(x.dtype))


@cache
def triton_kernels(device: str, bits: int) -> Any:
    """Return `triton_quantize` for weights in 8 bits, `triton_int4` for 4; None if Triton cannot start kernels, or with
    a note if they are wrong."""
    if missing_launcher():
        return None
    trial: Callable[[], str | None]
    if bits == 8:
        from models.kernels import triton_quantize as kernels

        trial = partial(kernels.difference, device)
    else:
        from models.kernels import triton_int4 as kernels  # type: ignore[no-redef]

        trial = partial(int4_difference, device, kernels)
    return kernels if works(trial, f"multiplies weights in {bits} bits") else None


def int4_difference(device: str, kernels: Any) -> str | None:
    """Return how far the kernels' results on a device are from PyTorch's on the CPU; None if they are close.

    Rows of each tile and splits of the inputs are compared: in bfloat16 on a GPU, in float32 in Triton's interpreter.
    """
    generator, dtype = torch.Generator().manual_seed(0), torch.float32 if device == "cpu" else torch.bfloat16
    for n_row, d_out, d_in in ((1, 192, 96), (20, 128, 288), (100, 128, 192)):
        q, scale, low = quantize_groups(torch.randn(d_out, d_in, generator=generator))
        # bfloat16 holds these weights, however a kernel rounds.
        grids = torch.stack([scale.new_tensor(2.0) ** scale.log2().round(), low.round()], -1).transpose(0, 1)
        packed, grids = pack_int4(q, grids.to(torch.bfloat16).contiguous())
        weights, x = dequantize(packed, grids, d_in), torch.randn(n_row, d_in, generator=generator).to(dtype)
        on_device = packed.to(device), grids.to(device)
        written = run(kernels.plan_weights(*on_device, d_in)).cpu()
        arrived = torch.zeros(d_out // 64, dtype=torch.int32, device=device)
        for _ in range(2):  # the second finds what the first left
            y = run(kernels.plan_product(x.to(device), *on_device, arrived, torch.float32)).cpu()
        wanted = x.double() @ weights.double().T
        error = float((y - wanted).norm() / wanted.norm())
        if not (torch.equal(written, weights) and error < INT4_ALLOWED):
            return f"{n_row} rows, {d_in} inputs: equal weights {torch.equal(written, weights)}, error {error:.1e}"
    return None


def round_to_uint8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x [N, dim]` to `(bytes - 128) * scale`; return the bytes and each row's scale `[N, 1]` float32."""
    x = x.float()
    scale = (x.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-12)
    return (x / scale + 128).round().to(torch.uint8), scale


def runs_on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu"


def pack_int4(q: Tensor, grids: Tensor) -> tuple[Tensor, Tensor]:
    """Pack codes `[d_out, d_in]` of 0..15 and grids `[d_in / GROUP, d_out, 2]` bfloat16 for a GPU.

    Returns `[units, d_out, GROUP]` int16, whose word j has the codes of inputs j, GROUP + j, 2 * GROUP + j and
    3 * GROUP + j of a unit, and `[4 * units, d_out]` int32, the scale in its lower half. The last unit may have zeros.
    """
    padding = -q.shape[1] % UNIT
    groups = F.pad(q, (0, padding)).unflatten(1, (-1, 4, GROUP))
    words = sum(groups[:, :, i] << 4 * i for i in range(4))
    padded = F.pad(grids, (0, 0, 0, 0, 0, padding // GROUP))
    return words.to(torch.int16).transpose(0, 1).contiguous(), padded.view(torch.int32).squeeze(-1)


def dequantize(packed: Tensor, grids: Tensor, d_in: int) -> Tensor:
    """Return the weights `[d_out, d_in]` bfloat16 of `pack_int4`."""
    bits = torch.arange(0, 16, 4, device=packed.device)[:, None, None]
    codes = (packed.to(torch.int32)[:, None] >> bits & 15) - 8  # [units, 4, d_out, GROUP]
    scale, zero = grids.view(torch.bfloat16).view(-1, 4, packed.shape[1], 2)[..., None, :].unbind(-1)
    weights = torch.addcmul(zero, codes.to(torch.bfloat16), scale)
    return weights.permute(2, 0, 1, 3).flatten(1)[:, :d_in].contiguous()


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0..15 `[d_out, d_in]` int32, and scale and lowest value of groups `[d_out, d_in / GROUP]`."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / INT4_LEVELS).clamp(min=1e-12)
    q = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, INT4_LEVELS)
    return q.to(torch.int32).flatten(1), scale, low


def check_scheme(scheme: str, device: torch.device | str, n_expert: int = 0, where: str = OPTIONS) -> None:
    """Raise ConfigError for an unknown scheme, a model of experts, or if this device has no kernels for the scheme.

    where: the flag that names the scheme."""
    leave = "leave the weights as they are"
    if scheme not in SCHEMES:
        refuse(where, scheme, " or ".join(SCHEMES), "unknown quantisation scheme", "use int8 or int4")
    if n_expert:
        refuse(where, f"{scheme}, {n_expert} experts", "no experts", "experts are not quantised", leave)
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu and (found := torch.cuda.get_device_capability(device)) < OLDEST_CAPABILITY:
        seen, required = "compute capability {}.{}".format(*found), "{}.{} or newer".format(*OLDEST_CAPABILITY)
        refuse(where, seen, required, "the GPU is too old for quantised weights", leave)
    if scheme == "int8" and on_cpu and not (torch.cpu._is_vnni_supported() or linear_cpp.runs()):
        what = "int8 weights need a processor that multiplies 8-bit integers"
        refuse(f"{where} int8", "a CPU without VNNI or AVX2", "AVX2, or a GPU", what, f"use int4, or {leave}")


def takes_shape(shape: Sequence[int], scheme: str, on_cpu: bool) -> bool:
    """True if the scheme's kernels multiply weights of this shape, `[d_out, d_in]`. On a CPU without VNNI, PyTorch's
    kernel for 8 bits is not exact."""
    d_out, d_in = shape
    if scheme == "int4":
        return d_in % GROUP == 0 and d_out % 64 == 0
    if on_cpu and not torch.cpu._is_vnni_supported():
        return linear_cpp.takes_shape(shape)
    return d_in % 8 == d_out % 8 == 0


def quantized_linear(weight: Tensor, bias: Tensor | None, scheme: str) -> nn.Module | None:
    """Return the layer in a scheme; None if the kernels do not take its shape."""
    if not takes_shape(weight.shape, scheme, runs_on_cpu(weight)):
        return None
    return Int8Linear(weight, bias) if scheme == "int8" else Int4Linear(weight, bias)


def quantize_linears(module: nn.Module, scheme: str) -> None:
    """Replace every nn.Linear below `module`. Raises ConfigError for a shape that the kernels do not take."""
    for name, child in list(module.named_children()):
        if not isinstance(child, nn.Linear):
            quantize_linears(child, scheme)
            continue
        layer = quantized_linear(child.weight, child.bias, scheme)
        if layer is None:
            step = 8 if torch.cpu._is_vnni_supported() or not runs_on_cpu(child.weight) else linear_cpp.BLOCK
            steps = f"multiples of {step}" if scheme == "int8" else f"inputs a multiple of {GROUP}, outputs of 64"
            where = f"{OPTIONS} {scheme}: this rank's part of {name}"
            seen, fix = f"{child.in_features} inputs, {child.out_features} outputs", "leave these weights as they are"
            refuse(where, seen, steps, "a layer's shape has no quantised kernel", fix)
        setattr(module, name, layer)


def linear_bytes(n_weights: int, scheme: str) -> int:
    """Return the bytes of `n_weights` weights of linear layers; int4's scales and zeros are counted."""
    return n_weights if scheme == "int8" else n_weights // 2 + n_weights // GROUP * 4
