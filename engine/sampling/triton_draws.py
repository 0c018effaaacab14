"""Triton kernels that draw tokens: the random numbers of `noise`, and the filters of `distribution`."""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.launch import Launch
from common.launch import run as run

PAIRS, WARPS = 512, 4  # pairs of ids that a program draws
FILTERED, FILTER_WARPS = 2048, 16  # ids that a filter looks at together
# The keys of numbers that are compared, and the filters of three rows.
SEEDS, REQUESTS, POSITIONS = [0, 7, 2**40 + 3, -5], [0, 1, 2**31, 2**32 - 1], [0, 1, 8191, 131071]
STREAM, N_IDS = 1, 999
TOP_K, TOP_P = [5, N_IDS, 9], [math.inf, 0.7, 0.9]


@triton.jit(do_not_specialize=["n_row", "purpose"])
def draw_row(keys, out, n_row, n_id, purpose, IS_GUMBEL: tl.constexpr, PAIRS: tl.constexpr):
    """Write random numbers to `out [n_row, n_id]`, by seeds, requests and positions, `keys [3, n_row]` int64."""
    row = tl.program_id(0).to(tl.int64)
    seed, request, position = tl.load(keys + row), tl.load(keys + n_row + row), tl.load(keys + 2 * n_row + row)
    pair = (tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, pair, purpose.to(tl.uint32), position.to(tl.uint32), request.to(tl.uint32))
    high, low = tl.interleave(w0, w2).to(tl.int64), tl.interleave(w1, w3).to(tl.int64)
    numbers = ((high << 21) | (low >> 11)).to(tl.float64) * 2.0**-53
    if IS_GUMBEL:
        numbers = -tl.log(-tl.log(tl.maximum(numbers, 2.0**-54)))
    ids = tl.program_id(1) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    tl.store(out + row * n_id + ids, numbers.to(out.dtype.element_ty), mask=ids < n_id)


def plan_draw(
    seed: Tensor, request: Tensor, position: Tensor, stream: int, n_ids: int, gumbel_in: torch.dtype | None = None
) -> tuple[Launch, Tensor]:
    """Return a launch that draws `noise.uniform` of these arguments, or `gumbel` in a dtype, and its result."""
    keys = torch.stack(torch.broadcast_tensors(seed, request, position))
    out, n_row = keys.new_empty(*keys.shape[1:], n_ids, dtype=gumbel_in or torch.float64), keys.numel() // 3
    arguments = {"keys": keys, "out": out, "n_row": n_row, "n_id": n_ids, "purpose": int(stream)}
    arguments |= {"IS_GUMBEL": gumbel_in is not None, "PAIRS": PAIRS}
    return Launch(draw_row, (n_row, triton.cdiv(n_ids, 2 * PAIRS)), arguments, WARPS, num_stages=1), out


@triton.jit
def filter_row(scaled, top_k, top_p, n_id, n_step, BLOCK: tl.constexpr):
    """Write -inf over ids of row r of `scaled [R, n_id]`, whose largest is 0, that the filters `r // n_step` exclude.

    Searches for the smallest value that both keep, between the values `lower` and `upper` of the row, until these are
    equal. All `n` ids above `upper`, of that mass, are kept, and the lowest ids at `upper`. The first step sums up the
    mass of all ids.
    """
    row = tl.program_id(0).to(tl.int64)
    scaled += row * n_id
    k, p = tl.load(top_k + row // n_step), tl.load(top_p + row // n_step)
    ids, lowest = tl.arange(0, BLOCK), tl.full([], float("-inf"), scaled.dtype.element_ty)
    n, mass, limit = tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    lower, upper = lowest, tl.full([], 0.0, scaled.dtype.element_ty)
    while lower < upper:
        middle = tl.where(0.5 * lower + 0.5 * upper < upper, 0.5 * lower + 0.5 * upper, lower)
        weights, number = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.int32)
        below, above = tl.zeros([BLOCK], upper.dtype) + lowest, tl.zeros([BLOCK], upper.dtype)
        for start in range(0, n_id, BLOCK):
            x = tl.load(scaled + start + ids, mask=start + ids < n_id, other=float("-inf"))
            is_above = x > middle
            below = tl.where(is_above, below, tl.maximum(below, x))
            above = tl.where(is_above, tl.minimum(above, x), above)
            inside = is_above & (x <= upper)
            if tl.max(inside.to(tl.int32)):  # exponentials of float64 take most of the time
                weights += tl.where(inside, tl.exp(x.to(tl.float64)), 0.0)
                number += inside.to(tl.int32)
        with_inside, n_with_inside = mass + tl.sum(weights), n + tl.sum(number)
        limit = tl.where(middle == lowest, p * with_inside, limit)
        if (n_with_inside < k) & (with_inside < limit):
            upper, n, mass = tl.max(below), n_with_inside, with_inside
        else:
            lower = tl.min(above)
    n_tied = tl.minimum((k - n).to(tl.float64), tl.ceil((limit - mass) / tl.exp(upper.to(tl.float64))))
    seen = 0
    for start in range(0, n_id, BLOCK):
        exists = start + ids < n_id
        x = tl.load(scaled + start + ids, mask=exists, other=float("-inf"))
        tied = (exists & (x == upper)).to(tl.int32)
        is_kept = (x > upper) | ((tied > 0) & (seen + tl.cumsum(tied) <= n_tied))
        tl.store(scaled + start + ids, float("-inf"), mask=exists & (is_kept == 0))
        seen += tl.sum(tied)


def plan_filter(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Launch, Tensor]:
    """Return a launch that filters scaled logits `[B, ..., V]`, the largest of each row 0, by `top_k` and `top_p [B]`,
    and its result, which may be the logits' memory."""
    scaled = scaled.contiguous()
    n_id, n_row = scaled.shape[-1], scaled[..., 0].numel()
    arguments = {"scaled": scaled, "top_k": top_k, "top_p": top_p, "n_id": n_id, "n_step": n_row // len(top_k)}
    return Launch(filter_row, (n_row,), arguments | {"BLOCK": FILTERED}, FILTER_WARPS, num_stages=1), scaled


def difference(device: str, uniform: Callable[..., Tensor], gumbel: Callable[..., Tensor]) -> str | None:
    """Return what a device draws differently from these functions of `noise` on the CPU; None if nothing."""
    keys = [torch.tensor(values) for values in (SEEDS, REQUESTS, POSITIONS)]
    seed, request, position = (x.to(device) for x in keys)
    drawn = run(plan_draw(seed, request, position, STREAM, N_IDS)).cpu()
    if not torch.equal(drawn, uniform(*keys, STREAM, N_IDS)):
        return "it draws other uniform numbers"
    drawn, noise = run(plan_draw(seed, request, position, STREAM, N_IDS, torch.float32)), gumbel(*keys, STREAM, N_IDS)
    if not torch.allclose(drawn.cpu(), noise, rtol=1e-5, atol=1e-6):
        return "it draws other Gumbel numbers"
    scaled = (noise - noise.amax(dim=-1, keepdim=True))[: len(TOP_K)]
    top_k, top_p = torch.tensor(TOP_K), torch.tensor(TOP_P, dtype=torch.float64)
    order = scaled.argsort(dim=-1, descending=True)
    mass = scaled.double().softmax(dim=-1).gather(1, order)
    passes = (torch.arange(N_IDS) < top_k[:, None]) & (mass.cumsum(dim=-1) - mass < top_p[:, None])
    expected = scaled.masked_fill(~torch.zeros_like(passes).scatter(1, order, passes), -math.inf)
    filtered = run(plan_filter(scaled.to(device), top_k.to(device), top_p.to(device))).cpu()
    return None if torch.equal(filtered, expected) else "its filters let other ids pass"
