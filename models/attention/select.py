"""Which backend a model gets: the one that was asked for, or the best one at hand, and why."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kv_cache.errors import ConfigError
from models.attention.base import AttentionBackend, AttentionSpec
from models.attention.torch_backend import TorchAttention

BACKENDS = ("auto", "torch", "cpp", "triton", "flash")


class Selection(NamedTuple):
    """`why`: for people, what speaks for the backend or against the others."""

    backend: AttentionBackend
    why: str


class _Unavailable(Exception):
    """Why a backend cannot be had here."""


def select_backend(name: str, device: torch.device | str, spec: AttentionSpec) -> Selection:
    """The backend of that name for models of that shape on that device; `auto` is the fastest at hand.

    A shape that a backend's kernels do not have runs on `torch`, whoever asked, and `why` says so.
    Errors: ConfigError if the backend asked for needs another device or a package that is not there.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}, expected one of {BACKENDS}")
    kind = torch.device(device).type
    preferred = "triton" if kind == "cuda" else "cpp"
    wanted = preferred if name == "auto" else name
    try:
        return _MAKERS[wanted](kind, spec)
    except _Unavailable as reason:
        if name == "auto":
            return Selection(TorchAttention(), f"{preferred} is not available: {reason}")
        raise ConfigError(
            "the attention backend is not available",
            where="--attention",
            seen=f"{name} on {kind}: {reason}",
            required="a backend that this machine has",
            fix="use --attention auto",
        ) from None


def _torch(kind: str, spec: AttentionSpec) -> Selection:
    return Selection(TorchAttention(), "asked for")


def _cpp(kind: str, spec: AttentionSpec) -> Selection:
    from models.attention import cpp_backend
    from models.attention.cpp_build import BuildError

    if kind != "cpu":
        raise _Unavailable("it is for CPUs")
    if reason := cpp_backend.unsupported(spec):
        return Selection(TorchAttention(), f"cpp does not have {reason}")
    try:
        return Selection(cpp_backend.CppAttention(TorchAttention()), "built for this CPU")
    except BuildError as error:
        raise _Unavailable(str(error)) from None


def _triton(kind: str, spec: AttentionSpec) -> Selection:
    if kind != "cuda":
        raise _Unavailable("it needs a CUDA device")
    try:
        import triton

        from models.attention import triton_backend
    except ImportError as error:
        raise _Unavailable(str(error)) from None
    if reason := triton_backend.unsupported(spec):
        return Selection(TorchAttention(), reason)
    if not triton_backend.runs_on(torch.cuda.get_device_capability(), spec.dtype, spec.dtype):
        return Selection(
            TorchAttention(), f"the Triton kernel wants 16 bits on a GPU, the model computes in {spec.dtype}"
        )
    return Selection(triton_backend.TritonAttention(), f"Triton {triton.__version__}")


def _flash(kind: str, spec: AttentionSpec) -> Selection:
    from models.attention.flash_backend import FlashAttention, find_flavour

    flavour, why = find_flavour(kind)
    if flavour is None:
        raise _Unavailable(why)
    if reason := flavour.unsupported(spec):
        return Selection(TorchAttention(), reason)
    try:
        fallback = _triton(kind, spec).backend
    except _Unavailable:
        fallback = TorchAttention()
    return Selection(FlashAttention(flavour, fallback), f"{why}; rings and 8-bit caches on {fallback.name}")


_MAKERS = {"torch": _torch, "cpp": _cpp, "triton": _triton, "flash": _flash}
