"""GGUF files through the `gguf` package: metadata, and tensors dequantised when they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, dequantize

from common.errors import CheckpointError


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as stored; `shape` is row-major, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    data: np.ndarray = field(repr=False)

    def read(self) -> torch.Tensor:
        """The tensor dequantised to float32, in memory of its own."""
        values = dequantize(self.data, self.quantization)
        return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of one file, both by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file; tensor data stays on disk until read.

    Raises CheckpointError if the file is truncated, garbled, or holds a quantisation that cannot be decoded.
    """
    try:
        with np.errstate(over="ignore"):  # garbled sizes overflow before they are refused
            reader = _ExactReader(path)
            _require_exact_size(reader)
            metadata = {name: entry.contents() for name, entry in reader.fields.items()}
            tensors = {
                tensor.name: GGUFTensor(
                    tensor.name, tuple(map(int, reversed(tensor.shape))), tensor.tensor_type, tensor.data
                )
                for tensor in reader.tensors
            }
    except Exception as error:  # on a damaged header the package raises whatever comes first
        raise CheckpointError(
            "the GGUF file is truncated or garbled",
            where=str(path),
            seen=f"{type(error).__name__}: {str(error)[:200]}",
            required="a whole GGUF file",
            fix="download the file again (download.py)",
        ) from None
    for tensor in tensors.values():
        _require_decodable(path, tensor)
    return GGUFFile(path, metadata, tensors)


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


def _require_decodable(path: Path, tensor: GGUFTensor) -> None:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.quantization][1]), np.uint8), tensor.quantization)
    except NotImplementedError:
        raise CheckpointError(
            "unsupported GGUF quantisation",
            where=str(path),
            seen=f"{tensor.name}: {tensor.quantization.name}",
            required="F32, F16, BF16, or a block quantisation that the gguf package decodes",
            fix="use a Q4_1, Q8_0 or F16 file of the same model",
        ) from None
