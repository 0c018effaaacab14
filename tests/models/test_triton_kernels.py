"""The Triton kernels: their results in Triton's interpreter, and those of attention compiled for Hopper."""

import io
import re
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import torch

from common.launch import Launch, Multiprocessors
from tests.support.attention_cases import make_case, packed_case
from tests.support.programs import ROOT, python

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from models.attention import triton_backend

# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, table 30).
SHARED_LIMIT = {86: 99 * 1024, 90: 227 * 1024}


def launches(
    entries: torch.dtype, n_token: int = 4, in_order: bool = True, in_4_bits: bool = False, sm: int = 90
) -> list[Launch]:
    """Return the launches of an attention of bfloat16 queries, 4 to a KV head."""
    dtype = torch.bfloat16
    if in_4_bits:  # packed entries next to a ring
        case = packed_case(n_token, 128, storage=dtype, dtype=dtype, group=4, capacity=4000)
    else:
        sizes = {"group": 4, "head_dim": 128, "capacity": 4000}
        case = make_case([4000, 3000], n_token, **sizes, storage=entries, dtype=dtype, ring=not in_order)
    block = triton_backend.TritonPrepared(case.spec, case.queries, case.slots)
    with patch.object(triton_backend, "multiprocessors", lambda _: Multiprocessors(shared=SHARED_LIMIT[sm])):
        return triton_backend.plan(case.q, case.kv, block)[0]


def require_good(launch: Launch, arch: int) -> None:
    """Compile a launch for `sm_<arch>`, specialised to its arguments; require of the output of ptxas that its block
    fits into shared memory, and that no register is spilled."""
    target, kernel, knobs, log = GPUTarget("cuda", arch, 32), launch.kernel, triton.knobs, io.StringIO()
    backend = make_backend(target)
    bound = create_function_from_signature(kernel.signature, kernel.params, backend)(**launch.arguments)
    _, signature, constants, attributes = kernel._pack_args(backend, {}, *bound)
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
    said = log.getvalue()
    assert max(map(int, re.findall(r"Used (\d+) registers", said))) > 16, said
    assert {*re.findall(r"(\d+) bytes spill", said)} == {"0"}, said
    assert 0 < compiled.metadata.shared <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("file", sorted(ROOT.glob("tests/support/triton_*cases.py")), ids=lambda file: file.stem)
def test_kernels_give_what_pytorch_gives(file):
    """Run a file of tests/support in another process: TRITON_INTERPRET has to be set before the import."""
    environment = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, **environment)
    assert ended.code == 0, ended.out[-6000:] + ended.err[-2000:]


@pytest.mark.parametrize(
    "entries,kind,n_split",
    [(torch.bfloat16, {}, 1), (torch.int8, {"in_order": False}, 1), (torch.bfloat16, {"in_4_bits": True}, 2)],
)
def test_attention_compiles_for_hopper_without_spilling(entries, kind, n_split):
    each = launches(entries, **kind)
    assert [launch.kernel.fn.__name__ for launch in each] == ["split_kv"] * n_split + ["combine"]
    for launch in each:
        require_good(launch, 90)


def test_the_largest_tile_fits_into_the_least_shared_memory():
    (launch, _) = launches(torch.bfloat16, n_token=16, in_order=False, sm=86)
    assert launch.arguments["ROWS"] == 64
    require_good(launch, 86)
