"""Launches of Triton kernels, and whether Triton can make them here."""

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One kernel launch; `reproduce/kernel_report.py` compiles the same ones without a GPU."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def __call__(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


def launch_on(device: torch.device, launches: Sequence[Launch]) -> None:
    """Triton launches on the current device, wherever the tensors are."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for launch in launches:
            launch()


def missing_launcher() -> str | None:
    """Why Triton cannot start kernels here, in one line; None if it can. Its driver has the launcher of all kernels in
    one C module, built or loaded from Triton's cache here."""
    try:
        import triton
    except ImportError as error:
        return str(error)
    if triton.knobs.runtime.interpret:
        return None
    try:
        getattr(triton.runtime.driver.active, "utils")  # noqa: B009, which is what builds or loads it
    except Exception as error:  # of many classes: no compiler, no headers, no libcuda, no GPU
        takes = "a C compiler (gcc or clang; CC names another one) with Python's headers"
        cause = traceback.format_exception_only(error)[0].splitlines()[0]
        return f"Triton cannot build or load its launcher, which takes {takes}: {cause}"
    return None


def strides_of(dims: str, **tensors: torch.Tensor) -> dict[str, int]:
    """A kernel's arguments `<tensor>_<dim>`: how far apart the first dims of each tensor lie."""
    return {f"{x}_{name}": tensors[x].stride(dim) for x in tensors for dim, name in enumerate(dims.split())}
