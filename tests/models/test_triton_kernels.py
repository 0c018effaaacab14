"""The Triton kernels: their results in Triton's interpreter, and those of attention compiled for Hopper."""

import pytest
import torch

from tests.support.programs import ROOT, python

pytest.importorskip("triton")

from tests.support import kernel_launches as kernels


def test_kernels_give_what_pytorch_gives():
    """Run files of tests/support in another process: TRITON_INTERPRET has to be set before the import."""
    files = sorted(ROOT.glob("tests/support/triton_*cases.py"))
    ended = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, TRITON_INTERPRET="1")
    assert ended.code == 0, ended.out[-6000:] + ended.err[-2000:]


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


@pytest.mark.parametrize("arch", kernels.SHARED_LIMIT)
def test_the_largest_tile_fits_into_the_shared_memory_of_the_gpu(arch):
    (launch, _) = kernels.launches(torch.bfloat16, torch.bfloat16, 128, 64, "positions", arch=arch)
    assert launch.arguments["ROWS"] == 64
    assert kernels.problem_of(kernels.compile_launch("tested", launch, arch)) is None


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("arch", kernels.SHARED_LIMIT)
def test_every_kernel_compiles_without_spilling(arch):
    """Also those that choose, pack, quantise and draw; no GPU is needed."""
    compiled = [kernels.compile_launch(*variant, arch) for variant in kernels.variants(arch)]
    assert len(compiled) > 100 and not list(filter(None, map(kernels.problem_of, compiled)))
