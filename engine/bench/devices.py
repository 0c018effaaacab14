"""Which device and dtypes a run's names mean on this machine."""

import os

import torch

from common.errors import ConfigError, flag
from common.process import local_rank, local_world_size

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def resolve_dtype(wanted: str, device: str) -> torch.dtype:
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    if wanted != "auto":
        return DTYPES[wanted]
    return torch.float32 if device == "cpu" else torch.bfloat16


def resolve_device(name: str) -> str:
    """`name` as "cpu" or "cuda:N", N being this process's own GPU where a machine runs several of them.

    A process that was left one GPU to see, as by Slurm's --gpus-per-task=1, finds it at 0, whatever its local rank.
    """
    n_gpus, n_processes = torch.cuda.device_count(), local_world_size()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return "cpu"
    where = flag("device")
    if device.type != "cuda" or (device.index or 0) >= n_gpus:
        required = "cpu" + (" or cuda" if torch.cuda.is_available() else " (this PyTorch sees no CUDA device)")
        raise ConfigError("the device is not available", where, name, required, f"use {where} auto")
    if n_processes == 1:
        return f"cuda:{device.index or 0}"
    is_masked = n_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if device.index is not None or (n_processes > n_gpus and not is_masked):
        what, where = "every process needs a GPU of its own", "--device, torchrun --nproc_per_node"
        seen = f"{name}, {n_processes} processes on a machine with {n_gpus} GPUs"
        fix = f"use --device cuda and --nproc_per_node={min(n_gpus, n_processes)}"
        raise ConfigError(what, where, seen, f"--device cuda, and at most {n_gpus} processes", fix)
    return f"cuda:{0 if is_masked else local_rank()}"
