"""Triton kernels that draw tokens, without intermediates in memory: the random numbers of `engine.noise`, and the
filters of `engine.sampling`."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.attention.triton_backend import Launch

PAIRS, WARPS = 512, 4  # pairs of ids that one program draws, and what runs it
FILTERED, FILTER_WARPS = 2048, 16  # ids that a filter looks at together, and what runs it


@triton.jit
def _number(high, low, IS_GUMBEL: tl.constexpr):
    """Uniform numbers of 53 bits of two words, as float64, or the Gumbel numbers of these."""
    u = ((high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)).to(tl.float64) * 2.0**-53
    if IS_GUMBEL:
        u = -tl.log(-tl.log(tl.maximum(u, 2.0**-54)))
    return u


@triton.jit(do_not_specialize=["n_row", "purpose"])
def draw_row(keys, out, n_row, n_id, purpose, IS_GUMBEL: tl.constexpr, PAIRS: tl.constexpr):
    """Numbers `out [n_row, n_id]` of seeds, requests and positions, `keys [3, n_row]` int64."""
    row = tl.program_id(0).to(tl.int64)
    seed, request, position = tl.load(keys + row), tl.load(keys + n_row + row), tl.load(keys + 2 * n_row + row)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    counter = pair.to(tl.uint32), purpose.to(tl.uint32), position.to(tl.uint32), request.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter[0], counter[1], counter[2], counter[3])
    numbers = tl.interleave(_number(w0, w1, IS_GUMBEL), _number(w2, w3, IS_GUMBEL))
    ids = tl.program_id(1) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    tl.store(out + row * n_id + ids, numbers.to(out.dtype.element_ty), mask=ids < n_id)


def plan(keys: Tensor, stream: int, n_ids: int, gumbel_in: torch.dtype | None = None) -> tuple[Launch, Tensor]:
    """Return the launch that draws for `keys [3, ...]`, and what it fills, `[..., n_ids]`: uniform numbers in float64,
    or Gumbel numbers in that dtype."""
    out = keys.new_empty(*keys.shape[1:], n_ids, dtype=gumbel_in or torch.float64)
    n_row = keys.numel() // 3
    arguments = {"keys": keys, "out": out, "n_row": n_row, "n_id": n_ids, "purpose": int(stream)}
    arguments |= {"IS_GUMBEL": gumbel_in is not None, "PAIRS": PAIRS}
    return Launch(draw_row, (n_row, triton.cdiv(n_ids, 2 * PAIRS)), arguments, WARPS, num_stages=1), out


def draw(
    seed: Tensor, request: Tensor, position: Tensor, stream: int, n_ids: int, gumbel_in: torch.dtype | None = None
) -> Tensor:
    """Return `engine.noise.uniform` of these arguments, or `engine.noise.gumbel` in that dtype."""
    launch, out = plan(torch.stack(torch.broadcast_tensors(seed, request, position)), stream, n_ids, gumbel_in)
    return _launched(launch, out)


@triton.jit
def filter_row(scaled, top_k, top_p, n_id, n_step, BLOCK: tl.constexpr):
    """Write -inf over what the filters of a row of `scaled [R, n_id]` exclude: ids before which `top_k` likelier ones
    stand, or a mass of `top_p`, the lowest ids first among equals. Row r has the filters `r // n_step`.

    Searches for the smallest value that both keep, between two of the row's values, until these are one. Whatever is
    likelier than `upper`, `n` ids of that mass, is kept.
    """
    row = tl.program_id(0).to(tl.int64)
    scaled += row * n_id
    k, p = tl.load(top_k + row // n_step), tl.load(top_p + row // n_step)
    ids = tl.arange(0, BLOCK)
    upper, n, mass = tl.full([], 0.0, scaled.dtype.element_ty), tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float64)
    least, weights = tl.zeros([BLOCK], scaled.dtype.element_ty), tl.zeros([BLOCK], tl.float64)
    for start in range(0, n_id, BLOCK):
        exists = start + ids < n_id
        x = tl.load(scaled + start + ids, mask=exists, other=float("-inf"))
        least, weights = tl.minimum(least, tl.where(exists, x, 0.0)), weights + tl.exp(x.to(tl.float64))
    lower, limit = tl.min(least), p * tl.sum(weights)
    upper = tl.where((k >= n_id) & (p > 1), lower, upper)
    while lower < upper:
        middle = 0.5 * lower + 0.5 * upper
        middle = tl.where(middle < upper, middle, lower)
        weights, number = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.int32)
        below, above = tl.full([BLOCK], float("-inf"), upper.dtype), tl.zeros([BLOCK], upper.dtype)
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


def plan_filter(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Launch:
    """Return the launch that filters `scaled [B, ..., V]` in place, by `top_k` and `top_p [B]`."""
    n_row = scaled.numel() // scaled.shape[-1]
    arguments = {"scaled": scaled, "top_k": top_k, "top_p": top_p, "n_id": scaled.shape[-1]}
    arguments |= {"n_step": n_row // len(top_k), "BLOCK": FILTERED}
    return Launch(filter_row, (n_row,), arguments, FILTER_WARPS, num_stages=1)


def filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return scaled logits, the largest of each row 0, with -inf where a filter excludes an id; may write in place."""
    scaled = scaled.contiguous()
    return _launched(plan_filter(scaled, top_k, top_p), scaled)


def _launched(launch: Launch, out: Tensor) -> Tensor:
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():  # where Triton launches
        launch()
    return out
