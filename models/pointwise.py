"""What a block does between its matrix products and its attention, as functions that may be compiled.

Only these are: each becomes one kernel whatever the device, while matrix products and attention stay calls
into libraries and hand-written kernels. Nothing here sees a cache or its length, so no length can recompile it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache.entries import Store, pack, store
from models.rope import Rotation, rotate

MOST_VARIANTS = 64  # of a function: few per model and dtype, but PyTorch's own limit, 8, counts all models together


def add_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream `x + update`, and its RMSNorm: all `[N, dim]` (Zhang and Sennrich 2019, equation 4)."""
    x = x + update
    return x, F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_and_up: Tensor) -> Tensor:
    """`silu(gate) * up`: `[N, 2 * ffn] -> [N, ffn]` (Shazeer 2020, equation 6)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Pointwise:
    """The functions above, in one way of computing them, called `name`."""

    name: str = "eager"
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_norm
    rotate_heads: Callable[[Tensor, Rotation], Tensor] = rotate
    pack: Callable[[Tensor, Tensor], Tensor] = pack
    swiglu: Callable[[Tensor], Tensor] = swiglu
    store: Store = store


EAGER = Pointwise()


def compiled(backend: str | Callable = "inductor", *, sizes: Sequence[int] = ()) -> Pointwise:
    """All of them compiled when they first run, by any of torch.compile's backends, for models of those `sizes`.

    A dimension that is another one in a second model would become a variable in the kernels of both. What PyTorch has
    seen of a function's shapes it remembers by the function's code and name, so each kind of model gets its own.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)

    def compile_(part: Any) -> Any:
        code = part.__code__.replace(co_name="_".join(map(str, (part.__name__, *sizes))))
        own = FunctionType(code, part.__globals__, part.__name__, part.__defaults__)
        return torch.compile(own, backend=backend, fullgraph=True)

    return Pointwise("compiled", *map(compile_, (add_norm, rotate, pack, swiglu)))


def use_pointwise(model: nn.Module, pointwise: Pointwise) -> None:
    """Have every module below (and at) `model` that calls such functions call these."""
    for module in model.modules():
        if hasattr(module, "pointwise"):
            setattr(module, "pointwise", pointwise)  # noqa: B010, a module's plain attribute, not a submodule
