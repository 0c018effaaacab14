"""The attention backends that a machine can have, each by a name of its own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from common.errors import ConfigError
from models.attention import AttentionBackend, AttentionSpec, TorchAttention, select_backend
from models.attention.flash_backend import FA2, FA3, FA3_FWD, FlashAttention, Flavour, Package
from reproduce.gpu_parts.cells import Options, Skip

FLASH = {"flash: FlashAttention-3": FA3, "flash: fa3-fwd": FA3_FWD, "flash: FlashAttention-2": FA2}


class Named(NamedTuple):
    """`make(spec)` gives the backend, or raises Skip with the reason why there is none."""

    name: str
    device: str
    make: Callable[[AttentionSpec], AttentionBackend]


def all_backends(options: Options) -> list[Named]:
    """Those for the device, and the CPU's own."""
    return backends(options) + ([_ours("cpp", "cpu")] if options.on_cuda else [])


def backends(options: Options) -> list[Named]:
    """The backends for the device, the one that `auto` picks first."""
    device, torch_backend = options.device, Named("torch", options.device, lambda spec: TorchAttention())
    if not options.on_cuda:
        return [_ours("cpp", device), torch_backend]
    there = [name for name, reason in missing_flash().items() if reason is None]
    flash = [Named(name, device, partial(_flash, FLASH[name], device)) for name in there]
    return [_ours("triton", device), *flash, torch_backend]


@functools.cache
def missing_flash() -> dict[str, str | None]:
    """Why each flash package cannot be imported; None where it can."""
    reasons: dict[str, str | None] = dict.fromkeys(FLASH)
    for name, package in FLASH.items():
        try:
            importlib.import_module(package.module).flash_attn_with_kvcache  # noqa: B018
        except Exception as error:  # a package built for another torch or CUDA fails in ways of its own
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


def _ours(name: str, device: str) -> Named:
    def make(spec: AttentionSpec) -> AttentionBackend:
        try:
            backend, why = select_backend(name, device, spec)
        except ConfigError as error:
            raise Skip(f"{name} is not available: {error}") from None
        if backend.name != name:
            raise Skip(f"{name} does not take this: {why}")
        return backend

    return Named(name, device, make)


def _flash(package: Package, device: str, spec: AttentionSpec) -> AttentionBackend:
    kernel = importlib.import_module(package.module).flash_attn_with_kvcache
    flavour = Flavour(package, kernel, torch.cuda.get_device_properties(device).multi_processor_count)
    if reason := flavour.unsupported(spec):
        raise Skip(reason)
    if package is not FA2 and torch.cuda.get_device_capability(device)[0] != 9:
        raise Skip(f"{package.title} is for compute capability 9")
    return FlashAttention(flavour, TorchAttention())
