"""Compare a build of a C++ kernel with the reference on small ragged cases, and time it beside others.

    python -m models.kernel_check KERNEL LIBRARY [OTHERS...]

prints a line of JSON for each kind of input: the "error" relative to the largest value of a row, what is "allowed", and
"ms" of the library, of the others and of PyTorch. `models.cpp_build` runs it in a process of its own, which a kernel
that crashes takes along.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.say import dtype_name
from kv_cache import KV, FullKVCache, KVCache, QuantizedKVCache
from kv_cache.entries import NOTED
from models.attention.base import MAX_BLOCK, AttentionSpec
from models.attention.cpp_backend import ENTRIES, PART, CppAttention
from models.attention.torch_backend import TorchAttention
from models.config import ModelConfig
from models.pointwise import EAGER, Pointwise
from models.pointwise_cpp import cpp
from models.rope import rotation

DTYPES = (torch.float32, torch.bfloat16)
# Sums and exponentials are rounded in float32; with queries in bfloat16 also queries, weights and results, to 8 bits.
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
SHAPES = ((64, 3, None), (128, 4, 200))  # head_dim, query heads of a KV head, sliding window
IN_4_BITS = "4 bits"
REPEATS = 15
Results = tuple[Tensor, ...]


class Case(NamedTuple):
    what: str  # what the inputs are like
    allowed: float
    compute: Callable[[Any], Results]  # by a candidate
    wanted: Results  # the first dimension of each is rows
    is_timed: bool = True

    def error(self, candidate: Any) -> float:
        """The largest error of any result; NaN if one is NaN."""
        errors = []
        for found, wanted in zip(self.compute(candidate), self.wanted, strict=True):
            difference, largest = (found.double() - wanted).flatten(1).abs(), wanted.double().flatten(1).abs().amax(1)
            errors.append((difference.amax(1) / largest.where(largest > 0, 1.0)).max())
        return float(torch.stack(errors).max())


def attention_cases() -> Iterator[Case]:
    """Queries in every dtype over entries in every storage: one token, a block and a chunk, of rows by name."""
    for dtype, storage, shape, n_token in product(DTYPES, (*ENTRIES, IN_4_BITS), SHAPES, (1, 5, MAX_BLOCK + 4)):
        what = f"{dtype_name(dtype)}, entries in {dtype_name(storage)}"
        yield from _attention_cases(what, dtype, storage, *shape, n_token)


def _attention_cases(
    what: str, dtype: torch.dtype, storage: Any, head_dim: int, group: int, window: int | None, n_token: int
) -> Iterator[Case]:
    """Attention of a block, with the shares that it notes; and whether each token has the same bits alone."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(n_token))
    config, rows, lengths = ModelConfig(8, 1, 64, 2 * group, 2, head_dim, 8, 9999), [3, 0, 1], [PART + 300, 3, 411]
    in_4_bits, capacity = storage == IN_4_BITS, PART + 400
    stored = dtype if in_4_bits else storage
    cache: KVCache = FullKVCache(config, 4, capacity, dtype=stored)
    new = normal(4, capacity, 2, 2, head_dim)
    for row, length in zip(rows, lengths, strict=True):
        # Large where no query sees it, so that a leak shows.
        new[row, length + n_token :] = torch.tensor([50.0, 1e4])[:, None, None]
        cache.positions[row, :length] = torch.arange(length)
    cache.write(0, torch.arange(capacity).expand(4, -1), new)
    if in_4_bits:
        full, cache = cache, QuantizedKVCache(config, 4, capacity, 16, 48, dtype=stored)
        for row, length in zip(rows, lengths, strict=True):
            cache.fill_row(row, full, length)
    queries = torch.tensor(lengths)[:, None] + torch.arange(n_token)
    view = cache.view(torch.tensor(rows), max(lengths) + n_token)
    view.write(0, view.begin(queries), normal(3, n_token, 2, 2, head_dim))
    kv, spec = view.read(0), AttentionSpec(2 * group, 2, head_dim, window, dtype)
    q = normal(3, n_token, 2 * group, head_dim).to(dtype)

    def attend(backend: Any, spec: AttentionSpec, q: Tensor, kv: KV, tokens: slice = slice(None)) -> Tensor:
        return backend.attend(q[:, tokens], kv, backend.prepare(spec, queries[:, tokens], view))

    def compute(backend: Any, spec: AttentionSpec = spec, q: Tensor = q, kv: KV = kv) -> Results:
        if in_4_bits or n_token > MAX_BLOCK:
            return (attend(backend, spec, q, kv),)
        noted = torch.full((4, n_token, 2, capacity // NOTED), -1.0)
        return attend(backend, spec, q, kv._replace(noted=noted)), noted

    def differs(backend: Any) -> Results:
        alone = [attend(backend, spec, q, kv, slice(token, token + 1)) for token in range(n_token)]
        return (attend(backend, spec, q, kv) != torch.cat(alone, dim=1),)

    exact = KV(*(kv if in_4_bits else kv._replace(rows=None)).dequantized(torch.float64))
    exact = exact._replace(rows=None if in_4_bits else kv.rows)
    wanted = compute(TorchAttention(), replace(spec, dtype=torch.float64), q.double(), exact)
    yield Case(what, ALLOWED[dtype], compute, wanted, n_token <= MAX_BLOCK and head_dim == SHAPES[0][0])
    yield Case(what, ALLOWED[dtype], differs, (torch.zeros(q.shape),), False)


def pointwise_cases() -> Iterator[Case]:
    """Every function in every dtype, of rows that are whole vectors and of others, cut out of wider ones."""
    for dtype, (n_row, dim) in product(DTYPES, ((8, 576), (33, 100))):
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(dim))
        x, update, weight = (3 * normal(3, n_row, dim + 3)).to(dtype)[..., :dim]
        heads, gates = (8 * normal(n_row, size + 3, 50).to(dtype)[:, :size] for size in (5, dim // 25))
        turns = rotation(torch.arange(n_row) * 37, torch.linspace(0.01, 1, 25), dtype)
        for name, arguments in {
            "add_norm": (x, update, weight[0], 1e-5),
            "rotate_heads": (heads, turns),
            "swiglu": (gates.flatten(1),),
            "round_to_uint8": (x,),
        }.items():
            compute = partial(_call, name, arguments)
            allowed = 0.0 if name == "round_to_uint8" else ALLOWED[dtype]
            yield Case(f"{dtype_name(dtype)}, {name}", allowed, compute, compute(EAGER))


def _call(name: str, arguments: tuple, candidate: Pointwise) -> Results:
    results = getattr(candidate, name)(*arguments)
    return results if isinstance(results, tuple) else (results,)


# The cases of each kernel, how a candidate is made of its library, and the reference.
KERNELS: dict[str, tuple[Callable[[], Iterator[Case]], Callable[[ctypes.CDLL], Any], Any]] = {
    "attention": (attention_cases, CppAttention, TorchAttention()),
    "pointwise": (pointwise_cases, cpp, EAGER),
}


def milliseconds(cases: list[Case], candidates: list[Any]) -> list[float]:
    """The shortest time of each candidate for all timed cases, on one thread. They take turns, so that a neighbour
    disturbs all of them."""
    best, n_thread = [float("inf")] * len(candidates), torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(REPEATS):
        for i, candidate in enumerate(candidates):
            start = time.perf_counter()
            for case in cases:
                if case.is_timed:
                    case.compute(candidate)
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    torch.set_num_threads(n_thread)
    return best


def rows_of(name: str, libraries: list[ctypes.CDLL]) -> Iterator[dict[str, Any]]:
    """A row for each kind of input: the largest error of the first library, and times of all and of PyTorch."""
    make_cases, of_library, reference = KERNELS[name]
    candidates = [*map(of_library, libraries), reference]
    for what, together in groupby(sorted(make_cases(), key=lambda case: case.what), key=lambda case: case.what):
        cases = list(together)
        error = max((case.error(candidates[0]) for case in cases), key=lambda x: (x != x, x))
        yield {"what": what, "error": error, "allowed": cases[0].allowed, "ms": milliseconds(cases, candidates)}


if __name__ == "__main__":
    with torch.inference_mode():
        for row in rows_of(sys.argv[1], [ctypes.CDLL(path) for path in sys.argv[2:]]):
            print(json.dumps(row), flush=True)
