"""A downloaded checkpoint as lazily read tensors under their Hugging Face names, whatever its format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.errors import CheckpointError
from models.checkpoints.archive import check_archive
from models.checkpoints.gguf_source import open_gguf
from models.checkpoints.side_files import own_side_files
from models.checkpoints.source import DTYPES, Source, SourceTensor, read_hf_config

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def open_source(folder: Path, side_files_are_theirs: bool = False) -> Source:
    """Open the safetensors, pytorch_model*.bin or GGUF weights of a folder, looked for in this order.

    Reads headers, and what it takes to compare the files with the folder's manifest. Raises CheckpointError naming
    the file that is missing, truncated, garbled, or of another model.
    """
    if not folder.is_dir():
        raise _broken("the checkpoint folder is missing", folder, "no such folder", "a downloaded checkpoint")
    for stem, suffix, open_shard in (
        ("model", ".safetensors", _open_safetensors),
        ("pytorch_model", ".bin", _open_bin),
    ):
        files, weight_map = _find_shards(folder, stem, suffix)
        if files:
            side_files = own_side_files(folder, files, side_files_are_theirs)
            tensors = _merge(files, weight_map, open_shard)
            hf_config, config = read_hf_config(folder)
            return Source(files, tensors, hf_config, config, side_files)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return open_gguf(ggufs[0], side_files_are_theirs)
    raise _broken(
        "no single set of weights in the folder",
        folder,
        ", ".join(path.name for path in ggufs) or "no *.safetensors, pytorch_model*.bin or *.gguf",
        "model*.safetensors, pytorch_model*.bin, or exactly one *.gguf",
    )


def _find_shards(folder: Path, stem: str, suffix: str) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """The weight files of one format, and the index's map of tensor to shard if there is an index."""
    index = folder / f"{stem}{suffix}.index.json"
    if (folder / f"{stem}{suffix}").is_file() or not index.is_file():
        single = folder / f"{stem}{suffix}"
        return ((single,) if single.is_file() else tuple(sorted(folder.glob(f"{stem}*{suffix}")))), None
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = [name for name in weight_map.values() if Path(name).name != name]
        if outside:
            raise ValueError(f"{outside[0]} is not in this folder")
        files = tuple(folder / name for name in sorted(set(weight_map.values())))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken("the index is not readable", index, repr(error), '{"weight_map": {tensor: shard}}') from None
    for file in files:
        if not file.is_file():
            raise _broken("a shard is missing", file, "no such file", f"every shard that {index.name} names")
    return files, weight_map


def _merge(
    files: Iterable[Path],
    weight_map: dict[str, str] | None,
    open_shard: Callable[[Path], dict[str, SourceTensor]],
) -> dict[str, SourceTensor]:
    shards = {file.name: open_shard(file) for file in files}
    if weight_map is None:
        tensors = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    else:
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                where = next(file for file in files if file.name == shard)
                raise _broken("the index names a tensor that its shard lacks", where, f"no {name}", f"{name} in it")
        tensors = {name: shards[shard][name] for name, shard in weight_map.items()}
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED_SUFFIXES)}


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _open_safetensors(path: Path) -> dict[str, SourceTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        shard = safe_open(str(path), framework="pt", device="cpu")
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise _broken("a shard is truncated or garbled", path, error, "a whole safetensors file") from None
    tensors = {}
    for name, view in slices.items():
        dtype = _SAFETENSORS_DTYPES.get(view.get_dtype())
        if dtype is None and not name.endswith(IGNORED_SUFFIXES):
            raise _not_floating(path, name, view.get_dtype())
        read = partial(shard.get_tensor, name)
        tensors[name] = SourceTensor(tuple(view.get_shape()), dtype or torch.float32, path, read)
    return tensors


def _open_bin(path: Path) -> dict[str, SourceTensor]:
    try:
        try:
            check_archive(path)
            shard = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            shard = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
        items = list(shard.items())
    except Exception as error:  # a damaged zip or pickle raises almost anything
        seen = f"{type(error).__name__}: {str(error)[:200]}"
        raise _broken("a shard is truncated or garbled", path, seen, "a whole state dict saved by torch") from None
    tensors = {}
    for name, tensor in items:
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            if str(name).endswith(IGNORED_SUFFIXES):
                continue
            raise _not_floating(path, str(name), getattr(tensor, "dtype", type(tensor).__name__))
        tensors[name] = SourceTensor(tuple(tensor.shape), tensor.dtype, path, partial(_identity, tensor))
    return tensors


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _not_floating(path: Path, name: str, dtype: object) -> CheckpointError:
    return CheckpointError(
        "a tensor has the wrong dtype",
        where=str(path),
        seen=f"{name}: {dtype}",
        required="float64, float32, float16 or bfloat16",
        fix="use the checkpoint's unquantised weights; quantise while loading instead",
    )


def _broken(what: str, where: Path, seen: object, required: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=str(where),
        seen=seen,
        required=required,
        fix="download the checkpoint again (download.py resumes and replaces what is missing)",
    )
