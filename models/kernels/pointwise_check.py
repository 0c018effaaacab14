"""Cases that check the pointwise kernel: every function, against the eager one."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from common.say import dtype_name
from models.kernels.check import Case, Results
from models.kernels.pointwise import EAGER, HeadNorm, Pointwise
from models.kernels.pointwise_cpp import BYTES, cpp
from models.rope import Rope, rotation

# The kernel rounds where PyTorch does, but adds in another order: some steps of a number's last digit.
ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

candidate = cpp


def arguments_of(dtype: torch.dtype, n_row: int, dim: int) -> dict[str, tuple]:
    """Return arguments of functions, cut out of wider tensors, by the function's name and what is special."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(dim))
    x, update, weight = (3 * normal(3, n_row, dim + 3)).to(dtype)[..., :dim]
    heads, gates = (8 * normal(n_row, size + 3, 50).to(dtype)[:, :size] for size in (5, dim // 25))
    entries = normal(n_row, 7, 50).to(dtype)
    entries[0, 1, 0], entries[1, 4, 3] = float("nan"), -float("inf")
    turns = rotation(torch.arange(n_row) * 37, Rope(torch.linspace(0.01, 1, 25), torch.ones(25)), dtype)
    norm = HeadNorm(normal(2, 50).to(dtype), 3, 1e-6)
    return {
        "add_norm": (x, update, weight[0], 1e-5),
        "rotate_heads": (heads, turns),
        "rotate_heads, normalised": (heads, turns, norm),
        "swiglu": (gates.flatten(1),),
        "pack": (entries[:, :2], entries[:, 3:5]),
    }


def cases() -> Iterator[Case]:
    """Yield every function in every dtype, on rows that are whole vectors and on others, cut out of wider ones."""
    for dtype, (n_row, dim) in product(BYTES, ((8, 576), (33, 100))):
        for name, arguments in arguments_of(dtype, n_row, dim).items():
            compute = partial(call, name, arguments)
            allowed = 0 if name == "pack" else ALLOWED[dtype]
            yield Case(f"{dtype_name(dtype)}, {name}", allowed, compute, compute(EAGER))
        new = torch.randn(n_row, 2, 2, 3, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
        new[0, 0, 0, 0], new[0, 0, 1, 0] = 0, torch.arange(dim) + 0.5  # ties between codes, at a scale of 1
        new[0, 0, 1, 0, 0] = 127
        for storage in dict.fromkeys((dtype, torch.bfloat16, torch.int8)):
            compute = partial(_stored, new, storage)
            yield Case(f"{dtype_name(dtype)}, {dtype_name(storage)} entries", 0, compute, compute(EAGER))


def _stored(new: Tensor, storage: torch.dtype, candidate: Pointwise) -> Results:
    """Store `new [B, T, 2, n_kv_head, head_dim]` in a cache of `storage` with rows and slots to spare.

    Returns all entries, and their scales if `storage` is int8.
    """
    n_row, n_token, _, n_head, head_dim = new.shape
    entries = torch.zeros(2, n_row + 1, n_head, 2 * n_token + 3, head_dim, dtype=storage)
    scales = torch.zeros(entries.shape[:-1]) if storage == torch.int8 else None
    rows = torch.arange(n_row, 0, -1)[:, None]
    slots = torch.arange(2 * n_token, 0, -2) + rows % 2
    narrow = entries[..., : 2 * n_token + 2, :], None if scales is None else scales[..., : 2 * n_token + 2]
    candidate.store(*narrow, rows, slots, new)
    return (entries,) if scales is None else (entries, scales)


def call(name: str, arguments: tuple, candidate: Pointwise) -> Results:
    """Call the function that a key of `arguments_of` names."""
    results = getattr(candidate, name.partition(",")[0])(*arguments)
    return results if isinstance(results, tuple) else (results,)
