"""The check of Triton's attention, in Triton's interpreter; run by test_kernel_check.py with RIGHT WRONG ...

Each pair is an expression of triton_kernels.py and what a bug makes of it; the last kernels have none. Prints a line
for each: what the check says of it.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from models.attention import check, gpu_check, triton_backend, triton_kernels

# The interpreter has no products of numbers in bfloat16.
gpu_check.DEVICE, gpu_check.DTYPE, gpu_check.SHAPES = "cpu", torch.float16, check.SHAPES[:1]
check.ALLOWED[torch.float16] = 2e-3
SOURCE = Path(triton_kernels.__file__).read_text()


def verdict() -> str:
    backend = gpu_check.candidate("triton")
    wrong = [case.what for case in gpu_check.cases() if not case.error(backend) <= case.allowed]
    return ", ".join(sorted(set(wrong))) or "right"


with TemporaryDirectory() as folder, torch.inference_mode():
    for number, (right, wrong) in enumerate(zip(sys.argv[1::2], sys.argv[2::2], strict=True)):
        assert right in SOURCE
        path = Path(folder, f"kernels{number}.py")
        path.write_text(SOURCE.replace(right, wrong))
        spec = spec_from_file_location(path.stem, path)
        spec.loader.exec_module(kernels := module_from_spec(spec))
        triton_backend.split_kv, triton_backend.combine = kernels.split_kv, kernels.combine
        print(verdict(), flush=True)
    triton_backend.split_kv, triton_backend.combine = triton_kernels.split_kv, triton_kernels.combine
    print(verdict(), flush=True)
