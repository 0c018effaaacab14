"""Launch Triton kernels, and find out whether Triton can do so here."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from common.say import say


class Launch(NamedTuple):
    """A kernel with its arguments. `tests/models/test_triton_kernels.py` compiles launches without a GPU."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def __call__(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


class Multiprocessors(NamedTuple):
    """The number of multiprocessors, and the bytes of shared memory that a program may have; by default an H200's."""

    n: int = 132
    shared: int = 227 * 1024


def multiprocessors(device: torch.device) -> Multiprocessors:
    """Return the multiprocessors of a GPU, or the default for launches without a GPU."""
    if device.type != "cuda":
        return Multiprocessors()
    found = torch.cuda.get_device_properties(device)
    return Multiprocessors(found.multi_processor_count, found.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def launch_on(device: torch.device, launches: Sequence[Launch]) -> None:
    """Launch kernels on a device: Triton uses the current device, wherever the tensors are."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for launch in launches:
            launch()


def run(planned: tuple[Launch, Any]) -> Any:
    """Launch a planned kernel on the device of its first argument. planned: the launch, and the result to return."""
    launch, result = planned
    launch_on(next(iter(launch.arguments.values())).device, [launch])
    return result


def missing_launcher() -> str | None:
    """Return in one line why Triton cannot start kernels here; None if it can. This builds or loads the C module of its
    driver, which launches all kernels."""
    try:
        import triton
    except ImportError as error:
        return str(error)
    if triton.knobs.runtime.interpret:
        return None
    try:
        getattr(triton.runtime.driver.active, "utils")  # noqa: B009, since reading it builds or loads the module
    except Exception as error:  # of many classes: no compiler, no headers, no libcuda, no GPU
        needs = "a C compiler (gcc or clang; CC names another one) with Python's headers"
        cause = traceback.format_exception_only(error)[0].splitlines()[0]
        return f"Triton cannot build or load its launcher, which needs {needs}: {cause}"
    return None


def triton_reads(entries: torch.Tensor) -> bool:
    """True if Triton's kernels run here and can read these entries of a cache. Only Ada and Hopper convert float8."""
    if not entries.is_cuda or entries.shape[-1].bit_count() > 1 or missing_launcher():
        return False
    return entries.dtype != torch.float8_e4m3fn or torch.cuda.get_device_capability(entries.device) >= (8, 9)


def works(trial: Callable[[], str | None], does: str) -> bool:
    """True if a trial of kernels runs and returns no problem; otherwise print that PyTorch `does` their work."""
    try:
        wrong = trial()
    except Exception as error:  # compilers and drivers raise errors of many classes
        wrong = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    if wrong:
        say(f"note: PyTorch {does} on the GPU, which is slower, since Triton's kernels do not work here: {wrong}")
    return not wrong


def strides_of(dims: str, **tensors: torch.Tensor) -> dict[str, int]:
    """Return a kernel's arguments `<tensor>_<dim>`: the strides of the first dims of each tensor."""
    return {f"{x}_{name}": tensors[x].stride(dim) for x in tensors for dim, name in enumerate(dims.split())}
