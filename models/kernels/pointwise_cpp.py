"""The pointwise functions as a C++ kernel for CPUs: a single call instead of a dozen.

Each function rounds where its eager form does; they differ by the rounding of sums, exponentials and fused products.
A row's bits do not depend on the other rows or on the number of threads. Inputs that the kernel cannot read (other or
mixed dtypes, elements with gaps between them) are computed eagerly. Gradients are not recorded.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from models.kernels.build import use_kernel
from models.kernels.calls import call, call_eager, float_word
from models.kernels.pointwise import EAGER, HeadNorm, Pointwise
from models.rope import Rotation

BYTES = {torch.float32: 4, torch.bfloat16: 2}


def cpp(library: ctypes.CDLL) -> Pointwise:
    """Return the pointwise functions of a built library."""
    functions = dict[str, Any]()
    for function in (add_norm, rotate_heads, swiglu, pack, store):
        functions[function.__name__] = functools.partial(function, library[f"foretoken_{function.__name__}"])
    return Pointwise("cpp", **functions, repeat=library.foretoken_repeat)


def pointwise_for(attention: str) -> Pointwise:
    """Return the pointwise functions for the attention backend of a name: C++ with C++, else eager."""
    found = use_kernel("pointwise", cpp, "pointwise functions run eagerly") if attention == "cpp" else None
    return found or EAGER


def add_norm(kernel: Any, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalise like EAGER: the sum is rounded to the dtype, and the norm of the rounded sum once."""
    size = BYTES.get(x.dtype)
    (n_row, dim), (x_row, x_step), (update_row, update_step) = x.shape, x.stride(), update.stride()
    readable = x_step == update_step == weight.stride(0) == 1 and x.shape == update.shape and x.is_cpu
    if size is None or not readable or not x.dtype == update.dtype == weight.dtype or weight.shape[0] != dim:
        return call_eager(EAGER.add_norm, x, update, weight, eps)
    sums, normed = x.new_empty(n_row, dim), x.new_empty(n_row, dim)
    call(kernel, (size, n_row, dim, x_row, update_row, float_word(eps)), (x, update, weight, sums, normed))
    return sums, normed


def rotate_heads(kernel: Any, heads: Tensor, by: Rotation, norm: HeadNorm | None = None) -> Tensor:
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
        return call_eager(EAGER.rotate_heads, heads, by, norm)
    out = heads.new_empty(n_token, n_head, head_dim)
    sizes = size, n_token, n_head, head_dim, token, head, n_query, float_word(eps)
    call(kernel, sizes, (heads, cos, signed_sin, None if norm is None else weight, out))
    return out


def swiglu(kernel: Any, gate_and_up: Tensor) -> Tensor:
    """Compute `silu(gate) * up` like EAGER: `silu(gate)` and the product are rounded to the dtype."""
    size = BYTES.get(gate_and_up.dtype)
    (n_row, width), (row, step) = gate_and_up.shape, gate_and_up.stride()
    if size is None or step != 1 or width % 2 or not gate_and_up.is_cpu:
        return call_eager(EAGER.swiglu, gate_and_up)
    out = gate_and_up.new_empty(n_row, width // 2)
    call(kernel, (size, n_row, width // 2, row), (gate_and_up, out))
    return out


def pack(kernel: Any, keys: Tensor, values: Tensor) -> Tensor:
    """Stack keys and values `[N, n_kv_head, head_dim]` like EAGER."""
    size, (n_token, n_head, head_dim) = BYTES.get(keys.dtype), keys.shape
    steps = [x.stride(0) for x in (keys, values) if x.stride()[1:] == (head_dim, 1) and x.dtype == keys.dtype]
    if size is None or len(steps) < 2 or not keys.is_cpu:
        return call_eager(EAGER.pack, keys, values)
    out = keys.new_empty(n_token, 2, n_head, head_dim)
    call(kernel, (size, n_token, n_head * head_dim, *steps), (keys, values, out))
    return out


def store(kernel: Any, entries: Tensor, scales: Tensor | None, rows: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store finite numbers with the bits that EAGER stores."""
    size, narrows = BYTES.get(new.dtype), scales is None and entries.dtype != new.dtype
    storages = {torch.int8} if scales is not None else {new.dtype, torch.bfloat16}
    readable = entries.stride(-1) == 1 and new.is_contiguous() and new.is_cpu
    if size is None or entries.dtype not in storages or not readable:
        return call_eager(EAGER.store, entries, scales, rows, slots, new)
    n_row, n_token, _, n_head, head_dim = new.shape
    strides = *entries.stride()[:4], *(entries if scales is None else scales).stride()[:4]
    sizes = size, narrows, n_row, n_token, n_head, head_dim, *strides
    call(kernel, sizes, (new, rows.contiguous(), slots.contiguous(), entries, scales))
