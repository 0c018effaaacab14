"""Time linear layers of a scheme next to those in bfloat16, on a GPU."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from common.launch import missing_launcher
from common.say import say
from models.kernels.quantize import quantized_linear

MORE_THAN_CACHED = 2**28  # bytes


def graph_ms(device: str, call: Callable[[], object]) -> float:
    """Return the median ms of a call in a CUDA graph, where no launch waits for the host."""
    from triton.testing import do_bench_cudagraph

    with torch.cuda.device(device):
        return do_bench_cudagraph(call, return_mode="median")


@cache
@torch.inference_mode()
def saves_time(scheme: str, shapes: Sequence[tuple[int, ...]], n_row: int, device: str) -> bool:
    """Return whether layers of these shapes `(d_out, d_in)`, one after another, multiply `n_row` rows faster in a
    scheme than in bfloat16 on a GPU, and print why not. Measured once, in about a second after compilation, over as
    many copies as exceed the GPU's cache."""
    if why := missing_launcher():
        say(f"draft weights stay as they are: {why}")
        return False
    n_copy = -(-MORE_THAN_CACHED // sum(2 * d_out * d_in for d_out, d_in in shapes))
    every = [*shapes] * n_copy
    plain = [nn.Linear(d_in, d_out, bias=False, device=device, dtype=torch.bfloat16) for d_out, d_in in every]
    inputs = [torch.randn(n_row, d_in, device=device, dtype=torch.bfloat16) for _, d_in in every]

    def run(layers: Sequence[Any]) -> None:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    quantized = [quantized_linear(layer.weight, None, scheme) for layer in plain]
    ms, plain_ms = (graph_ms(device, partial(run, layers)) for layers in (quantized, plain))
    if ms >= plain_ms:
        say(f"draft weights stay as they are: {scheme} takes {ms:.3f} ms for {n_row} rows, bfloat16 {plain_ms:.3f}")
    return ms < plain_ms
