"""The Triton kernels: their results in Triton's interpreter, and those of attention compiled for Hopper."""

import pytest
import torch

from tests.support.programs import ROOT, python

pytest.importorskip("triton")

from tests.support import kernel_launches as kernels


def test_kernels_give_what_pytorch_gives():
    """Run files of tests/support in another process: TRITON_INTERPRET has to be set before the import."""
    files = sorted(ROOT.glob("tests/support/triton_*cases.py"))
    environment = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, **environment)
    assert ended.code == 0, ended.out[-6000:] + ended.err[-2000:]


@pytest.mark.parametrize(
    "entries,kind,n_split",
    [(torch.bfloat16, {}, 1), (torch.int8, {"in_order": False}, 1), (torch.bfloat16, {"in_4_bits": True}, 2)],
)
def test_attention_compiles_for_hopper_without_spilling(entries, kind, n_split):
    launches = kernels.launches(entries, **kind)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["split_kv"] * n_split + ["combine"]
    for launch in launches:
        kernels.require_good(launch, 90)


def test_the_largest_tile_fits_into_the_least_shared_memory():
    (launch, _) = kernels.launches(torch.bfloat16, n_token=16, in_order=False, sm=86)
    assert launch.arguments["ROWS"] == 64
    kernels.require_good(launch, 86)
