"""Checkpoints: a typed error for every kind of damage to source files and to converted files."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError, ConfigError, UserError
from convert_hf_checkpoint import convert
from models.checkpoints import loading
from models.checkpoints.loading import load_model, read_checkpoint, save_checkpoint
from models.config import ModelConfig
from models.tensor_parallel import Shard
from tests.support.checkpoint_folders import VOCABULARY, write_source

Damage = dict[str, tuple[Callable[[Path], object], str]]
SHARD, SECOND, INDEX = *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)), "model.safetensors.index.json"


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


def edit(path: Path, key: str, value: object) -> None:
    """Set a value of a JSON file; "/" in the key separates levels."""
    whole = json.loads(path.read_text())
    *parents, last = key.split("/")
    inner = whole
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    path.write_text(json.dumps(whole))


def copy_tensor(folder: Path) -> None:
    """Copy a tensor of the first shard to the second, where the index does not see it."""
    name, tensor = next(iter(load_file(folder / SHARD).items()))
    save_file(load_file(folder / SECOND) | {name: tensor}, folder / SECOND)


SOURCE_DAMAGE: Damage = {
    "shard cut in its data": (lambda d: truncate(d / SHARD, 0.9), SHARD),
    "shard missing": (lambda d: (d / SHARD).unlink(), SHARD),
    "index points outside": (lambda d: edit(d / INDEX, "weight_map/extra", "../x.safetensors"), "index.json"),
    "a single file beside the index": (lambda d: shutil.copy(d / SHARD, d / "model.safetensors"), "model.safetensors"),
    "a tensor in two shards": (copy_tensor, SECOND),
    "a tensor in no shard": (lambda d: edit(d / INDEX, "weight_map/model.extra.weight", SECOND), SECOND),
    "config with more layers": (lambda d: edit(d / "config.json", "num_hidden_layers", 3), "model.layers.2"),
    "config is a list": (lambda d: (d / "config.json").write_bytes(b"[1, 2]"), "config.json"),
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


def test_weights_that_were_saved_again_are_converted_again(source: Path) -> None:
    weights = convert(source, source)
    (source / SHARD).write_bytes((source / SHARD).read_bytes())
    read_checkpoint(weights)  # nothing changed
    tensors = load_file(source / SHARD)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, source / SHARD, {"format": "pt"})
    with pytest.raises(CheckpointError, match=SHARD):
        read_checkpoint(weights)
    assert read_checkpoint(convert(source, source, force=True))


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "name, tensor",
    [
        ("model.norm.weight", torch.ones(16, dtype=torch.int64)),
        ("model.norm.weight", torch.ones(17)),
        ("lm_head.weight", torch.ones(len(VOCABULARY), 16)),  # embeddings are tied
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(4)),
    ],
)
def test_a_tensor_unlike_the_config_is_refused(tmp_path: Path, layout: str, name: str, tensor: torch.Tensor) -> None:
    write_source(tmp_path, layout=layout, **{name: tensor})
    with pytest.raises(CheckpointError, match=name):
        convert(tmp_path, tmp_path)
    assert not (tmp_path / "model.pth").exists()


def test_a_failed_write_leaves_the_old_model(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(loading.torch, "save", full_disk)
    before = sorted(converted.iterdir())
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        convert(converted, converted, force=True)
    assert sorted(converted.iterdir()) == before
    read_checkpoint(converted)


def without_manifest(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    return folder / "model.pth"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Write another model.pth, and remove the manifest; None drops a tensor."""
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
    "tokenizer gone": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
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
        load_model(converted / "model.pth")
    assert built == []


def test_weights_of_the_same_shape_are_refused(converted: Path) -> None:
    """Also if their file has the size and the time of the right one."""
    path = converted / "model.pth"
    before, content = path.stat(), (converted / "manifest.json").read_bytes()
    config, state_dict = read_checkpoint(converted)
    save_checkpoint(path, config, {name: tensor + 1 for name, tensor in state_dict.items()})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and (converted / "manifest.json").read_bytes() == content
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        load_model(converted)


def test_other_formats_and_more_ranks_than_heads_are_refused(converted: Path) -> None:
    with pytest.raises(ConfigError, match="dumy"):
        load_model(converted, load_format="dumy")
    exchange: Any = SimpleNamespace(shard=Shard(0, 99))
    with pytest.raises(ConfigError, match="99 ranks"):
        load_model(converted, exchange=exchange)


@pytest.mark.parametrize("value, dtype", [(float("nan"), "float32"), (1e6, "float16")])
def test_weights_that_are_not_finite_in_the_dtype_are_refused(
    converted: Path, tmp_path: Path, value: float, dtype: str
) -> None:
    """They are refused both when they are converted and when they are loaded."""
    (path,) = write_source(tmp_path / "bad", **{"model.norm.weight": torch.full((16,), value)})
    with pytest.raises(CheckpointError, match=rf"{path.name}\n.*norm\.weight"):
        convert(path.parent, path.parent, dtype=dtype)
    assert not (path.parent / "model.pth").exists()
    rewrite(converted, **{"norm.weight": torch.full((16,), value)})
    with pytest.raises(CheckpointError, match=rf"norm\.weight in torch\.{dtype}"):
        load_model(converted, dtype=getattr(torch, dtype))
