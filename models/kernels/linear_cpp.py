"""Linear layers with weights in 32, 16, 8 or 4 bits in a C++ kernel, for CPUs with AVX2, or with AVX512-BF16 and VNNI.

A row's bits do not depend on the other rows or on the number of threads. Gradients are not recorded.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.kernels.build import BuildError, choose, use_kernel
from models.kernels.calls import call

BLOCK = 32  # outputs that are stored together; inputs that share a scale in 4 bits
FLOAT_BLOCK = 16  # outputs that are stored together if the layer's inputs are in float32


@functools.cache
def _kernel() -> Any:
    """Return the kernel's function; None, with a note, if it cannot be built or the processor lacks instructions."""
    return use_kernel("linear", function_of, "linear layers run in PyTorch")


def function_of(library: ctypes.CDLL) -> Any:
    """Return the function of a built library. Raises BuildError if the build lacks the instructions."""
    if not hasattr(library, "foretoken_linear"):
        raise BuildError("it needs AVX2")
    return library.foretoken_linear


def takes_shape(shape: Sequence[int]) -> bool:
    """True if the kernel runs on this CPU and multiplies weights of a shape `[d_out, d_in]`."""
    return not any(size % BLOCK for size in shape) and runs()


def runs() -> bool:
    """True if the kernel runs on this CPU."""
    return _kernel() is not None


def multiplies_floats() -> bool:
    """True if the kernel multiplies float32 by weights in float32 or bfloat16, in place of oneDNN.

    Not on CPUs with AVX-512 but without AVX512-BF16: there the kernel has shorter vectors than oneDNN.
    """
    matches_onednn = torch.cpu._is_avx512_bf16_supported() or not torch.cpu._is_avx512_supported()
    return matches_onednn and runs()


def multiplies_bfloat16() -> bool:
    """True if the kernel multiplies bfloat16 by weights in bfloat16, in place of oneDNN: by instructions for it, by
    tiles of AMX if there are any, or widened to float32."""
    return multiplies_floats() and (not torch.cpu._is_amx_tile_supported() or choose("linear").build == "AMX")


def pack_words(weight: Tensor, block: int = BLOCK) -> Tensor:
    """Pack `[d_out, d_in]` for the kernel: blocks of outputs, and in a block words of 32 bits along the inputs. A word
    holds two bfloat16, or one float32. A layer with inputs in float32 needs blocks of FLOAT_BLOCK."""
    return weight.unflatten(1, (-1, 4 // weight.itemsize)).unflatten(0, (-1, block)).transpose(1, 2).contiguous()


def pack_int8(q: Tensor) -> Tensor:
    """Pack `[d_out, d_in]` int8 for the kernel as bytes around 128: blocks of outputs, in a block fours of inputs."""
    unsigned = (q.to(torch.int16) + 128).to(torch.uint8)
    return unsigned.unflatten(1, (-1, 4)).unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Pack weights `(q - 8) * scale + zero` for the kernel.

    Args: codes `q [d_out, d_in]` in 0..15, and `scale` and `zero` of each BLOCK of inputs, `[d_out, d_in / BLOCK]`.
    Returns: `[d_out / BLOCK, d_in / BLOCK, 640]` bytes: 512 of codes, then scales and zeros in bfloat16.
    """
    # Outputs i and 16 + i of a block share bytes and words.
    halves = q.to(torch.uint8).unflatten(1, (-1, 8, 4)).unflatten(0, (-1, 2, 16)).permute(0, 3, 4, 2, 5, 1)
    codes = (halves[..., 0] | halves[..., 1] << 4).flatten(2)

    def as_bytes(x: Tensor) -> Tensor:
        pairs = x.to(torch.bfloat16).unflatten(0, (-1, 2, 16)).permute(0, 3, 2, 1)
        return pairs.contiguous().view(torch.uint8).flatten(2)

    return torch.cat([codes, as_bytes(scale), as_bytes(zero)], dim=2)


def linear(
    x: Tensor, packed: Tensor, bits: int, d_out: int, scale: Tensor | None, bias: Tensor | None, function: Any = None
) -> Tensor:
    """Multiply `x [..., d_in]` by packed weights transposed, and add the bias, `[d_out]` float32, in the dtype of `x`.

    32 and 16 bits, from `pack_words`: products are added in float32. 32 bits are for `x` in float32 alone.
    8 bits, with a `scale [d_out]` float32: each row of x is rounded to 8 bits; integers are added exactly.
    4 bits: each BLOCK of a row of x is rounded to 8 bits.
    function: another build's kernel, to check it.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        return linear(x.float(), packed, bits, d_out, scale, bias, function).to(x.dtype)
    assert bits < 16 or (packed.shape[2] == FLOAT_BLOCK) == (x.dtype == torch.float32), f"not packed for {x.dtype}"
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = x.new_empty(*x.shape[:-1], d_out)
    sizes = bits, x.dtype == torch.bfloat16, len(rows), rows.shape[1], d_out, rows.stride(0)
    call(function or _kernel(), sizes, (rows, packed, scale, bias, y))
    return y
