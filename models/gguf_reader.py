"""The GGUF container: bounds-checked metadata and tensor table; dequantisation by the `gguf` package."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from kv_cache.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as stored; `shape` is row-major, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    data: np.ndarray = field(repr=False)  # uint8, all bytes of the tensor

    def read(self) -> torch.Tensor:
        """The tensor dequantised to float32, in memory of its own."""
        block, block_bytes = GGML_QUANT_SIZES[self.quantization]
        rows = self.data.reshape(-1, self.shape[-1] // block * block_bytes)
        values = dequantize(rows, self.quantization)
        return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of one file, both by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parse a GGUF file; tensor data stays on disk until read.

    Raises CheckpointError if the file is truncated, garbled, or holds a quantisation that cannot be decoded.
    """
    try:
        data = np.memmap(path, mode="r", dtype=np.uint8)
        return _parse(path, data)
    except (ValueError, struct.error, OverflowError, MemoryError, OSError) as error:
        raise CheckpointError(
            "the GGUF file is truncated or garbled",
            where=str(path),
            seen=str(error)[:200],
            required=f"a whole little-endian GGUF file, version {' or '.join(map(str, VERSIONS))}",
            fix="download the file again (download.py)",
        ) from None


def _parse(path: Path, data: np.ndarray) -> GGUFFile:
    header = _Header(data)
    if header.take(4) != MAGIC:
        raise ValueError(f"the file does not begin with {MAGIC!r}")
    version = header.scalar("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version}")
    n_tensor, n_metadata = header.scalar("Q"), header.scalar("Q")
    metadata = {}
    for _ in range(n_metadata):
        key = header.string()
        metadata[key] = header.value(header.scalar("I"))
    entries = [header.tensor_entry() for _ in range(n_tensor)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment {alignment!r}")
    start = -(-header.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_id, offset in entries:
        quantization = _decodable(path, name, type_id)
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        n_bytes = math.prod(shape) // block * block_bytes
        begin = start + offset
        if name in tensors or not shape or min(shape) < 1 or shape[-1] % block or offset % alignment:
            raise ValueError(f"tensor {name}: shape {shape}, offset {offset}, {quantization.name}")
        if begin + n_bytes > data.size:
            raise ValueError(f"tensor {name} ends at byte {begin + n_bytes}, the file at {data.size}")
        tensors[name] = GGUFTensor(name, shape, quantization, data[begin : begin + n_bytes])
    return GGUFFile(path, metadata, tensors)


class _Header:
    """A cursor over the bytes before the tensor data; every read is checked against the end of the file."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self.offset = 0

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > self._data.size - self.offset:
            raise ValueError(f"{n_bytes} bytes expected at byte {self.offset}, the file ends at {self._data.size}")
        begin, self.offset = self.offset, self.offset + n_bytes
        return self._data[begin : self.offset].tobytes()

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            return self._array()
        if type_id not in SCALARS:
            raise ValueError(f"unknown metadata type {type_id} at byte {self.offset}")
        return self.scalar(SCALARS[type_id])

    def _array(self) -> list[Any]:
        type_id, length = self.scalar("I"), self.scalar("Q")
        if type_id == STRING:
            return [self.string() for _ in range(length)]
        if type_id not in SCALARS:
            raise ValueError(f"unknown array type {type_id} at byte {self.offset}")
        code = SCALARS[type_id]
        payload = self.take(length * struct.calcsize(f"<{code}"))
        return list(np.frombuffer(payload, np.dtype(f"<{code}")).tolist())

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = self.string(), self.scalar("I")
        if n_dims > 8:
            raise ValueError(f"tensor {name!r} has {n_dims} dimensions")
        dims = [self.scalar("Q") for _ in range(n_dims)]
        return name, tuple(reversed(dims)), self.scalar("I"), self.scalar("Q")


def _decodable(path: Path, name: str, type_id: int) -> GGMLQuantizationType:
    quantization = GGMLQuantizationType(type_id)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
    except NotImplementedError:
        raise CheckpointError(
            "unsupported GGUF quantisation",
            where=str(path),
            seen=f"{name}: {quantization.name}",
            required="F32, F16, BF16, or a block quantisation that the gguf package decodes",
            fix="use a Q4_1, Q8_0 or F16 file of the same model",
        ) from None
    return quantization
