"""Random numbers by one Triton kernel: the bits of `engine.noise`, without intermediates in memory."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.attention.triton_backend import Launch

PAIRS, WARPS = 512, 4  # pairs of ids that one program draws, and what runs it


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
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():  # where Triton launches
        launch()
    return out
