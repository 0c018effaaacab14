"""The Triton backend: its results in Triton's interpreter, its launches, and what its kernels compile to."""

import math
import re
from pathlib import Path

import pytest
import torch
from programs import python

pytest.importorskip("triton")

from models.attention.triton_backend import chunk_length, min_chunk_length, tile_config
from reproduce.gpu_parts import kernels

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
    for n_program in range(1, 2112):
        for n_slot in (4000, 16000, 128000):
            chunk = chunk_length(n_slot, n_program, tile, 132, shortest)
            for n_chunk in (max(1, 1056 // n_program), -(-1056 // n_program)):
                other = max(-(-n_slot // n_chunk), shortest)
                other += -other % tile.slots
                assert filled(n_slot, n_program, chunk) >= filled(n_slot, n_program, other)


@pytest.mark.parametrize(
    "entries,cache,n_split",
    [(torch.bfloat16, "in order", 1), (torch.int8, "positions", 1), (torch.bfloat16, "4 bits", 2)],
)
def test_kernels_compile_for_hopper_without_spilling(entries, cache, n_split):
    launches = kernels.launches(torch.bfloat16, entries, 128, 16, cache)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["split_kv"] * n_split + ["combine"]
    for launch in launches:
        compiled = kernels.compile_launch("tested", launch, 90)
        assert compiled["registers"] > 16 and compiled["shared"] > 0
        assert kernels.problem_of(compiled) is None


def test_the_report_names_variants_that_spill_or_do_not_fit():
    """Made up; and a tile far too large for the registers, compiled for real."""
    fine = {"variant": "a variant", "arch": 80, "shared": 163 * 1024, "spill_stores": 0, "spill_loads": 0}
    for changes, named in (
        ({}, None),
        ({"spill_stores": 8}, "sm_80, a variant: .* 8 spilled"),
        ({"spill_loads": 8}, "8 spilled"),
        ({"shared": 163 * 1024 + 1}, "166913 bytes of shared memory of 166912"),
        ({"shared": 163 * 1024 + 1, "arch": 90}, None),
    ):
        problem = kernels.problem_of(fine | changes)
        assert re.search(named, problem) if named else problem is None
    split = kernels.launches(torch.bfloat16, torch.int8, 128, 64, "in order")[0]
    split = split._replace(arguments=split.arguments | {"SLOTS": 128}, num_warps=4, num_stages=2)
    compiled = kernels.compile_launch("too large", split, 90)
    assert compiled["spill_stores"] > 0 and "too large" in kernels.problem_of(compiled)
