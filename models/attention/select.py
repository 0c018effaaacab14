"""Select the attention backend of a model: by name, or the fastest that runs here."""

from typing import NamedTuple

import torch

from common.errors import refuse
from common.launch import missing_launcher
from models.attention import cpp_backend
from models.attention.base import AttentionBackend, AttentionSpec
from models.attention.flash_backend import FlashAttention, find_package
from models.attention.torch_backend import TorchAttention
from models.kernels.build import BuildError, choose
from models.names import BACKENDS


class Selection(NamedTuple):
    """A backend, and why it was selected."""

    backend: AttentionBackend
    why: str


def select_backend(
    name: str, device: torch.device | str, spec: AttentionSpec, entries: torch.dtype | None = None
) -> Selection:
    """Return the backend called `name` for a model's shape on a device; `auto` is the fastest that runs here.

    entries: the dtype of the caches; None: the model's. Shapes and entries that a kernel does not take run on `torch`.
    Raises ConfigError if a named backend needs another device, a package or a compiler.
    """
    if name not in BACKENDS:
        refuse("--attention", name, f"one of {', '.join(BACKENDS)}")
    device = torch.device(device)
    kind = name if name != "auto" else "triton" if device.type == "cuda" else "cpp"
    if kind == "torch":
        return Selection(TorchAttention(), "chosen by name")
    try:
        return _SELECT[kind](device, spec, entries or spec.dtype)
    except BuildError as error:
        if name == "auto":
            return Selection(TorchAttention(), f"{kind} is not available: {error}")
        seen = f"{name} on {device.type}: {error}"
        refuse("--attention", seen, "a backend that this machine has", fix="use --attention auto")


def _cpp(device: torch.device, spec: AttentionSpec, entries: torch.dtype) -> Selection:
    if device.type != "cpu":
        raise BuildError("it is for CPUs")
    if reason := cpp_backend.unsupported(spec):
        return Selection(TorchAttention(), f"cpp does not have {reason}")
    return Selection(cpp_backend.CppAttention(), f"its {choose('attention').build} build is right on this CPU")


def _triton(device: torch.device, spec: AttentionSpec, entries: torch.dtype) -> Selection:
    if device.type != "cuda":
        raise BuildError("it needs a CUDA device")
    try:
        import triton

        from models.attention import triton_backend
    except ImportError as error:
        raise BuildError(str(error)) from None
    if reason := triton_backend.unsupported(spec):
        return Selection(TorchAttention(), reason)
    if not triton_backend.runs_on(torch.cuda.get_device_capability(device), spec.dtype, entries):
        why = f"the Triton kernel does not run here in {spec.dtype} over {entries} entries"
        return Selection(TorchAttention(), why)
    if reason := missing_launcher() or refusal("triton"):
        raise BuildError(reason)
    return Selection(triton_backend.TritonAttention(), f"Triton {triton.__version__}")


def _flash(device: torch.device, spec: AttentionSpec, entries: torch.dtype) -> Selection:
    package, kernel, n_processor = find_package(device)
    try:
        fallback = _triton(device, spec, entries).backend
    except BuildError:
        fallback = TorchAttention()
    if reason := package.unsupported(spec) or refusal("flash"):
        return Selection(fallback, reason)
    why = f"{package}; rings and caches in 8 or 4 bits on {fallback.name}"
    return Selection(FlashAttention(package, kernel, n_processor, fallback), why)


def refusal(name: str) -> str | None:
    """Return why the kernels of a backend, "triton" or "flash", are not used on this GPU; None if they are."""
    try:
        return "; ".join(choose(name).refused) or None
    except BuildError as error:
        return str(error)


_SELECT = {"cpp": _cpp, "triton": _triton, "flash": _flash}
