"""Cases that compare the attention kernels with PyTorch in float64: ragged rows in every storage."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from common.say import dtype_name
from kv_cache import FullKVCache, KVCache
from kv_cache.entries import KV, SCORE_CHUNK
from kv_cache.quantized import QuantizedKVCache
from models.attention.base import MAX_BLOCK, AttentionBackend, AttentionSpec
from models.attention.cpp_backend import ENTRIES, PART, CppAttention
from models.attention.flash_backend import FlashAttention, find_package
from models.attention.torch_backend import TorchAttention
from models.config import ModelConfig
from models.kernels.check import Case, Results

DTYPES = (torch.float32, torch.bfloat16)
# Sums and exponentials are rounded to float32. With queries in bfloat16, weights and results are rounded to 8 bits;
# over int8 entries, queries are rounded to 15 bits.
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
ALLOWED_OVER_INT8 = 1e-3
Shape = tuple[int, int, int | None]  # head_dim, query heads per KV head, sliding window
SHAPES: tuple[Shape, ...] = (64, 3, None), (128, 4, 200)
# Shapes for one block each: of entries that a kernel on a CPU pads, and of other numbers of query rows that it takes at
# once, of a token and of two.
PADDED_SHAPES: tuple[Shape, ...] = (80, 16, None), (96, 1, 200)
ODD_SHAPES: tuple[Shape, ...] = (64, 7, None), (64, 9, None), (64, 11, None)
BLOCKS = (1, 5, 40)  # tokens; the last is a chunk, with more query rows than the kernel takes at once
IN_4_BITS = "4 bits"


def candidate(library: ctypes.CDLL | str) -> AttentionBackend:
    """Return the backend of a built library, or of the name "triton" or "flash", whose fallback is PyTorch here."""
    if library == "triton":
        from models.attention.triton_backend import TritonAttention

        return TritonAttention()
    if isinstance(library, ctypes.CDLL):
        return CppAttention(library)
    return FlashAttention(*find_package("cuda"), TorchAttention())


def cases() -> Iterator[Case]:
    """Yield cases of queries in every dtype over entries in every storage: a token, a block and a chunk."""
    for dtype, storage in product(DTYPES, (*ENTRIES, IN_4_BITS)):
        others = product(PADDED_SHAPES, BLOCKS[1:2]), product(ODD_SHAPES, (2,))
        for shape, n_token in chain(product(SHAPES, BLOCKS), *others):
            yield from cases_of(dtype, storage, shape, n_token)


def gpu_cases() -> Iterator[Case]:
    """Yield cases of queries in bfloat16 on a GPU, over entries in each storage: a token, and a block."""
    for storage, shape, n_token in product((torch.bfloat16, torch.int8, IN_4_BITS), SHAPES, BLOCKS[:2]):
        yield cases_of(torch.bfloat16, storage, shape, n_token, "cuda")[0]


def cases_of(dtype: torch.dtype, storage: Any, shape: Shape, n_token: int, device: str = "cpu") -> tuple[Case, Case]:
    """Return two cases over some rows of a cache: attention of a block, and the bits of each of its tokens alone."""
    (head_dim, group, window), generator = shape, torch.Generator().manual_seed(n_token)
    in_4_bits, capacity = storage == IN_4_BITS, PART + 400
    config, stored = ModelConfig(8, 1, 64, 2 * group, 2, head_dim, 8, 9999), dtype if in_4_bits else storage

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    lengths = {3: PART + 300, 0: 3, 1: 411}  # by row; row 2 has none
    cache: KVCache = FullKVCache(config, 4, capacity, device, stored)
    new = normal(4, capacity, 2, 2, head_dim)
    for row, length in lengths.items():
        # Large where no query sees it, so that a leak shows.
        new[row, length + n_token :] = torch.tensor([50.0, 1e4], device=device)[:, None, None]
        cache.positions[row, :length] = torch.arange(length, device=device)
    cache.write(0, torch.arange(capacity, device=device).expand(4, -1), new)
    if in_4_bits:
        full, cache = cache, QuantizedKVCache(config, 4, capacity, 16, 48, device, stored)
        for row, length in lengths.items():
            cache.fill_row(row, full, length)
    starts = torch.tensor([*lengths.values()], device=device)
    queries = starts[:, None] + torch.arange(n_token, device=device)
    view = cache.view(torch.tensor([*lengths], device=device), max(lengths.values()) + n_token)
    view.write(0, view.begin(queries), normal(3, n_token, 2, 2, head_dim))
    kv, spec = view.read(0), AttentionSpec(2 * group, 2, head_dim, window, dtype)
    q = normal(3, n_token, 2 * group, head_dim).to(dtype)

    def attend(backend: Any, spec: AttentionSpec, q: Tensor, kv: KV, tokens: slice = slice(None)) -> Tensor:
        return backend.attend(q[:, tokens], kv, backend.prepare(spec, queries[:, tokens], view))

    def compute(backend: Any, spec: AttentionSpec = spec, q: Tensor = q, kv: KV = kv) -> Results:
        if in_4_bits or n_token > MAX_BLOCK:
            return (attend(backend, spec, q, kv),)
        scores = torch.full((4, n_token, 2, capacity // SCORE_CHUNK), -1.0, device=device)
        return attend(backend, spec, q, kv._replace(chunk_scores=scores)), scores

    def differs(backend: Any) -> Results:
        alone = [attend(backend, spec, q, kv, slice(token, token + 1)) for token in range(n_token)]
        return (attend(backend, spec, q, kv) != torch.cat(alone, dim=1),)

    exact = KV(*(kv if in_4_bits else kv._replace(rows=None)).dequantized(torch.float64))
    exact = exact._replace(rows=None if in_4_bits else kv.rows)
    expected = compute(TorchAttention(), replace(spec, dtype=torch.float64), q.double(), exact)
    allowed = ALLOWED_OVER_INT8 if (dtype, storage) == (torch.float32, torch.int8) else ALLOWED[dtype]
    what, nowhere = f"{dtype_name(dtype)}, entries in {dtype_name(storage)}", torch.zeros(q.shape, device=device)
    is_timed = n_token <= MAX_BLOCK and dtype == storage == torch.bfloat16
    return Case(what, allowed, compute, expected, is_timed), Case(what, allowed, differs, (nowhere,))
