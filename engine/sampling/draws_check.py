"""Compares the Triton kernels that draw tokens with PyTorch on the CPU, before they are used."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.sampling.triton_draws import plan_draw, plan_filter, run

SEEDS, REQUESTS, POSITIONS = [0, 7, 2**40 + 3, -5], [0, 1, 2**31, 2**32 - 1], [0, 1, 8191, 131071]
STREAM, N_IDS = 1, 999
# The filters of three rows.
TOP_K, TOP_P = [5, N_IDS, 9], [math.inf, 0.7, 0.9]


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
