"""Cases that check the noise kernel, with keys from the whole of their range."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from engine.sampling.noise import Draw, Stream, drawn_by, gumbel_of, uniform
from models.kernels.check import Case, Results

SEEDS, REQUESTS, POSITIONS = [0, -1, 2**62 + 1], [7, 2**32 - 1, 0], [0, 31_999, 2**32 - 1]


def exact(seed: Tensor, request: Tensor, position: Tensor, stream: int, n_ids: int) -> Tensor:
    """Draw Gumbel numbers in float64 with PyTorch."""
    return gumbel_of(uniform(seed, request, position, stream, n_ids))


candidate = drawn_by


def cases() -> Iterator[Case]:
    """Yield cases whose last vector is not full; the kernel rounds each result to float32."""
    for stream, n_ids in ((Stream.COUPLED, 9001), (Stream.RESAMPLE + len(Stream), 35)):
        compute = partial(_draw, int(stream), n_ids)
        yield Case("Gumbel numbers", 1e-7, compute, compute(exact))


def _draw(stream: int, n_ids: int, draw: Draw) -> Results:
    seeds, requests, positions = map(torch.tensor, (SEEDS, REQUESTS, POSITIONS))
    return (draw(seeds, requests, positions, stream, n_ids),)
