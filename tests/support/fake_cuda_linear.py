"""Stand-ins for the CUDA operators of quantised layers on CPU tensors: their interface, checks, layout and rounding."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from models.kernels import quantize

# One lane's 8 weights: the first input of each pair, and the place of its 4 bits in the word; the second's is 16 up.
FIRST_INPUTS, FIRST_BITS = (0, 8, 16, 24), (0, 4, 8, 12)


def check(condition: bool) -> None:
    if not condition:
        raise RuntimeError("TORCH_CHECK")


def places(inner_k_tiles: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the lane, word and bit of each weight of a tile of 8 outputs, with its output and input."""
    for lane in range(32):
        for word in range(inner_k_tiles // 2):
            for first, bit in zip(FIRST_INPUTS, FIRST_BITS, strict=True):
                for second in (0, 1):
                    yield lane, word, bit + 16 * second, lane // 4, 32 * word + first + 2 * (lane % 4) + second


def pack(weight: Tensor, inner_k_tiles: int) -> Tensor:
    """Stand in for `_convert_weight_to_int4pack`."""
    check(weight.dim() == 2 and weight.dtype == torch.uint8 and weight.is_contiguous())
    check(inner_k_tiles in (2, 4, 8) and weight.shape[1] * 2 % (16 * inner_k_tiles) == 0)
    q = torch.stack([weight >> 4, weight & 15], dim=-1).flatten(1).long()
    tiles = q.view(len(q) // 8, 8, -1, 16 * inner_k_tiles).transpose(1, 2)
    words = torch.zeros(*tiles.shape[:2], 32, inner_k_tiles // 2, dtype=torch.int64)
    for lane, word, bit, output, input_ in places(inner_k_tiles):
        words[:, :, lane, word] |= tiles[:, :, output, input_] << bit
    return words.to(torch.int32)


def multiply(x: Tensor, packed: Tensor, group: int, scale_and_zero: Tensor) -> Tensor:
    """Stand in for `_weight_int4pack_mm`: weights are rounded to bfloat16 once, and so are the sums."""
    check(x.dtype == torch.bfloat16 and x.is_contiguous() and x.dim() == 2)
    check(packed.dtype == torch.int32 and packed.is_contiguous() and packed.dim() == 4 and packed.shape[2] == 32)
    inner_k_tiles, d_in, d_out = 2 * packed.shape[3], x.shape[1], 8 * len(packed)
    check(inner_k_tiles in (2, 4, 8) and packed.shape[1] == d_in // (16 * inner_k_tiles))
    check(group in (32, 64, 128, 256) and d_in % group == 0)
    check(scale_and_zero.shape == (d_in // group, d_out, 2))
    # Unchecked by PyTorch: it reads pairs of bfloat16 wherever they lie.
    check(scale_and_zero.dtype == torch.bfloat16 and scale_and_zero.is_contiguous())
    q = torch.empty(*packed.shape[:2], 8, 16 * inner_k_tiles, dtype=torch.float64)
    for lane, word, bit, output, input_ in places(inner_k_tiles):
        q[:, :, output, input_] = (packed[:, :, lane, word].long() >> bit & 15) - 8.0
    scale, zero = scale_and_zero.double().transpose(0, 1).repeat_interleave(group, dim=1).unbind(-1)
    weight = (q.transpose(1, 2).reshape(d_out, d_in) * scale + zero).to(torch.bfloat16)
    return (x.double() @ weight.double().T).to(torch.bfloat16)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Stand in for `torch._int_mm` of cuBLAS."""
    check(a.dim() == b.dim() == 2 and a.dtype == b.dtype == torch.int8 and a.shape[1] == b.shape[0])
    check(a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0)
    check(a.is_contiguous() and b.t().is_contiguous())
    return torch.ops.aten._int_mm(a, b)


@contextmanager
def cuda_linears(monkeypatch) -> Iterator[list[int]]:
    """Build layers for a GPU within; yields the row counts of tinygemm's calls."""
    rows: list[int] = []

    def counted(x: Tensor, *arguments) -> Tensor:
        rows.append(len(x))
        return multiply(x, *arguments)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_convert_weight_to_int4pack", pack, "CPU")
    library.impl("_weight_int4pack_mm", counted, "CPU")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_int_mm", int_mm)
        patch.setattr(quantize, "runs_on_cpu", lambda weight: False)
        yield rows
    library._destroy()
