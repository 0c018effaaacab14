"""Weights are compared with the manifest when they are loaded; each version of a file is read once for that."""

import json
import os
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from checkpoint_folders import hf_weights, write_source

from common.errors import CheckpointError
from convert_hf_checkpoint import convert
from models.checkpoints import manifest
from models.checkpoints.loading import load_model, read_checkpoint, save_checkpoint


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read for their sums; every file is large enough to be remembered."""
    names: list[str] = []
    counting = Mock(wraps=manifest.sha256_of, side_effect=lambda path: names.append(path.name) or DEFAULT)
    monkeypatch.setattr(manifest, "sha256_of", counting)
    monkeypatch.setattr(manifest, "REMEMBERED_FROM", 0)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    return names


@pytest.fixture
def folder(tmp_path: Path, read: list[str]) -> Path:
    write_source(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "model")
    return tmp_path / "model"


def zero(path: Path, n_bytes: int = 64) -> None:
    """Inside a tensor's data, in the file's own inode, with its time of change put back."""
    before, content = path.stat(), bytearray(path.read_bytes())
    start = content.index(bytes(read_checkpoint(path.parent)[1]["layers.1.attention.wo.weight"].numpy().data))
    content[start : start + n_bytes] = bytes(n_bytes)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


NO_CACHES = [{"return_value": Path("/dev/null/cache")}, {"side_effect": RuntimeError("no home")}]


@pytest.mark.parametrize("cache", [None, *NO_CACHES])
def test_zeroed_weights_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, cache) -> None:
    """A cache that cannot be used is no error, and no reason to trust."""
    if cache:
        monkeypatch.setattr(manifest, "cache_folder", Mock(**cache))
    load_model(folder)
    zero(folder / "model.pth")
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        load_model(folder)


def test_a_file_is_read_once_for_each_version(folder: Path, read: list[str]) -> None:
    """A conversion leaves nothing to read again."""
    read.clear()
    load_model(folder)
    load_model(folder)
    assert read == []
    (folder / "model.pth").write_bytes((folder / "model.pth").read_bytes())
    load_model(folder)
    load_model(folder)
    assert read == ["model.pth"]
    load_model(folder, verify=True)
    assert sorted(read[1:]) == ["config.json", "model.pth", "tokenizer.json"]


def test_verify_reads_what_is_remembered(folder: Path, tmp_path: Path) -> None:
    """A disk may change a bit by itself: the file's times are then those of the remembered sum."""
    whole = json.loads((folder / "manifest.json").read_text())["files"]["model.pth"]["sha256"]
    zero(folder / "model.pth")
    with pytest.raises(CheckpointError):
        load_model(folder)
    for note in (tmp_path / "cache" / "sha256").iterdir():
        note.write_text(whole)
    load_model(folder)
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        load_model(folder, verify=True)


@pytest.mark.parametrize("value, dtype", [(float("nan"), "float32"), (float("inf"), "float32"), (1e6, "float16")])
def test_weights_that_are_not_finite_in_the_dtype_are_refused(
    folder: Path, tmp_path: Path, value: float, dtype: str
) -> None:
    """When they are converted, and when they are loaded."""
    config, state_dict = read_checkpoint(folder)
    weights = hf_weights(config)
    weights["model.layers.1.self_attn.k_proj.weight"][3, 2] = value
    (path,) = write_source(tmp_path / "bad", **weights)
    named = r"layers\.1\.attention\.wqkv\.weight"
    with pytest.raises(CheckpointError, match=rf"{path.name}\n.*{named}"):
        convert(path.parent, path.parent, dtype=dtype)
    assert not (path.parent / "model.pth").exists()
    stacked = {name: tensor.clone() for name, tensor in state_dict.items()}
    stacked["layers.1.attention.wqkv.weight"][17, 2] = value
    (folder / "manifest.json").unlink()
    save_checkpoint(folder / "model.pth", config, stacked)
    with pytest.raises(CheckpointError, match=rf"{named} in torch\.{dtype}"):
        load_model(folder, dtype=getattr(torch, dtype))
