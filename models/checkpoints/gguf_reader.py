"""GGUF files through the `gguf` package: metadata, and tensors dequantised when they are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, ReaderTensor, dequantize

from common.errors import CheckpointError
from models.checkpoints.convert import SourceTensor


class GGUFFile(NamedTuple):
    """Metadata and tensors of one file, both by the file's own names; shapes are row-major, the reverse of the file's
    order, and tensors are read as float32."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, SourceTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file; tensor data stays on disk until read.

    Raises CheckpointError if the file is truncated, garbled, or holds a quantisation that cannot be decoded.
    """
    try:
        with np.errstate(over="ignore"):  # garbled sizes overflow before they are refused
            reader = _ExactReader(path)
            _require_exact_size(reader)
            metadata = {name: entry.contents() for name, entry in reader.fields.items()}
            shapes = [tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors]
    except Exception as error:  # on a damaged header the package raises whatever comes first
        what, seen = "the GGUF file is truncated or garbled", f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(what, path, seen, "a whole GGUF file", "download the file again (download.py)") from None
    tensors = {}
    for tensor, shape in zip(reader.tensors, shapes, strict=True):
        _require_decodable(path, tensor)
        tensors[tensor.name] = SourceTensor(shape, torch.float32, path, partial(_dequantized, tensor, shape))
    return GGUFFile(path, metadata, tensors)


def _dequantized(tensor: ReaderTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """In memory of its own."""
    values = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(shape)


class _ExactReader(GGUFReader):
    """The package's reader, which past the end of the file would go on with fewer values than it was asked for."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) != count:
            raise ValueError(f"{count} values at byte {offset} are not all in the file")
        return values


def _require_exact_size(reader: GGUFReader) -> None:
    """Tensors follow one another, each padded to the alignment, up to the end of the file.

    As in llama.cpp's reader; the format says no more than that an offset is a multiple of the alignment. A byte too
    many or too few anywhere shows in this, since nothing else says where a value has to lie.
    """
    end = reader.data_offset
    for tensor in reader.tensors:
        if tensor.data_offset != end:
            raise ValueError(f"{tensor.name} at byte {tensor.data_offset} instead of {end}")
        end += -(-tensor.n_bytes // reader.alignment) * reader.alignment
    if len(reader.data) != end:
        raise ValueError(f"{len(reader.data)} bytes, of which the header describes {end}")


def _require_decodable(path: Path, tensor: ReaderTensor) -> None:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.tensor_type][1]), np.uint8), tensor.tensor_type)
    except NotImplementedError:
        seen, fix = f"{tensor.name}: {tensor.tensor_type.name}", "use a Q4_1, Q8_0 or F16 file of the same model"
        required = "F32, F16, BF16, or a block quantisation that the gguf package decodes"
        raise CheckpointError("unsupported GGUF quantisation", path, seen, required, fix) from None
