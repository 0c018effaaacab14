"""The functions of a block between its matrix products and attention. They are all that `--compile` compiles.

Each becomes one kernel. Matrix products and attention stay calls into libraries and hand-written kernels. No function
here depends on a cache or its length, so growing rows never recompile it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache.entries import Store, pack, store
from models.rope import Rotation, rotate

# Variants of a function: few per model and dtype, but PyTorch's default, 8, counts all models together.
MOST_VARIANTS = 64


def add_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the residual stream `x + update` and its RMSNorm, `[N, dim]` (Zhang and Sennrich 2019, equation 4)."""
    x = x + update
    return x, F.rms_norm(x, weight.shape, weight, eps)


class HeadNorm(NamedTuple):
    """RMSNorm of heads: the first `n_query` have `weight[0]`, those of keys `weight[1]`; `weight [2, head_dim]`."""

    weight: Tensor
    n_query: int
    eps: float


def norm_heads(heads: Tensor, norm: HeadNorm) -> Tensor:
    """Normalise each of `heads [N, n_query + n_key, head_dim]` (Qwen3, arXiv 2505.09388)."""
    parts = heads.split([norm.n_query, heads.shape[1] - norm.n_query], dim=1)
    weights = norm.weight.unbind()
    return torch.cat([F.rms_norm(x, w.shape, w, norm.eps) for x, w in zip(parts, weights, strict=True)], dim=1)


def rotate_heads(heads: Tensor, by: Rotation, norm: HeadNorm | None = None) -> Tensor:
    """Rotate the query and key heads `[N, H, head_dim]` of N tokens, normalised first if the model has a norm."""
    return rotate(heads if norm is None else norm_heads(heads, norm), by)


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`: `[N, 2 * ffn] -> [N, ffn]` (Shazeer 2020, equation 6)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Pointwise:
    """An implementation of the functions above. repeat: a kernel that repeats calls of kernels; None without one."""

    name: str = "eager"
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_norm
    rotate_heads: Callable[..., Tensor] = rotate_heads
    pack: Callable[[Tensor, Tensor], Tensor] = pack
    swiglu: Callable[[Tensor], Tensor] = swiglu
    store: Store = store
    repeat: Any = field(default=None, compare=False)


EAGER = Pointwise()


def compiled(backend: str | Callable = "inductor", *, sizes: Sequence[int] = ()) -> Pointwise:
    """Return the functions compiled by a backend of torch.compile, for models of the given `sizes`.

    PyTorch remembers the shapes of a function's arguments by its code and name. A dimension that differs between two
    models would become a variable in the kernels of both, so functions for models of other `sizes` get other names.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)

    def compile_(part: Any) -> Any:
        code = part.__code__.replace(co_name="_".join(map(str, (part.__name__, *sizes))))
        renamed = FunctionType(code, part.__globals__, part.__name__, part.__defaults__)
        return torch.compile(renamed, backend=backend, fullgraph=True)

    return Pointwise("compiled", *map(compile_, (add_norm, rotate_heads, pack, swiglu)))


def use_pointwise(model: nn.Module, pointwise: Pointwise) -> None:
    """Set the `pointwise` functions of every module of `model` that has some."""
    for module in model.modules():
        if hasattr(module, "pointwise"):
            setattr(module, "pointwise", pointwise)  # noqa: B010, a module's plain attribute, not a submodule
