"""A downloaded checkpoint as lazily read tensors under their Hugging Face names."""

import re
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import refuse_checkpoint
from common.jsonl import parse_json
from common.say import dtype_name
from models.checkpoints.convert import DTYPES, Source, SourceTensor, separate_fused
from models.checkpoints.gguf_source import open_gguf, read_gguf
from models.checkpoints.hf_config import FUSED, config_from_hf, read_config
from models.checkpoints.manifest import CONFIG, downloaded_side_files
from models.checkpoints.quantized_source import QuantizedFormat, dequantized, quantized_format

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # computed from the config, whatever the dtype
MAPS = ("d2t", "t2d")  # maps of a trained head's vocabulary, which alone may be in dtypes other than DTYPES
MAP_DTYPES = (*DTYPES, torch.int64, torch.bool)
SAFETENSORS_DTYPES = dict(zip(("F64", "F32", "F16", "BF16", "I64", "BOOL"), MAP_DTYPES, strict=True))
SAFETENSORS_DTYPES |= {"I32": torch.int32, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}


def open_source(folder: Path) -> Source:
    """Open the safetensors, pytorch_model*.bin or GGUF weights of a folder, the first found in this order. Reads
    headers. Raises CheckpointError naming the file that is missing, truncated, garbled, or of another model."""
    if not folder.is_dir():
        refuse_checkpoint(folder, "no such folder", "the folder of a downloaded checkpoint")
    described = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    open_them = partial(open_weights, folder, form=quantized_format(described, str(folder / CONFIG)))
    if tensors := open_them("model", ".safetensors") or open_them("pytorch_model", ".bin"):
        files = tuple(sorted({tensor.file for tensor in tensors.values()}))
        hf_config = read_config(folder / CONFIG)
        config = config_from_hf(hf_config, where=str(folder / CONFIG))
        if hf_config["architectures"][0] in FUSED:
            tensors = separate_fused(tensors, config)
        return Source(files, tensors, hf_config, config, downloaded_side_files(folder))
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) != 1:
        for path in ggufs:
            read_gguf(path)  # refuses parts of a split file as such
        seen = ", ".join(path.name for path in ggufs) or "no model.safetensors, pytorch_model.bin, index or *.gguf"
        required = "model.safetensors or pytorch_model.bin, or an index with its shards, or exactly one *.gguf"
        refuse_checkpoint(folder, seen, required, "no single set of weights in the folder")
    return open_gguf(ggufs[0], downloaded_side_files(folder))


def open_weights(folder: Path, stem: str, suffix: str, form: QuantizedFormat | None = None) -> dict[str, SourceTensor]:
    """Return the tensors of one format: of a single file, or of the shards of an index; none without either. form: how
    linear layers are quantised, which are returned plain. Raises CheckpointError if a file is damaged, for another
    dtype, or if it is not certain which files are the model's."""
    single, index = f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
    is_weights = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?{re.escape(suffix)}")
    there = {path.name for path in folder.iterdir() if is_weights.fullmatch(path.name)}
    file_of = _read_index(index) if index.is_file() else {}
    files = sorted({*file_of.values()}) or [single] * bool(there)
    if strays := sorted(there.difference(files)):
        required = f"{single}, or the shards of {index.name} alone"
        fix = "delete the file if it is not this model's, or download the index that lists it"
        refuse_checkpoint(folder / strays[0], ", ".join(strays[:4]), required, fix=fix)
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        for name, tensor in _open_file(folder / file).items():
            if (listed := file_of.get(name, file)) != file:
                required = f"{name} in {listed} ({index.name})"
                refuse_checkpoint(folder / file, name, required, "a tensor is not where the index says")
            tensors[name] = tensor
    if absent := sorted(file_of.keys() - tensors.keys()):
        where = folder / file_of[absent[0]]
        refuse_checkpoint(where, f"no {absent[0]}", f"all tensors of {index.name}", "a tensor is missing")
    tensors = dequantized(tensors, form)
    for name, tensor in tensors.items():
        if tensor.dtype not in (MAP_DTYPES if name.endswith(MAPS) else DTYPES):
            fix = "use the checkpoint's unquantised weights; quantise while loading instead"
            required = "in float64, float32, float16 or bfloat16"
            refuse_checkpoint(f"{tensor.file}: {name}", tensor.dtype, required, fix=fix)
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of each tensor. Raises CheckpointError."""
    try:
        file_of = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        if outside := [name for name in file_of.values() if Path(name).name != name]:
            raise ValueError(f"{outside[0]} is not in this folder")
        return {name: file for name, file in file_of.items() if not name.endswith(IGNORED_SUFFIXES)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse_checkpoint(index, repr(error), '{"weight_map": {tensor: shard}}')


def _open_file(path: Path) -> dict[str, SourceTensor]:
    """Return the tensors of a file. Raises CheckpointError if it is damaged."""
    try:
        stored = _read_safetensors(path) if path.suffix == ".safetensors" else _read_bin(path)
    except Exception as error:  # a damaged zip or pickle raises almost anything
        refuse_checkpoint(path, repr(error)[:200], f"a whole {path.suffix[1:]} file")
    return {name: tensor for name, tensor in stored.items() if not name.endswith(IGNORED_SUFFIXES)}


def _read_safetensors(path: Path) -> dict[str, SourceTensor]:
    shard = safe_open(str(path), framework="pt", device="cpu")
    tensors: dict[str, SourceTensor] = {}
    for name in shard.keys():  # noqa: SIM118 (not a dict)
        view = shard.get_slice(name)
        dtype: Any = SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype())
        read = partial(shard.get_tensor, name)
        tensors[name] = SourceTensor(tuple(view.get_shape()), dtype, path, read, dtype_name(dtype))
    return tensors


def _read_bin(path: Path) -> dict[str, SourceTensor]:
    in_zip = zipfile.is_zipfile(path)  # the format before torch 1.6 is no zip, and cannot be mapped
    stored = torch.load(path, map_location="cpu", mmap=in_zip, weights_only=True)
    for name, value in stored.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_sparse:
            raise ValueError(f"{name!r} is no dense tensor under a name")
    return {
        name: SourceTensor(tuple(x.shape), x.dtype, path, x.detach, dtype_name(x.dtype)) for name, x in stored.items()
    }
