"""Checkpoints: a typed error for every kind of damage, to what is converted and to what is loaded."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from checkpoint_folders import write_source

from common.errors import CheckpointError, ConfigError, UserError
from convert_hf_checkpoint import convert
from models.checkpoints import loading
from models.checkpoints.loading import load_model, read_checkpoint, save_checkpoint
from models.config import ModelConfig

Damage = dict[str, tuple[Callable[[Path], object], str]]
SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_source(tmp_path, layout="sharded safetensors")
    return tmp_path


@pytest.fixture
def converted(source: Path) -> Path:
    convert(source, source)
    return source


def truncate(path: Path, fraction: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, key: str, value: object) -> None:
    """Set a value of a JSON file; "/" in the key separates levels."""
    whole = json.loads(path.read_text())
    *parents, last = key.split("/")
    inner = whole
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    path.write_text(json.dumps(whole))


def edit_header(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content and len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))


SOURCE_DAMAGE: Damage = {
    "shard cut in its data": (lambda d: truncate(d / SHARD, 0.9), SHARD),
    "shard is other content": (lambda d: (d / SHARD).write_bytes(b"<html>not found</html>" * 9), SHARD),
    "header dtype": (lambda d: edit_header(d / SHARD, b'"F32"', b'"I32"'), SHARD),
    "shard missing": (lambda d: (d / SHARD).unlink(), SHARD),
    "index names a missing shard": (lambda d: edit(d / INDEX, "weight_map/extra", "9.safetensors"), "9.safetensors"),
    "index points outside": (lambda d: edit(d / INDEX, "weight_map/extra", "../x.safetensors"), "index.json"),
    "config missing": (lambda d: (d / "config.json").unlink(), "config.json"),
    "config of another model": (lambda d: edit(d / "config.json", "num_hidden_layers", 3), "model.layers.2"),
    "config with fewer layers": (lambda d: edit(d / "config.json", "num_hidden_layers", 1), "model.layers.1"),
    "tokenizer missing": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "manifest garbled": (lambda d: (d / "manifest.json").write_text('{"files": {"a": 1}}'), "manifest.json"),
    "an adapter beside the weights": (lambda d: (d / "adapter_config.json").write_text("{}"), "adapter_config.json"),
    "no folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("damage", SOURCE_DAMAGE)
def test_damaged_source_is_refused_and_nothing_written(source: Path, damage: str) -> None:
    apply, named = SOURCE_DAMAGE[damage]
    apply(source)
    before = sorted(source.iterdir()) if source.exists() else []
    with pytest.raises((CheckpointError, ConfigError)) as refusal:
        convert(source, source)
    assert named in str(refusal.value)
    assert (sorted(source.iterdir()) if source.exists() else []) == before


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "name, tensor",
    [
        ("model.norm.weight", torch.ones(16, dtype=torch.int32)),
        ("model.norm.weight", torch.ones(17)),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(4)),
    ],
)
def test_tensor_unlike_the_config(tmp_path: Path, layout: str, name: str, tensor: torch.Tensor) -> None:
    write_source(tmp_path, layout=layout, **{name: tensor})
    with pytest.raises(CheckpointError, match=name):
        convert(tmp_path, tmp_path)
    assert not (tmp_path / "model.pth").exists()


def test_failed_write_leaves_the_old_model(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(loading.torch, "save", full_disk)
    before = sorted(converted.iterdir())
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        convert(converted, converted, force=True)
    assert sorted(converted.iterdir()) == before
    read_checkpoint(converted, verify=True)


def without_manifest(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    return folder / "model.pth"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace model.pth by one that is whole but wrong, with no manifest to give it away; None drops a tensor."""
    path = without_manifest(folder)
    config, state_dict = read_checkpoint(folder)
    state_dict = {name: tensor.clone() for name, tensor in state_dict.items()} | changes
    save_checkpoint(path, config, {name: tensor for name, tensor in state_dict.items() if tensor is not None})


def of_another_config(folder: Path) -> None:
    path = without_manifest(folder)
    config, state_dict = read_checkpoint(folder)
    save_checkpoint(path, ModelConfig.from_dict({**asdict(config), "rope_theta": 5e5}), state_dict)


MODEL_DAMAGE: Damage = {
    "missing": (lambda d: (d / "model.pth").unlink(), r"model\.pth"),
    "cut": (lambda d: truncate(d / "model.pth", 0.7), r"model\.pth"),
    "cut, no manifest": (lambda d: truncate(without_manifest(d), 0.7), r"model\.pth"),
    "bit flip": (lambda d: flip_bit(d / "model.pth"), r"model\.pth"),
    "tokenizer gone": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "config gone": (lambda d: (d / "config.json").unlink(), "config.json"),
    "another config beside it": (of_another_config, "rope_theta 500000.0"),
    "a tensor of another shape": (lambda d: rewrite(d, **{"norm.weight": torch.ones(15)}), r"norm.weight', \(15,\)"),
    "a tensor missing": (lambda d: rewrite(d, **{"layers.1.ffn_norm.weight": None}), "layers.1.ffn_norm.weight"),
}


@pytest.mark.parametrize("damage", MODEL_DAMAGE)
def test_damaged_model_is_refused_before_any_parameter_exists(converted, damage, monkeypatch):
    apply, named = MODEL_DAMAGE[damage]
    apply(converted)
    built: list[ModelConfig] = []
    monkeypatch.setattr(loading, "Transformer", built.append)
    with pytest.raises(UserError, match=named):
        load_model(converted / "model.pth", verify=True)
    assert built == []
