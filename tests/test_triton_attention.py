"""The Triton backend: its results in Triton's interpreter, its launches, and what its kernels compile to."""

import math
from pathlib import Path

import pytest
import torch
from programs import python

pytest.importorskip("triton")

import compiled_kernels
from compiled_kernels import SHARED_LIMIT, compile_launch, variants

from models.attention.triton_backend import chunk_length, min_chunk_length, tile_config

CASES = Path(__file__).with_name("triton_cases.py")


def test_equals_the_torch_backend():
    """All of triton_cases.py; see there for why it runs in a process of its own."""
    ended = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", CASES, TRITON_INTERPRET="1")
    assert ended.code == 0, ended.out[-6000:] + ended.err[-2000:]


@pytest.mark.parametrize("kv_itemsize", [1, 2])
@pytest.mark.parametrize("n_row", [1, 8, 32, 128])
def test_chunks_fill_the_gpu(n_row, kv_itemsize):
    """Some four waves of two programs per multiprocessor, whatever the batch, unless chunks are as short as may be."""
    tile, shortest = tile_config(n_row, 128, kv_itemsize), min_chunk_length(n_row)
    for n_program in (1, 8, 64, 500, 3000):
        for n_slot in (100, 4096, 131072):
            chunk = chunk_length(n_slot, n_program, tile, sm_count=132, min_chunk=shortest)
            assert chunk % tile.slots == 0 and chunk >= shortest >= 16 * n_row
            programs = n_program * -(-n_slot // chunk)
            assert programs >= 0.9 * 4 * 2 * 132 or chunk == shortest


def test_the_last_wave_is_not_left_nearly_empty():
    """Rounding the number of chunks up gave 17 chunks of 64 programs, 4.12 waves; down, 16 chunks, 3.88 waves."""

    def filled(n_slot, n_program, chunk):
        waves = n_program * -(-n_slot // chunk) / (2 * 132)
        return waves / math.ceil(waves)

    tile, shortest = tile_config(4, 128, 2), min_chunk_length(4)
    for n_kv_head, batch, n_slot in ((8, 8, 64000), (8, 16, 16000), (8, 32, 16000), (8, 64, 8000), (1, 64, 16000)):
        chunk = chunk_length(n_slot, n_kv_head * batch, tile, 132, shortest)
        assert filled(n_slot, n_kv_head * batch, chunk) >= 0.96, (n_kv_head, batch, n_slot)


@pytest.mark.parametrize("entries,cache", [(torch.bfloat16, "in order"), (torch.int8, "positions")])
def test_kernels_compile_for_hopper_without_spilling(entries, cache):
    launches = compiled_kernels.launches(torch.bfloat16, entries, 128, 16, cache)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["split_kv", "combine"]
    for launch in launches:
        assert_fits(compile_launch(launch, 90), 90)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_LIMIT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_variant_spills_or_needs_too_much_shared_memory(arch, dtype, head_dim):
    found = variants(arch, dtype, head_dim)
    assert len(found) == {80: 33, 90: 49}[arch]
    for name, launch in found.items():
        assert_fits(compile_launch(launch, arch), arch, name)


def assert_fits(compiled, arch, name=""):
    assert compiled.registers > 16 and 0 < compiled.shared <= SHARED_LIMIT[arch] and not compiled.spilled, name


def test_a_tile_that_is_far_too_large_is_seen_to_spill():
    split = compiled_kernels.launches(torch.bfloat16, torch.int8, 128, 64, "in order")[0]
    split = split._replace(arguments=split.arguments | {"SLOTS": 128}, num_warps=4, num_stages=2)
    assert compile_launch(split, 90).spilled > 0
