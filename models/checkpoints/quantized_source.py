"""Weights that were published quantised (FP8, AWQ, GPTQ, compressed-tensors), read as plain tensors.

All formats have `weight[o, i] = (code[o, i] - zero) * scale`, with a scale, and perhaps a zero point, for each block of
weights; they differ in how codes are packed. Activations, which some formats round, too, are not rounded here.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from common.errors import flag, refuse, refuse_checkpoint
from models.checkpoints.convert import DTYPES, EMBEDDING, SourceTensor

ALL = sys.maxsize  # size of a block that spans a matrix
CODES, CODE_DTYPES = ("qweight", "weight_packed", "weight"), (torch.int32, torch.int8, torch.float8_e4m3fn)
# Parts of a quantised layer that its weight is made of, and those that say how its inputs were rounded.
USED = {*CODES, "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"}
USED |= {"weight_shape", "input_scale", "input_zero_point", "activation_scale"}
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which four bits of a word belong to each of 8 outputs
Config = Mapping[str, Any]
Reader = Callable[[], Tensor]
Opened = tuple[tuple[int, int], Reader, Reader, Reader | None]  # shape of weights; codes, scales and zero points


@dataclass(frozen=True)
class QuantizedFormat:
    """How the linear layers of a checkpoint are quantised.

    published: a name with its bits. block: rows and columns of weights that share a scale. has_zeros: false if all zero
    points are 0. zero_shift: what is added to words of zero points. is_reordered: layers list the group of each input.
    """

    published: str
    bits: int
    block: tuple[int, int]
    has_zeros: bool = True
    zero_shift: int = 0
    is_reordered: bool = False


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantised linear layer: the tensor of its codes, and all its tensors by the last part of their names."""

    name: str
    codes: SourceTensor
    parts: Mapping[str, SourceTensor]

    def take(self, part: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Reader:
        """Return what reads a tensor in this shape. Dimensions of size 1 at its end may be missing in the file. Raises
        CheckpointError if the tensor is missing, or has another shape or dtype."""
        found, name = self.parts.get(part), f"{self.name}.{part}"
        if found is None:
            refuse_checkpoint(self.codes.file, f"no {name}", "all tensors of a quantised layer", "a tensor is missing")
        shapes = [fewer for fewer in (shape, shape[:1], ()) if prod(fewer) == prod(shape)]
        if found.shape not in shapes or found.dtype not in (dtypes or DTYPES):
            seen, required = f"{name} {found.shape} in {found.dtype}", f"{shape} in {dtypes or DTYPES}"
            refuse_checkpoint(found.file, seen, required, "a tensor has the wrong shape or dtype")
        return lambda: found.read().reshape(shape)


def quantized_format(hf_config: Config, where: str) -> QuantizedFormat | None:
    """Return how a config.json says that its weights are quantised; None if they are not. Raises ConfigError naming the
    scheme if it, or a setting of it, is not read."""
    if (scheme := hf_config.get("quantization_config")) is None:
        return None
    method = str(scheme.get("quant_method")) if isinstance(scheme, dict) else "an unknown scheme"
    try:
        return SCHEMES[method](scheme)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fix = f"download the unquantised model; {flag('quantize')} stores it in 8 or 4 bits"
        what = f"the checkpoint is quantised by {method}, in a way that is not read ({error})"
        refuse(f"{where}: quantization_config", repr(scheme)[:200], "null, or one of docs/checkpoints.md", what, fix)


def dequantized(tensors: Mapping[str, SourceTensor], form: QuantizedFormat | None) -> dict[str, SourceTensor]:
    """Return the tensors with plain weights for quantised layers, of the embedding's dtype, but read as float32, to be
    rounded once. Raises CheckpointError if a tensor is missing, or has another shape or dtype."""
    if form is None:
        return dict(tensors)
    modules, plain = defaultdict[str, dict[str, SourceTensor]](dict), dict[str, SourceTensor]()
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules[module][part] = tensor
    for module, parts in modules.items():
        codes = [parts[part] for part in CODES if part in parts and parts[part].dtype in CODE_DTYPES]
        if codes and len(codes[0].shape) == 2 and f"{module}.weight" != EMBEDDING:
            shape, read = _open_layer(form, QuantizedLayer(module, codes[0], parts))
            dtype = tensors[EMBEDDING].dtype if EMBEDDING in tensors else torch.float32
            weight = SourceTensor(shape, dtype, codes[0].file, read, form.published)
            parts = {part: tensor for part, tensor in parts.items() if part not in USED} | {"weight": weight}
        plain |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    return plain


def _fp8(scheme: Config) -> QuantizedFormat:
    _setting(scheme, "fmt", "e4m3")
    _setting(scheme, "kv_cache_scheme", None)
    rows, columns = scheme.get("weight_block_size") or (-1, -1)
    return QuantizedFormat("FP8", 8, (_size(rows), _size(columns)), has_zeros=False)


def _awq(scheme: Config) -> QuantizedFormat:
    for key in ("version", "format", "checkpoint_format"):
        _setting(scheme, key, "gemm", "GEMM")
    _setting(scheme, "zero_point", True)
    return QuantizedFormat("AWQ4", _setting(scheme, "bits", 4), (1, _size(scheme.get("group_size", 128))))


def _gptq(scheme: Config) -> QuantizedFormat:
    _setting(scheme, "dynamic", None, {})
    _setting(scheme, "is_marlin_format", False)
    versions = [_setting(scheme, key, "gptq", "gptq_v2") for key in ("format", "checkpoint_format")]
    block, bits = (1, _size(scheme.get("group_size", 128))), _setting(scheme, "bits", 4, 8)
    # Version 1 stores words of zero points less 1 each. The words were subtracted from as a whole, borrows included.
    shift = 0 if "gptq_v2" in versions else sum(1 << start for start in range(0, 32, bits))
    return QuantizedFormat(f"GPTQ{bits}", bits, block, True, shift, _setting(scheme, "desc_act", False, True))


def _compressed_tensors(scheme: Config) -> QuantizedFormat:
    _setting(scheme, "kv_cache_scheme", None)
    _setting(scheme, "transform_config", None, {})
    _setting(scheme.get("sparsity_config") or {}, "format", "dense")
    forms, groups = set[QuantizedFormat](), scheme["config_groups"].values()
    for settings in (scheme, *groups):
        _setting(settings, "format", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    for weights in (group["weights"] for group in groups):
        size, bits = weights.get("group_size"), _setting(weights, "num_bits", 8, 4)
        blocks = {"tensor": (-1, -1), "channel": (1, -1), "group": (1, size), "block": weights.get("block_structure")}
        rows, columns = blocks[_setting(weights, "strategy", "group" if size else "tensor", *blocks)]
        name = {"int4": "INT4", "int8": "INT8", "float8": "FP8"}[f"{weights.get('type', 'int')}{bits}"]
        zeros, order = not _setting(weights, "symmetric", True, False), weights.get("actorder") == "group"
        forms.add(QuantizedFormat(name, bits, (_size(rows), _size(columns)), zeros, is_reordered=order))
    if len(forms) != 1:
        raise ValueError("all config_groups with the same kind of weights")
    return forms.pop()


SCHEMES = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}


def _setting(settings: Config, key: str, *accepted: Any) -> Any:
    """Return a setting, the first of the accepted values if it is absent or null. Raises ValueError for others."""
    value = accepted[0] if settings.get(key) is None else settings[key]
    if value not in accepted:
        raise ValueError(f"{key} {' or '.join(map(repr, accepted))}, not {value!r}")
    return value


def _size(value: Any) -> int:
    """Return a size of blocks, of which -1 stands for all. Raises ValueError."""
    if type(value) is not int or (value < 1 and value != -1):
        raise ValueError(f"blocks of a size > 0, or of -1, not of {value!r}")
    return ALL if value == -1 else value


def _open_layer(form: QuantizedFormat, layer: QuantizedLayer) -> tuple[tuple[int, int], Reader]:
    """Return the shape `[d_out, d_in]` of a layer's weights, and what reads them."""
    is_transposed = "AWQ" in form.published or "GPTQ" in form.published
    shape, codes, scales, zeros = (_open_words if is_transposed else _open_codes)(form, layer)
    (d_out, d_in), (n_row, n_column), order = shape, form.block, "g_idx" if is_transposed else "weight_g_idx"
    has_order = form.is_reordered or order in layer.parts
    columns = layer.take(order, (d_in,), torch.int32) if has_order else lambda: torch.arange(d_in) // n_column
    return shape, lambda: _scaled(codes(), scales(), zeros and zeros(), torch.arange(d_out) // n_row, columns())


def _open_words(form: QuantizedFormat, layer: QuantizedLayer) -> Opened:
    """Open AWQ and GPTQ, which store the transposed matrix. A word of AWQ has codes of 8 outputs, of GPTQ of inputs."""
    is_awq, n_code, (rows, columns) = "AWQ" in form.published, 32 // form.bits, layer.codes.shape
    d_in, d_out = (rows, columns * n_code) if is_awq else (rows * n_code, columns)
    n_group, order = -(-d_in // form.block[1]), AWQ_ORDER if is_awq else range(n_code)
    words, scales = layer.take("qweight", (rows, columns), torch.int32), layer.take("scales", (n_group, d_out))
    zeros = layer.take("qzeros", (n_group, -(-d_out // n_code)), torch.int32)
    shape, zero_points = (d_out, d_in), lambda: _unpack(zeros() + form.zero_shift, 1, order)[:, :d_out].T
    return shape, lambda: _unpack(words(), int(is_awq), order).T, lambda: scales().T, zero_points


def _open_codes(form: QuantizedFormat, layer: QuantizedLayer) -> Opened:
    """Open FP8 and compressed-tensors, which pack codes along the inputs and zero points along the outputs, or not."""
    (d_out, d_in), n_code = layer.codes.shape, 32 // form.bits

    def take(part: str, dim: int, *shape: int) -> Reader:
        """Return what reads codes; where they are packed, without the offset that makes them positive."""
        if form.published == "FP8" or part not in layer.parts or layer.parts[part].dtype != torch.int32:
            return layer.take(part, shape, torch.float8_e4m3fn if form.published == "FP8" else torch.int8)
        packed = layer.take(part, tuple(-(-n // n_code) if i == dim else n for i, n in enumerate(shape)), torch.int32)
        return lambda: _unpack(packed(), dim, range(n_code)).narrow(dim, 0, shape[dim]).sub_(1 << (form.bits - 1))

    if "weight_packed" in layer.parts:
        d_out, d_in = map(int, layer.take("weight_shape", (2,), torch.int64, torch.int32)())
    codes = take("weight_packed" if "weight_packed" in layer.parts else "weight", 1, d_out, d_in)
    grid = -(-d_out // form.block[0]), -(-d_in // form.block[1])
    scales = layer.take("weight_scale_inv" if "weight_scale_inv" in layer.parts else "weight_scale", grid)
    return (d_out, d_in), codes, scales, take("weight_zero_point", 0, *grid) if form.has_zeros else None


def _unpack(words: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """Unpack each word of 32 bits along a dimension into codes, given where in the word each code is."""
    bits = 32 // len(order)
    starts = torch.tensor(order, dtype=torch.int32).mul_(bits).view(-1, *[1] * (1 - dim))
    return (words.unsqueeze(dim + 1) >> starts).bitwise_and_((1 << bits) - 1).flatten(dim, dim + 1)


def _scaled(codes: Tensor, scales: Tensor, zeros: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """Return `(codes - zeros) * scales` `[d_out, d_in]` float32. rows, columns: where in `zeros` and `scales` those of
    each output and each input are. Raises ValueError for a column that does not exist."""
    if columns.min() < 0 or columns.max() >= scales.shape[1]:
        raise ValueError(f"inputs in groups {int(columns.min())} to {int(columns.max())} of {scales.shape[1]}")
    weights = codes.to(torch.float32, memory_format=torch.contiguous_format)  # of codes that are stored transposed
    weights -= 0 if zeros is None else zeros.float().index_select(0, rows).index_select(1, columns)
    return weights.mul_(scales.float().index_select(0, rows).index_select(1, columns))
