"""Counter-based random numbers: a function of their purpose, not of numbers drawn before.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in int64 tensor arithmetic, so
that every device gives the same bits. The key is the seed; the counter is (pair of vocabulary ids, stream, position,
request). There is no state, so neither the batch nor acceptance can change a number.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from enum import IntEnum
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from common.launch import missing_launcher, works
from models.kernels.build import use_kernel

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Blocks per pass: on a CPU the intermediates of a pass stay in the cache, on a GPU a pass fills the machine.
BLOCKS_PER_PASS = {"cpu": 1 << 17, "cuda": 1 << 22}


class Stream(IntEnum):
    """The purpose of a number. Purposes never share numbers, except where sharing is the method (COUPLED). A round's
    i-th draft has the purpose DRAFT + len(Stream) * i."""

    COUPLED = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four words of Philox4x32-10 for each counter; int64 tensors of 32-bit words, broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product may wrap to a negative int64: its bits are right, and the mask drops the sign's copies.
        high, low = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (((low >> 32) & MASK) ^ c1 ^ k0, low & MASK, ((high >> 32) & MASK) ^ c3 ^ k1, high & MASK)
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, request: Tensor, position: Tensor, stream: int, n_ids: int = 1) -> Tensor:
    """Return uniform numbers in [0, 1), `[..., n_ids]` float64, multiples of 2**-53.

    seed: int64, any value. request, position: int64, 0 <= value < 2**32, broadcast with the seed. n_ids: entries
    0 .. n_ids - 1 (vocabulary ids) of each (seed, request, position); entry i does not depend on n_ids. On a GPU a
    Triton kernel draws these and `gumbel`, where there is Triton; else a pass draws BLOCKS_PER_PASS at most.
    """
    if not seed.is_cpu and (kernels := triton_kernels()):
        return kernels.run(kernels.plan_draw(seed, request, position, stream, n_ids))
    seed, request, position = torch.broadcast_tensors(seed, request, position)
    pairs = torch.arange((n_ids + 1) // 2, device=seed.device)
    rows = [x.reshape(-1, 1) for x in (position, request, seed & MASK, (seed >> 32) & MASK)]
    purpose = torch.full((1, 1), int(stream), device=seed.device)
    n_blocks = BLOCKS_PER_PASS.get(seed.device.type, BLOCKS_PER_PASS["cpu"])
    n_rows, parts = max(1, n_blocks // len(pairs)), []
    for position, request, low, high in zip(*(x.split(n_rows) for x in rows), strict=True):
        w0, w1, w2, w3 = philox((pairs, purpose, position, request), (low, high))
        # Integers until the last step, which is exact: on every device the bits are the same.
        bits = torch.stack([(w0 << 21) | (w1 >> 11), (w2 << 21) | (w3 >> 11)], dim=-1)
        parts.append(bits.to(torch.float64) * 2.0**-53)
    return torch.cat(parts).flatten(1)[:, :n_ids].reshape(*seed.shape, n_ids)


def gumbel(
    seed: Tensor, request: Tensor, position: Tensor, stream: int, n_ids: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return standard Gumbel numbers `[..., n_ids]` in `dtype`; `argmax(log p + gumbel)` is a draw of p.

    Computed in float64 and rounded once, so two devices differ only where their logarithms' last bits straddle a
    rounding boundary of `dtype`. On a CPU a kernel in C++ draws float32 numbers, if it can be built.
    """
    if not seed.is_cpu and (kernels := triton_kernels()):
        return kernels.run(kernels.plan_draw(seed, request, position, stream, n_ids, dtype))
    if seed.device.type == "cpu" and dtype == torch.float32 and (draw := _kernel()):
        return draw(seed, request, position, stream, n_ids)
    return gumbel_of(uniform(seed, request, position, stream, n_ids)).to(dtype)


def gumbel_of(u: Tensor) -> Tensor:
    """Turn uniform numbers, float64, into Gumbel numbers, in place."""
    u = u.clamp_(min=2.0**-54)  # 0 would be infinitely unlikely to be chosen; the largest u is 1 - 2**-53, never 1
    return u.log_().neg_().log_().neg_()


Draw: TypeAlias = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def drawn_by(library: ctypes.CDLL) -> Draw:
    """Return a function that computes `gumbel` in float32 by the C++ kernel."""
    kernel = library.foretoken_gumbel
    kernel.argtypes, kernel.restype = [*[c_int64] * 2, *[c_void_p] * 3, c_int64, c_void_p, c_int], None

    def draw(seed: Tensor, request: Tensor, position: Tensor, stream: int, n_ids: int) -> Tensor:
        seed, request, position = (x.contiguous() for x in torch.broadcast_tensors(seed, request, position))
        out = torch.empty(*seed.shape, n_ids, dtype=torch.float32)
        keys = seed.data_ptr(), request.data_ptr(), position.data_ptr()
        kernel(seed.numel(), n_ids, *keys, stream, out.data_ptr(), torch.get_num_threads())
        return out

    return draw


@functools.cache
def triton_kernels(device: str = "cuda") -> ModuleType | None:
    """Return `triton_draws`, which draws tokens on a GPU; None if Triton cannot start its kernels, or if they are
    wrong, which prints a note."""
    if missing_launcher():  # the choice of attention prints this
        return None
    from engine.sampling import triton_draws

    trial = functools.partial(triton_draws.difference, device, uniform, gumbel)
    return triton_draws if works(trial, "draws tokens") else None


@functools.cache
def _kernel() -> Draw | None:
    """Return the function that draws by the C++ kernel; None if that cannot be built."""
    return use_kernel("noise", drawn_by, "random numbers are drawn by PyTorch")
