"""The pointwise functions as a C++ kernel for CPUs: a single call instead of a dozen.

Each function rounds where its eager form does; they differ by the rounding of sums, exponentials and fused products.
A row's bits do not depend on the other rows or on the number of threads. Inputs that the kernel cannot read (other or
mixed dtypes, elements with gaps between them) are computed eagerly. Gradients are not recorded.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from models.kernels.build import use_kernel
from models.kernels.pointwise import EAGER, HeadNorm, Pointwise
from models.rope import Rotation

Call = Callable[..., None]  # a function of the kernel
BYTES = {torch.float32: 4, torch.bfloat16: 2}
# Types that are declared in advance make calls cheaper.
_SIZES, _ROWS = [c_int64, c_int64, c_int64], [c_void_p, c_int64]
ARGUMENTS = {
    "add_norm": [*_SIZES, *_ROWS, *_ROWS, c_void_p, c_float, c_void_p, c_void_p, c_int],
    "rotate_heads": [*_SIZES, c_int64, *_ROWS, c_int64, *[c_void_p] * 3, c_int64, c_float, c_void_p, c_int],
    "swiglu": [*_SIZES, *_ROWS, c_void_p, c_int],
    "store": [*_SIZES, c_int64, c_int64, *[c_void_p] * 7, c_int],
}


def cpp(library: ctypes.CDLL) -> Pointwise:
    """Return the pointwise functions of a built library."""
    functions = dict[str, Any]()
    for function in (add_norm, rotate_heads, swiglu, store):
        call = getattr(library, f"foretoken_{function.__name__}")
        call.argtypes, call.restype = ARGUMENTS[function.__name__], None
        functions[function.__name__] = functools.partial(function, call)
    return Pointwise("cpp", **functions)


def pointwise_for(attention: str) -> Pointwise:
    """Return the pointwise functions for the attention backend of a name: C++ with C++, else eager."""
    found = use_kernel("pointwise", cpp, "pointwise functions run eagerly") if attention == "cpp" else None
    return found or EAGER


def add_norm(call: Call, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalise like EAGER: the sum is rounded to the dtype, and the norm of the rounded sum once."""
    size = BYTES.get(x.dtype)
    (n_row, dim), (x_row, x_step), (update_row, update_step) = x.shape, x.stride(), update.stride()
    readable = x_step == update_step == weight.stride(0) == 1 and x.shape == update.shape and x.is_cpu
    if size is None or not readable or not x.dtype == update.dtype == weight.dtype or weight.shape[0] != dim:
        return EAGER.add_norm(x, update, weight, eps)
    sums, normed = x.new_empty(n_row, dim), x.new_empty(n_row, dim)
    pointers = x.data_ptr(), x_row, update.data_ptr(), update_row, weight.data_ptr()
    call(size, n_row, dim, *pointers, eps, sums.data_ptr(), normed.data_ptr(), torch.get_num_threads())
    return sums, normed


def rotate_heads(call: Call, heads: Tensor, by: Rotation, norm: HeadNorm | None = None) -> Tensor:
    """Normalise and rotate heads like EAGER, which rounds the normalised heads, the products with the cosines and the
    result to the dtype."""
    size = BYTES.get(heads.dtype)
    (n_token, n_head, head_dim), (token, head, step) = heads.shape, heads.stride()
    cos, signed_sin = by
    weight, n_query, eps = norm or (cos, 0, 0.0)
    same_dtype = heads.dtype == cos.dtype == signed_sin.dtype == weight.dtype
    whole = all(x.is_contiguous() and x.shape == (n_token, 1, head_dim) for x in by)
    whole &= weight.is_contiguous() and weight.shape[-1] == head_dim
    if size is None or not same_dtype or not whole or step != 1 or head_dim % 2 or not heads.is_cpu:
        return EAGER.rotate_heads(heads, by, norm)
    out = heads.new_empty(n_token, n_head, head_dim)
    read = heads.data_ptr(), token, head, cos.data_ptr(), signed_sin.data_ptr()
    normed = None if norm is None else weight.data_ptr(), n_query, eps
    call(size, n_token, n_head, head_dim, *read, *normed, out.data_ptr(), torch.get_num_threads())
    return out


def swiglu(call: Call, gate_and_up: Tensor) -> Tensor:
    """Compute `silu(gate) * up` like EAGER: `silu(gate)` and the product are rounded to the dtype."""
    size = BYTES.get(gate_and_up.dtype)
    (n_row, width), (row, step) = gate_and_up.shape, gate_and_up.stride()
    if size is None or step != 1 or width % 2 or not gate_and_up.is_cpu:
        return EAGER.swiglu(gate_and_up)
    out = gate_and_up.new_empty(n_row, width // 2)
    call(size, n_row, width // 2, gate_and_up.data_ptr(), row, out.data_ptr(), torch.get_num_threads())
    return out


def store(call: Call, entries: Tensor, scales: Tensor | None, rows: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store finite numbers with the bits that EAGER stores."""
    size, storage = BYTES.get(new.dtype), new.dtype if scales is None else torch.int8
    readable = entries.stride(-1) == 1 and new.is_contiguous() and new.is_cpu
    if size is None or entries.dtype != storage or not readable:
        return EAGER.store(entries, scales, rows, slots, new)
    n_row, n_token, _, n_head, head_dim = new.shape
    rows, slots = rows.contiguous(), slots.contiguous()
    strides, scale_strides = ((c_int64 * 4)(*x.stride()[:4]) for x in (entries, entries if scales is None else scales))
    read = new.data_ptr(), rows.data_ptr(), slots.data_ptr()
    written = strides, entries.data_ptr(), scale_strides, None if scales is None else scales.data_ptr()
    return call(size, n_row, n_token, n_head, head_dim, *read, *written, torch.get_num_threads())
