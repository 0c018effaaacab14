"""How models are stored: the device, dtype and weight scheme that `auto` stands for, and the bytes of weights."""

import math
import os
from collections.abc import Sequence

import torch

from common.errors import flag, refuse
from common.process import local_rank, local_world_size, world_size
from models.checkpoints.loading import expected_shapes
from models.checkpoints.model_source import ModelSource
from models.config import ModelConfig
from models.kernels import linear_cpp
from models.kernels.linear_speed import saves_time
from models.kernels.packed_linear import can_pack, packs_twice
from models.kernels.quantize import OLDEST_CAPABILITY, linear_bytes, takes_shape

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Dtypes with numbers that bfloat16 rounds.
WIDER = {"float64", "float32", "float16"}


def auto_dtype(device: str, source: ModelSource) -> tuple[torch.dtype, str]:
    """Return the dtype that `--dtype auto` stands for, and why. On a CPU it is the fastest dtype that rounds the
    published weights no further."""
    if device != "cpu":
        return torch.bfloat16, "on a GPU"
    if torch.cpu._is_avx512_bf16_supported():
        reason = "which this CPU multiplies"
    elif linear_cpp.multiplies_bfloat16():  # elsewhere oneDNN emulates it
        reason = "which kernels widen to float32 on this CPU"
    else:
        return torch.float32, "bfloat16 is slow on this CPU"
    if not source.has_text:
        return torch.bfloat16, f"{reason}; random weights"
    published = source.published
    if wider := sorted(WIDER.intersection(published)):
        return torch.float32, f"published in {' and '.join(wider)}"
    if not published:
        return torch.float32, "the conversion does not say how the model was published; convert it again"
    return torch.bfloat16, f"{reason}; published in {' and '.join(published)}"


def auto_draft_weights(
    device: str, dtype: torch.dtype, linears: Sequence[tuple[int, ...]], published: Sequence[str] = (), n_row: int = 1
) -> str | None:
    """Return the scheme that `--draft_weights auto` stands for, or None.

    4 bits are faster than 8, but a model that was not published in 4 bits loses more acceptance. AWQ, GPTQ and
    compressed-tensors do not count: 32 weights of a larger group rarely have both its extremes, and get other codes.
    On a GPU layers are timed; not by several processes, which would have to agree.

    Args:
        dtype: dtype of the draft.
        linears: shapes `(d_out, d_in)` of the linear layers of a block of the draft, as ranks hold them.
        published: formats of the published weights (see `ModelSource.published`).
        n_row: rows that decode together.
    """
    on_cpu, had_4_bits = device == "cpu", any(name.startswith(("Q4", "IQ4")) for name in published)
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    # PyTorch's kernel for 4 bits is slower on a CPU.
    scheme = "int4" if had_4_bits and (not on_cpu or all(map(linear_cpp.takes_shape, linears))) else "int8"
    if not linears or not all(takes_shape(shape, scheme, on_cpu) for shape in linears):
        return None
    if on_cpu:
        return scheme
    fits = world_size() == 1 and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
    return scheme if fits and saves_time(scheme, tuple(linears), n_row, device) else None


def model_bytes(
    config: ModelConfig, dtype: torch.dtype, quantize: str | None, device: str, published: Sequence[str] = ()
) -> int:
    """Return the bytes of a model's weights; if repacked or quantised, a tied embedding is in memory twice.

    published: formats of the published weights (see `ModelSource.published`).
    """
    head, linear = config.vocab_size * config.dim, config.n_layer * config.n_linear_weights_per_layer
    if quantize is None:
        repacked = head if config.tie_embeddings and can_pack(device, dtype) else 0
        repacked += head + linear if packs_twice(device, dtype) else 0
        in_16_bits = _n_halved(config, published) if dtype == torch.float32 and can_pack(device, dtype) else 0
        return (config.n_parameters + repacked) * dtype.itemsize - 2 * in_16_bits
    others = config.n_parameters - linear - (0 if config.tie_embeddings else head)
    head_bytes = linear_bytes(head, "int8")
    if not takes_shape((config.vocab_size, config.dim), "int8", device == "cpu"):
        head_bytes = head * dtype.itemsize if can_pack(device, dtype) or not config.tie_embeddings else 0
    return linear_bytes(linear, quantize) + head_bytes + others * dtype.itemsize


def _n_halved(config: ModelConfig, published: Sequence[str]) -> int:
    """Return how many weights of a float32 model this CPU keeps in 16 bits: those of layers, if it was published in
    bfloat16."""
    if set(published) != {"bfloat16"} or not linear_cpp.multiplies_floats():
        return 0
    shapes = expected_shapes(config) | {"output.weight": (config.vocab_size, config.dim)}
    del shapes["tok_embeddings.weight"]
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)


def resolve_device(name: str) -> str:
    """Return "cpu" or "cuda:N", where N is this process's GPU if a machine runs several processes. Under Slurm's
    --gpus-per-task=1 a process sees a single GPU: it is cuda:0 at every local rank. Errors: ConfigError."""
    n_gpus, n_processes = torch.cuda.device_count(), local_world_size()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or (device.index or 0) >= n_gpus:
        required = "cpu" + (" or cuda" if torch.cuda.is_available() else " (this PyTorch sees no CUDA device)")
        refuse("device", name, required, "the device is not available", f"use {flag('device')} auto")
    if n_processes == 1:
        return f"cuda:{device.index or 0}"
    is_masked = n_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if device.index is not None or (n_processes > n_gpus and not is_masked):
        seen = f"{name}, {n_processes} processes on a machine with {n_gpus} GPUs"
        required = f"--device cuda, and --nproc_per_node={min(n_gpus, n_processes)} or less"
        refuse("--device, torchrun --nproc_per_node", seen, required, "every process needs a GPU to itself")
    return f"cuda:{0 if is_masked else local_rank()}"
