"""Quantised checkpoint folders: random codes, packed as each format's tools do, and the weights that they stand for."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.checkpoint_folders import write_weights

Tensors = dict[str, Tensor]
Layer = Callable[[np.random.Generator, int, int], tuple[Tensors, Tensor]]  # of d_out, d_in: parts, float32 weights
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each four bits of a word have, from the lowest


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] = (), minus_one: bool = False) -> Tensor:
    """Pack codes along the last dimension in words of 32 bits; minus_one: subtract 1 from each code, with borrows."""
    n_code = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // n_code)), dtype=np.uint64)
    for column in range(codes.shape[-1]):
        word, place = divmod(column, n_code)
        place = order.index(place) if order else place
        words[..., word] |= codes[..., column].astype(np.uint64) << np.uint64(bits * place)
    if minus_one:
        words += np.uint64((1 << 32) - sum(1 << (bits * place) for place in range(n_code)))
    return torch.from_numpy((words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32))


def draw(rng: np.random.Generator, bits: int, d_out: int, d_in: int, group: int, is_reordered: bool = False) -> Any:
    """Return codes, zero points with both extremes, float16 scales, the group of each input, and weights."""
    n_group = -(-d_in // group)
    codes, zeros = (rng.integers(0, 1 << bits, (d_out, n)) for n in (d_in, n_group))
    zeros[0], zeros[1], zeros[8:12] = 0, (1 << bits) - 1, 0
    scales = rng.uniform(0.01, 0.02, (d_out, n_group)).astype(np.float16)
    groups = np.arange(d_in) // group
    groups = rng.permutation(groups) if is_reordered else groups
    weights = torch.zeros(d_out, d_in)
    for i, g in enumerate(groups):
        weights[:, i] = torch.from_numpy((codes[:, i] - zeros[:, g]) * scales[:, g].astype(np.float32))
    return codes, zeros, torch.from_numpy(scales), torch.from_numpy(groups.astype(np.int32)), weights


def awq(rng: np.random.Generator, d_out: int, d_in: int, group: int = 32) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, _, weights = draw(rng, 4, d_out, d_in, group)
    qweight, qzeros = (pack(each.T, 4, AWQ_OUTPUTS) for each in (codes, zeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous()}, weights


def gptq(
    rng: np.random.Generator,
    d_out: int,
    d_in: int,
    bits: int = 4,
    group: int = 32,
    is_reordered: bool = False,
    version: int = 1,
) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, groups, weights = draw(rng, bits, d_out, d_in, min(group, d_in), is_reordered)
    parts = {"qweight": pack(codes, bits).T, "qzeros": pack(zeros.T, bits, minus_one=version == 1), "scales": scales.T}
    parts |= {"bias": torch.zeros(d_out, dtype=torch.float16), "g_idx": groups}
    return {name: tensor.contiguous() for name, tensor in parts.items()}, weights


def fp8(
    rng: np.random.Generator, d_out: int, d_in: int, rows: int = 32, columns: int = 16, scale: str = "weight_scale_inv"
) -> tuple[Tensors, Tensor]:
    """Blocks larger than all layers: a scale without dimensions, and that of the inputs."""
    codes = torch.from_numpy(rng.normal(0, 100, (d_out, d_in))).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(rng.uniform(1e-3, 2e-3, (-(-d_out // rows), -(-d_in // columns)))).float()
    weights = codes.float()
    for i in range(d_out):
        for j in range(scales.shape[1]):
            weights[i, j * columns : (j + 1) * columns] *= scales[i // rows, j]
    parts = {"weight": codes, scale: scales}
    return parts | ({scale: scales[0, 0], "input_scale": torch.ones(())} if scales.numel() == 1 else {}), weights


def packed(
    rng: np.random.Generator, d_out: int, d_in: int, zeros_packed: bool = True, is_reordered: bool = False
) -> tuple[Tensors, Tensor]:
    """compressed-tensors in 4 bits with zero points; in older files these are bytes, and inputs have an order."""
    codes, zeros, scales, groups, weights = draw(rng, 4, d_out, d_in, 16, is_reordered)
    stored = pack(zeros.T, 4).T.contiguous() if zeros_packed else torch.from_numpy((zeros - 8).astype(np.int8))
    parts = {"weight_packed": pack(codes, 4), "weight_shape": torch.tensor([d_out, d_in]), "weight_scale": scales}
    return parts | {"weight_zero_point": stored} | ({"weight_g_idx": groups} if is_reordered else {}), weights


def compressed(kind: str, bits: int, file_format: str, symmetric: bool = True, **settings: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors. settings: strategy, and size of blocks."""
    weights = {"type": kind, "num_bits": bits, "symmetric": symmetric, **settings}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    scheme = {"quant_method": "compressed-tensors", "format": file_format, "config_groups": groups}
    return scheme | {"quantization_status": "compressed", "ignore": ["lm_head", "model.layers.1.mlp.up_proj"]}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
PACKED = compressed("int", 4, "pack-quantized", symmetric=False, strategy="group", group_size=16)
LAYERS: dict[str, tuple[dict[str, Any], Layer, str]] = {  # quantization_config, layers, published
    "awq": (AWQ, awq, "AWQ4"),
    "awq, an incomplete group": (AWQ | {"group_size": 64}, partial(awq, group=64), "AWQ4"),
    "gptq": (GPTQ, gptq, "GPTQ4"),
    "gptq in act-order": (
        GPTQ | {"group_size": 64, "desc_act": True, "checkpoint_format": "gptq"},
        partial(gptq, group=64, is_reordered=True),
        "GPTQ4",
    ),
    "gptq v2, 8 bits": (
        GPTQ | {"bits": 8, "group_size": 128, "checkpoint_format": "gptq_v2"},
        partial(gptq, bits=8, group=128, version=2),
        "GPTQ8",
    ),
    "gptq, 8 bits, whole columns": (
        GPTQ | {"bits": 8, "group_size": -1},
        partial(gptq, bits=8, group=1 << 20),
        "GPTQ8",
    ),
    "fp8, incomplete blocks": (FP8 | {"weight_block_size": [48, 40]}, partial(fp8, rows=48, columns=40), "FP8"),
    "fp8, a scale for each tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        partial(fp8, rows=1 << 20, columns=1 << 20, scale="weight_scale"),
        "FP8",
    ),
    "packed": (PACKED, packed, "INT4"),
    "packed, older": (PACKED, partial(packed, zeros_packed=False, is_reordered=True), "INT4"),
}


def quantize_folder(plain: Path, folder: Path, scheme: dict[str, Any], layer: Layer, dtype: torch.dtype) -> Tensors:
    """Write a quantised model of the shape of a plain safetensors folder; return its weights, not rounded to `dtype`.

    One layer stays as it is. All other tensors are in `dtype`.
    """
    rng, stored, weights = np.random.default_rng(0), Tensors(), Tensors()
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight") and name != "model.layers.1.mlp.up_proj.weight":
            parts, weights[name] = layer(rng, *tensor.shape)
            stored |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            stored[name] = weights[name] = tensor.to(dtype)
    folder.mkdir(exist_ok=True)
    for file in plain.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    described = json.loads((plain / "config.json").read_text()) | {"quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(described))
    write_weights(folder, stored, "sharded safetensors")
    return weights
