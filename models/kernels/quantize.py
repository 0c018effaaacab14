"""Linear layers with weights in 8 or 4 bits, over PyTorch's kernels, or `linear_cpp` on a CPU that runs it.

int8: a scale per output. Each token's activations are rounded to 8 bits with a scale per token, because the integer
kernels of CPUs (oneDNN) and GPUs (cuBLAS) multiply 8 bits by 8 bits. Sums are exact integers, so a token's bits do not
depend on the other tokens.

int4: a scale and a lowest value per group of 32 inputs (`low + scale * q`, q in 0..15). Activations are in bfloat16
(tinygemm; on a GPU many rows are multiplied by dequantised weights), or in 8 bits in `linear_cpp`. A group spans
its smallest to its largest weight. GGUF's Q4_1 is made in this way, so a checkpoint that was expanded from it gets its
codes back; only the scales are rounded, to bfloat16.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import refuse
from common.launch import missing_launcher, works
from kv_cache.entries import quantize
from models.kernels import linear_cpp
from models.kernels.row_bits import multiply_rows
from models.names import SCHEMES

GROUP = 32
INT4_LEVELS = 15
OLDEST_CAPABILITY = (8, 0)
# Tiles of 16 inputs that tinygemm for GPUs keeps together, the largest that divides the inputs: a thread's load.
INNER_K_TILES = (8, 4, 2)
# tinygemm dequantises all weights for every 16 rows. With more rows than this, it is faster to dequantise them once and
# to multiply in bfloat16 (H100, `linears` of reproduce/results/gpu.jsonl: 0.24 ms per 16 rows; once, 1.2 ms).
MOST_TINYGEMM_ROWS = 80
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
        self._in_cpp = self._on_cpu and linear_cpp.takes(weight)
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
        if kernels := triton_kernels(x.device.type):
            q, row_scale = kernels.run(kernels.plan_rows(x, FEWEST_CUDA_ROWS))
            return kernels.run(kernels.plan_products(torch._int_mm(q, self.weight), self.scale, row_scale, dtype))
        q, row_scale = quantize(x, torch.int8)
        padded = F.pad(q, (0, 0, 0, max(0, FEWEST_CUDA_ROWS - len(q))))
        return torch._int_mm(padded, self.weight)[: len(q)] * self.scale * row_scale[:, None]


class Int4Linear(QuantizedLinear):
    """W in 4 bits, d_in a multiple of GROUP; x and the products in bfloat16, or x in 8 bits."""

    bits = 4
    scale_and_zero: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        q, scale, low = quantize_groups(weight)
        if self._in_cpp:
            self.register_buffer("weight", linear_cpp.pack_int4(q, scale, low + 8 * scale))
            return
        for_cpu = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.register_buffer("weight", for_cpu(q, 1) if self._on_cpu else pack_for_cuda(q))
        # PyTorch does not document the layout. If it is not what `unpack_from_cuda` expects, only the kernel is used.
        self.unpacks = not self._on_cpu and bool((unpack_from_cuda(self.weight) == q).all())
        # tinygemm computes weight = (q - 8) * scale + zero.
        scale_and_zero = torch.stack([scale, low + 8 * scale], dim=-1).transpose(0, 1)
        self.register_buffer("scale_and_zero", scale_and_zero.to(torch.bfloat16).contiguous())

    def multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x, weights = x.to(torch.bfloat16).contiguous(), (self.weight, self.scale_and_zero)
        if self.unpacks and len(x) > MOST_TINYGEMM_ROWS:
            kernels = triton_kernels(x.device.type)
            return F.linear(x, kernels.run(kernels.plan_weights(*weights)) if kernels else dequantize(*weights))
        aten = torch.ops.aten
        tinygemm = aten._weight_int4pack_mm_for_cpu if self._on_cpu else aten._weight_int4pack_mm
        return tinygemm(x, self.weight, GROUP, self.scale_and_zero)


@cache
def triton_kernels(device: str) -> ModuleType | None:
    """Return `triton_quantize`; None if Triton cannot start kernels, or with a note if they are wrong."""
    if missing_launcher():
        return None
    from models.kernels import triton_quantize

    trial = partial(triton_quantize.difference, device, dequantize)
    return triton_quantize if works(trial, "multiplies quantised weights") else None


def round_to_uint8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x [N, dim]` to `(bytes - 128) * scale`; return the bytes and each row's scale `[N, 1]` float32."""
    x = x.float()
    scale = (x.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-12)
    return (x / scale + 128).round().to(torch.uint8), scale


def runs_on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu"


def pack_for_cuda(q: Tensor) -> Tensor:
    """Pack codes `[d_out, d_in]` int32 of 0..15 in the layout of tinygemm's kernel for GPUs."""
    pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
    tiles = next(tiles for tiles in INNER_K_TILES if q.shape[1] % (16 * tiles) == 0)
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles)


def unpack_from_cuda(packed: Tensor) -> Tensor:
    """Invert `pack_for_cuda`: `[d_out / 8, d_in / (16 * tiles), 32, tiles / 2]` int32 -> `[d_out, d_in]` uint8.

    A lane's word has output `lane // 4` of 8. Its bits from `16 * h + 4 * j` on are input `8 * j + 2 * (lane % 4) + h`
    of 32 (j in 0..3, h in 0..1): the B operand of tensor cores (PyTorch, aten/src/ATen/native/cuda/int4mm.cu).
    """
    n_tile, n_block, _, n_word = packed.shape
    lanes = packed.view(torch.uint8).view(n_tile, n_block, 8, 4, n_word, 2, 2)  # ..., h, j // 2
    q = torch.stack([lanes & 15, lanes >> 4], dim=-1)  # ..., j % 2
    return q.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(8 * n_tile, -1)


def dequantize(packed: Tensor, scale_and_zero: Tensor) -> Tensor:
    """Return the weights `[d_out, d_in]` bfloat16 that tinygemm multiplies with, with its rounding."""
    q = unpack_from_cuda(packed).unflatten(1, (-1, GROUP)).to(torch.bfloat16).sub_(8)
    scale, zero = scale_and_zero.transpose(0, 1).unsqueeze(2).unbind(-1)
    return torch.addcmul(zero, q, scale, out=q).flatten(1)


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0..15 `[d_out, d_in]` int32, and scale and lowest value of groups `[d_out, d_in / GROUP]`."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / INT4_LEVELS).clamp(min=1e-12)
    q = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, INT4_LEVELS)
    return q.to(torch.int32).flatten(1), scale, low


def check_scheme(scheme: str, device: torch.device | str, n_expert: int = 0) -> None:
    """Raise ConfigError for an unknown scheme, a model of experts, or if this device has no kernels for the scheme."""
    where, leave = "--quantize or --draft_weights", "leave the weights as they are"
    if scheme not in SCHEMES:
        refuse(where, scheme, " or ".join(SCHEMES), "unknown quantisation scheme", "use int8 or int4")
    if n_expert:
        refuse(where, f"{scheme}, {n_expert} experts", "no experts", "experts are not quantised", leave)
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu and (found := torch.cuda.get_device_capability(device)) < OLDEST_CAPABILITY:
        seen, required = "compute capability {}.{}".format(*found), "{}.{} or newer".format(*OLDEST_CAPABILITY)
        refuse(where, seen, required, "the GPU is too old for quantised weights", leave)
    if scheme == "int8" and on_cpu and not torch.cpu._is_vnni_supported():
        what = "int8 weights need a processor that multiplies 8-bit integers"
        refuse(f"{where} int8", "a CPU without VNNI", "AVX-512 VNNI, or a GPU", what, f"use int4, or {leave}")


def takes_shape(shape: Sequence[int], scheme: str) -> bool:
    """True if the scheme's kernels multiply weights of this shape, `[d_out, d_in]`."""
    d_out, d_in = shape
    return d_in % 8 == d_out % 8 == 0 if scheme == "int8" else d_in % GROUP == 0 and d_out % 64 == 0


def quantized_linear(weight: Tensor, bias: Tensor | None, scheme: str) -> nn.Module | None:
    """Return the layer in a scheme; None if the kernels do not take its shape."""
    if not takes_shape(weight.shape, scheme):
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
            steps = "multiples of 8" if scheme == "int8" else f"inputs a multiple of {GROUP}, outputs of 64"
            where = f"--quantize or --draft_weights {scheme}: this rank's part of {name}"
            seen, fix = f"{child.in_features} inputs, {child.out_features} outputs", "leave these weights as they are"
            refuse(where, seen, steps, "a layer's shape has no quantised kernel", fix)
        setattr(module, name, layer)


def linear_bytes(n_weights: int, scheme: str) -> int:
    """Return the bytes of `n_weights` weights of linear layers; int4's scales and zeros are counted."""
    return n_weights if scheme == "int8" else n_weights // 2 + n_weights // GROUP * 4
