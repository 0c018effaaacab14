"""Which backend a model gets: the one that was asked for, or the best one at hand, and why."""

from typing import NamedTuple

import torch

from common.errors import ConfigError
from common.launch import missing_launcher
from models.attention.base import AttentionBackend, AttentionSpec
from models.attention.gpu_check import refusal
from models.attention.torch_backend import TorchAttention
from models.cpp_build import BuildError
from models.names import BACKENDS


class Selection(NamedTuple):
    backend: AttentionBackend
    why: str  # for people, what speaks for the backend or against the others


def select_backend(
    name: str, device: torch.device | str, spec: AttentionSpec, entries: torch.dtype | None = None
) -> Selection:
    """The backend of that name for models of that shape on that device; `auto` is the fastest at hand.

    `entries`: the dtype of the caches it will read, the model's if None.
    A shape, or entries, that a backend's kernels do not have run on `torch`, whoever asked, and `why` says so.
    Errors: ConfigError if the backend asked for needs another device, or a package or compiler that is not there.
    """
    if name not in BACKENDS:
        raise ConfigError("unknown attention backend", "attention (--attention)", name, ", ".join(BACKENDS), "use auto")
    device = torch.device(device)
    preferred = "triton" if device.type == "cuda" else "cpp"
    wanted = preferred if name == "auto" else name
    if wanted == "torch":
        return Selection(TorchAttention(), "asked for")
    made = _MAKERS[wanted](device, spec, entries or spec.dtype)
    if isinstance(made, Selection):
        return made
    if name == "auto":
        return Selection(TorchAttention(), f"{preferred} is not available: {made}")
    what, seen = "the attention backend is not available", f"{name} on {device.type}: {made}"
    raise ConfigError(what, "--attention", seen, "a backend that this machine has", "use --attention auto")


def _cpp(device: torch.device, spec: AttentionSpec, entries: torch.dtype) -> Selection | str:
    """The backend, or why there is none here; so do the others."""
    from models.attention import cpp_backend

    if device.type != "cpu":
        return "it is for CPUs"
    if reason := cpp_backend.unsupported(spec):
        return Selection(TorchAttention(), f"cpp does not have {reason}")
    try:
        return Selection(cpp_backend.CppAttention(), "built for this CPU")
    except BuildError as error:
        return str(error)


def _triton(device: torch.device, spec: AttentionSpec, entries: torch.dtype) -> Selection | str:
    if device.type != "cuda":
        return "it needs a CUDA device"
    try:
        import triton

        from models.attention import triton_backend
    except ImportError as error:
        return str(error)
    if reason := triton_backend.unsupported(spec):
        return Selection(TorchAttention(), reason)
    if not triton_backend.runs_on(torch.cuda.get_device_capability(device), spec.dtype, entries):
        why = f"the Triton kernel does not run here in {spec.dtype} over {entries} entries"
        return Selection(TorchAttention(), why)
    if reason := missing_launcher() or refusal("triton", device):
        return reason
    return Selection(triton_backend.TritonAttention(), f"Triton {triton.__version__}")


def _flash(device: torch.device, spec: AttentionSpec, entries: torch.dtype) -> Selection | str:
    from models.attention.flash_backend import FlashAttention, find_flavour

    flavour, why = find_flavour(device)
    if flavour is None:
        return why
    triton = _triton(device, spec, entries)
    fallback = triton.backend if isinstance(triton, Selection) else TorchAttention()
    if reason := flavour.unsupported(spec) or refusal("flash", device):
        return Selection(fallback, reason)
    return Selection(FlashAttention(flavour, fallback), f"{why}; rings and caches in 8 or 4 bits on {fallback.name}")


_MAKERS = {"cpp": _cpp, "triton": _triton, "flash": _flash}
