"""A downloaded checkpoint as lazily read tensors under their Hugging Face names."""

import json
import re
import zipfile
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import CheckpointError
from common.say import dtype_name
from models.checkpoints.convert import DTYPES, Source, SourceTensor, separate_fused
from models.checkpoints.gguf_source import open_gguf, read_gguf
from models.checkpoints.manifest import CONFIG, own_side_files
from models.config import ModelConfig, read_config
from models.hf_config import FUSED

DOWNLOAD_AGAIN = "download the checkpoint again (download.py resumes and replaces what is missing)"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
# By name: shape, dtype (or the name of another type), and the function that reads the tensor.
Stored = dict[str, tuple[Sequence[int], Any, Any]]
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAFETENSORS_DTYPES |= {"I64": torch.int64, "BOOL": torch.bool}


def open_source(folder: Path) -> Source:
    """Open the safetensors, pytorch_model*.bin or GGUF weights of a folder, the first found in this order. Reads
    headers. Raises CheckpointError naming the file that is missing, truncated, garbled, or of another model."""
    if not folder.is_dir():
        missing, required = "the checkpoint folder is missing", "the folder of a downloaded checkpoint"
        raise CheckpointError(missing, folder, "no such folder", required, DOWNLOAD_AGAIN)
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        if found := _open_weights(folder, stem, suffix, DTYPES):
            files, tensors = found
            hf_config = read_config(folder / CONFIG)
            config = ModelConfig.from_hf(hf_config, where=str(folder / CONFIG))
            if hf_config["architectures"][0] in FUSED:
                tensors = separate_fused(tensors, config)
            return Source(files, tensors, hf_config, config, own_side_files(folder))
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) != 1:
        for path in ggufs:
            read_gguf(path)  # refuses parts of a split file as such
        seen = ", ".join(path.name for path in ggufs) or "no model.safetensors, pytorch_model.bin, index or *.gguf"
        required = "model.safetensors or pytorch_model.bin, or an index with its shards, or exactly one *.gguf"
        raise CheckpointError("no single set of weights in the folder", folder, seen, required, DOWNLOAD_AGAIN)
    return open_gguf(ggufs[0], own_side_files(folder))


def open_tensors(folder: Path, names: Sequence[tuple[str, str]], dtypes: Collection[Any]) -> dict[str, SourceTensor]:
    """Return the tensors of the first file, or shards, that a folder has under those stems and suffixes. Raises
    CheckpointError if it has none, or for a tensor of another dtype."""
    for stem, suffix in names:
        if found := _open_weights(folder, stem, suffix, dtypes):
            return found[1]
    seen, required = "none of them", " or ".join(f"{stem}{suffix}" for stem, suffix in names)
    raise CheckpointError("the folder has no weights", folder, seen, required, DOWNLOAD_AGAIN)


def _open_weights(
    folder: Path, stem: str, suffix: str, dtypes: Collection[Any]
) -> tuple[tuple[Path, ...], dict[str, SourceTensor]] | None:
    """Return the weight files of one format and their tensors: one file, or the shards of an index; None without
    either. Raises CheckpointError where it is not certain which files are the model's."""
    single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
    own_name = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?{re.escape(suffix)}")
    there = {path for path in folder.iterdir() if own_name.fullmatch(path.name)}
    if not index.is_file():
        if there and single not in there:
            seen, required = min(there).name, f"{index.name}, which names all of them"
            raise CheckpointError("shards without their index", folder, seen, required, DOWNLOAD_AGAIN)
        return ((single,), _open_shards((single,), dtypes)) if there else None
    places = _read_index(index)
    files = tuple(folder / name for name in sorted(set(places.values())))
    # transformers reads the single file, whatever the index says.
    if strays := sorted(there.difference(files) or ({single} & there if len(files) > 1 else ())):
        what, required = "a file of weights that is no shard of the index", f"the shards of {index.name} and no others"
        fix = f"delete {strays[0].name}, or the index and its shards: whichever is not this model's"
        raise CheckpointError(what, strays[0], ", ".join(path.name for path in strays[:4]), required, fix)
    tensors = _open_shards(files, dtypes)
    for name, file in places.items():
        seen = tensors[name].file.name if name in tensors else "no file"
        if seen != file and not name.endswith(IGNORED_SUFFIXES):
            what, required = "a tensor is not where the index says", f"in {file} ({index.name})"
            raise CheckpointError(what, folder / file, f"{name} in {seen}", required, DOWNLOAD_AGAIN)
    return files, tensors


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of each tensor. Raises CheckpointError."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if outside := [name for name in places.values() if Path(name).name != name]:
            raise ValueError(f"{outside[0]} is not in this folder")
        return dict(places)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        required = '{"weight_map": {tensor: shard}}'
        raise CheckpointError("the index is not readable", index, repr(error), required, DOWNLOAD_AGAIN) from None


def _open_shards(files: Sequence[Path], dtypes: Collection[Any]) -> dict[str, SourceTensor]:
    """Return the tensors of all files, without IGNORED_SUFFIXES, whose dtype may be any."""
    tensors: dict[str, SourceTensor] = {}
    for path in files:
        try:
            stored = _read_safetensors(path) if path.suffix == ".safetensors" else _read_bin(path)
        except Exception as error:  # a damaged zip or pickle raises almost anything
            seen, required = str(error)[:200] or repr(error), f"a whole {path.suffix[1:]} file"
            raise CheckpointError("a file of weights cannot be read", path, seen, required, DOWNLOAD_AGAIN) from None
        for name, (shape, dtype, read) in stored.items():
            if name.endswith(IGNORED_SUFFIXES):
                continue
            if dtype not in dtypes:
                fix = "use the checkpoint's unquantised weights; quantise while loading instead"
                required = "float64, float32, float16 or bfloat16"
                raise CheckpointError("a tensor has the wrong dtype", path, f"{name}: {dtype}", required, fix)
            if name in tensors:
                seen, required = f"{name}, which is in {tensors[name].file.name}, too", "each tensor in one file"
                raise CheckpointError("a tensor is in two files", path, seen, required, DOWNLOAD_AGAIN)
            tensors[name] = SourceTensor(tuple(shape), dtype, path, read, dtype_name(dtype))
    return tensors


def _read_safetensors(path: Path) -> Stored:
    shard = safe_open(str(path), framework="pt", device="cpu")
    stored: Stored = {}
    for name in shard.keys():  # noqa: SIM118 (not a dict)
        view = shard.get_slice(name)
        dtype = SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype())
        stored[name] = view.get_shape(), dtype, partial(shard.get_tensor, name)
    return stored


def _read_bin(path: Path) -> Stored:
    in_zip = zipfile.is_zipfile(path)  # not in the format before torch 1.6, which cannot be mapped
    values = torch.load(path, map_location="cpu", mmap=in_zip, weights_only=True).items()
    if strange := [name for name, x in values if not isinstance(name, str) or getattr(x, "is_sparse", False)]:
        raise ValueError(f"{strange[0]!r} is no dense tensor under a name")
    tensors: Stored = {name: (x.shape, x.dtype, x.detach) for name, x in values if isinstance(x, Tensor)}
    return tensors | {name: ((), type(x).__name__, None) for name, x in values if not isinstance(x, Tensor)}
