"""Checkpoints: conversion from every Hugging Face format, and a typed error for every kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import convert_hf_checkpoint
from common import cli
from common.errors import CheckpointError, ConfigError, UserError
from convert_hf_checkpoint import convert
from models.checkpoints import loading as checkpoint
from models.checkpoints.convert import source_parts
from models.checkpoints.loading import drop_layers, expected_shapes, load_model, read_checkpoint, save_checkpoint
from models.config import ModelConfig
from models.names import parse_layers

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
}
QWEN = {"architectures": ["Qwen2ForCausalLM"]}
TIED = {"tie_word_embeddings": True}


def hf_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [part for stacked in source_parts(config).values() for part in stacked]
    return {name: torch.randn(shape, generator=generator) for name, shape in parts}


def write_side_files(folder: Path, **changes: object) -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
    vocabulary = {character: index for index, character in enumerate("abcdefghijklmnopqrstuvwx")}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return ModelConfig.from_json(folder / "config.json")


def write_weights(folder: Path, weights: dict[str, torch.Tensor], layout: str) -> list[Path]:
    """`layout`: safetensors or bin; "sharded" adds an index, "old" is the .bin from before torch 1.6."""
    suffix, stem = (".safetensors", "model") if "safetensors" in layout else (".bin", "pytorch_model")
    names = list(weights)
    shards = [names[::2], names[1::2]] if "sharded" in layout else [names]
    files = []
    for number, shard in enumerate(shards, 1):
        infix = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        files.append(folder / f"{stem}{infix}{suffix}")
        content = {name: weights[name] for name in shard}
        if suffix == ".safetensors":
            save_file(content, files[-1])
        else:
            torch.save(content, files[-1], _use_new_zipfile_serialization="old" not in layout)
    if len(shards) > 1:
        weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


def fused(config: ModelConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([weights[part] for part, _ in stacked]) for name, stacked in source_parts(config).items()}


def assert_same(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(seen[name], wanted[name], rtol=0, atol=0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = write_side_files(tmp_path)
    write_weights(tmp_path, hf_weights(config), "sharded safetensors")
    return tmp_path


@pytest.fixture
def converted(source: Path) -> Path:
    convert(source, source)
    return source


@pytest.mark.parametrize("layout", ["safetensors", "sharded safetensors", "bin", "sharded bin", "old bin"])
@pytest.mark.parametrize("changes", [{}, TIED, QWEN], ids=["llama", "tied", "qwen2"])
def test_conversion_round_trip(tmp_path: Path, layout: str, changes: dict[str, object]) -> None:
    config = write_side_files(tmp_path, **changes)
    weights = hf_weights(config)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    if config.tie_embeddings:
        extra["lm_head.weight"] = torch.zeros(config.vocab_size, config.dim)
    write_weights(tmp_path, weights | extra, layout)
    convert(tmp_path, tmp_path)

    read_config, state_dict = read_checkpoint(tmp_path, verify=True)
    assert read_config == config
    assert {name: tuple(tensor.shape) for name, tensor in state_dict.items()} == expected_shapes(config)
    assert_same(state_dict, fused(config, weights))
    model = load_model(tmp_path / "model.pth", prepack=False)
    assert_same(dict(model.state_dict()), fused(config, weights))
    assert not model.training
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


def test_rows_are_q_then_k_then_v_and_gate_then_up(converted: Path) -> None:
    config, state_dict = read_checkpoint(converted)
    weights = hf_weights(config)
    q, k, v = state_dict["layers.1.attention.wqkv.weight"].split([16, 8, 8])
    gate, up = state_dict["layers.1.feed_forward.w13.weight"].chunk(2)
    for rows, name in [
        (q, "self_attn.q"),
        (k, "self_attn.k"),
        (v, "self_attn.v"),
        (gate, "mlp.gate"),
        (up, "mlp.up"),
    ]:
        assert torch.equal(rows, weights[f"model.layers.1.{name}_proj.weight"])


@pytest.mark.parametrize(
    "source_dtype, asked, stored",
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.float16),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_dtypes(tmp_path: Path, source_dtype: torch.dtype, asked: str | None, stored: torch.dtype) -> None:
    weights = {name: tensor.to(source_dtype) for name, tensor in hf_weights(write_side_files(tmp_path)).items()}
    write_weights(tmp_path, weights, "safetensors")
    convert(tmp_path, tmp_path, dtype=asked)
    assert {tensor.dtype for tensor in read_checkpoint(tmp_path)[1].values()} == {stored}
    assert {parameter.dtype for parameter in load_model(tmp_path, dtype=torch.float64).parameters()} == {torch.float64}


def test_drop_layers_while_converting(source: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "shallow"
    convert(source, out_dir, layers_to_drop=(1,))
    config, state_dict = read_checkpoint(out_dir, verify=True)
    full = ModelConfig.from_json(source / "config.json")
    assert config.n_layer == 2
    wanted, _ = drop_layers(fused(full, hf_weights(full)), full, [1])
    assert_same(state_dict, wanted)
    assert torch.equal(
        state_dict["layers.1.ffn_norm.weight"], fused(full, hf_weights(full))["layers.2.ffn_norm.weight"]
    )
    assert load_model(out_dir).config.n_layer == 2
    assert not (source / "model.pth").exists()


@pytest.mark.parametrize("layers", [[3], [-1], [0, 1, 2]])
def test_drop_layers_refuses(layers: list[int]) -> None:
    config = ModelConfig.from_hf(HF_CONFIG)
    with pytest.raises(ConfigError, match="layers 0 to 2"):
        drop_layers(fused(config, hf_weights(config)), config, layers)


@pytest.mark.parametrize("text, layers", [("1", [1]), ("3,7,13-15", [3, 7, 13, 14, 15]), (" 2 , 2-3", [2, 3])])
def test_parse_layers(text: str, layers: list[int]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "1-2-3"])
def test_parse_layers_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="--drop_layers"):
        parse_layers(text)


def test_dropping_in_place_is_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match="--out_dir"):
        convert(source, source, layers_to_drop=(1,))


def test_second_conversion_reuses_the_first(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (converted / "model.pth").stat().st_mtime_ns
    convert(converted, converted)
    assert "up to date" in capsys.readouterr().out
    assert (converted / "model.pth").stat().st_mtime_ns == before
    flip_bit(converted / "model.pth")
    convert(converted, converted)
    read_checkpoint(converted, verify=True)


@pytest.mark.parametrize("change", ["force", "dtype", "weights"])
def test_another_conversion_replaces_the_first(converted: Path, change: str) -> None:
    before = (converted / "model.pth").stat().st_ino
    if change == "weights":  # with a config.json and tokenizer that are theirs as far as anyone can tell
        (converted / "manifest.json").unlink()
        write_weights(converted, hf_weights(ModelConfig.from_hf(HF_CONFIG), seed=1), "sharded safetensors")
    convert(converted, converted, force=change == "force", dtype="float16" if change == "dtype" else None)
    assert (converted / "model.pth").stat().st_ino != before
    read_checkpoint(converted, verify=True)


def truncate(path: Path, fraction: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_header(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content and len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))


def edit_index(folder: Path, **entries: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(entries)
    path.write_text(json.dumps(index))


def remove_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


SHARD = "model-00001-of-00002.safetensors"
SOURCE_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut to nothing": (lambda d: truncate(d / SHARD, 0), SHARD),
    "shard cut in its header": (lambda d: truncate(d / SHARD, 0.05), SHARD),
    "shard cut in its data": (lambda d: truncate(d / SHARD, 0.9), SHARD),
    "shard is other content": (lambda d: (d / SHARD).write_bytes(b"<html>not found</html>" * 9), SHARD),
    "header offsets": (lambda d: edit_header(d / SHARD, b'"data_offsets":[0,', b'"data_offsets":[9,'), SHARD),
    "header dtype": (lambda d: edit_header(d / SHARD, b'"F32"', b'"I32"'), SHARD),
    "header shape": (lambda d: edit_header(d / SHARD, b"[20,16]", b"[16,20]"), SHARD),
    "shard missing": (lambda d: (d / SHARD).unlink(), SHARD),
    "index names a missing shard": (
        lambda d: edit_index(d, extra="model-9.safetensors"),
        "model-9.safetensors",
    ),
    "index names a missing tensor": (lambda d: edit_index(d, extra=SHARD), SHARD),
    "index points outside": (lambda d: edit_index(d, extra="../x.safetensors"), "index.json"),
    "index cut": (lambda d: truncate(d / "model.safetensors.index.json", 0.5), "index.json"),
    "config missing": (lambda d: (d / "config.json").unlink(), "config.json"),
    "config cut": (lambda d: truncate(d / "config.json", 0.5), "config.json"),
    "config of another model": (lambda d: write_side_files(d, num_hidden_layers=4), "model.layers.3"),
    "config of a billion layers": (lambda d: write_side_files(d, num_hidden_layers=10**9), "1000000000 layers"),
    "config with fewer layers": (lambda d: write_side_files(d, num_hidden_layers=2), "model.layers.2"),
    "tokenizer missing": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "tokenizer cut": (lambda d: truncate(d / "tokenizer.json", 0.5), "tokenizer.json"),
    "manifest garbled": (lambda d: (d / "manifest.json").write_text('{"files": {"a": 1}}'), "manifest.json"),
    "no weights": (remove_weights, "gguf"),
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


@pytest.mark.parametrize("fraction", [0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("layout", ["bin", "old bin"])
def test_truncated_bin_is_refused(tmp_path: Path, layout: str, fraction: float) -> None:
    (path,) = write_weights(tmp_path, hf_weights(write_side_files(tmp_path)), layout)
    truncate(path, fraction)
    with pytest.raises(CheckpointError, match=path.name):
        convert(tmp_path, tmp_path)
    assert not (tmp_path / "model.pth").exists()


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "name, tensor, said",
    [
        ("model.norm.weight", torch.ones(16, dtype=torch.int32), "wrong dtype"),
        ("model.norm.weight", torch.ones(17), "wrong shape"),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(4), "no place"),
        ("model.layers.0.mlp.experts.0.w1.weight", torch.ones(4), "no place"),
    ],
)
def test_tensor_unlike_the_config(tmp_path: Path, layout: str, name: str, tensor: torch.Tensor, said: str) -> None:
    write_weights(tmp_path, hf_weights(write_side_files(tmp_path)) | {name: tensor}, layout)
    with pytest.raises(CheckpointError, match=said) as refusal:
        convert(tmp_path, tmp_path)
    assert name in str(refusal.value)
    assert not (tmp_path / "model.pth").exists()


def test_flipped_source_bit_is_caught_by_the_manifest(converted: Path) -> None:
    """As after a download: the manifest lists the shards."""
    from models.checkpoints.manifest import describe, update_manifest

    update_manifest(converted, describe(converted, [SHARD]))
    flip_bit(converted / SHARD)
    with pytest.raises(CheckpointError, match=SHARD):
        convert(converted, converted, force=True)


def test_not_enough_disk_space(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(convert_hf_checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="disk space"):
        convert(source, source)
    assert not (source / "model.pth").exists()


def test_failed_write_leaves_the_old_model(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(checkpoint.torch, "save", full_disk)
    before = sorted(converted.iterdir())
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        convert(converted, converted, force=True)
    assert sorted(converted.iterdir()) == before
    read_checkpoint(converted, verify=True)


def without_manifest(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    return folder / "model.pth"


def rewrite(folder: Path, change: str) -> None:
    """Replace model.pth by one that is whole but wrong, with no manifest to give it away."""
    path = without_manifest(folder)
    config, state_dict = read_checkpoint(folder)
    state_dict = {name: tensor.clone() for name, tensor in state_dict.items()}
    if change == "config":
        config = ModelConfig.from_dict({**config.to_dict(), "rope_theta": 5e5})
    elif change == "dtype":
        state_dict["norm.weight"] = state_dict["norm.weight"].int()
    elif change == "shape":
        state_dict["norm.weight"] = state_dict["norm.weight"][:-1]
    elif change == "missing":
        del state_dict["layers.1.ffn_norm.weight"]
    else:
        state_dict["layers.1.q_norm.weight"] = torch.ones(4)
    save_checkpoint(path, config, state_dict)


MODEL_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda d: (d / "model.pth").unlink(), "missing"),
    "cut to nothing": (lambda d: truncate(d / "model.pth", 0), "manifest"),
    "cut": (lambda d: truncate(d / "model.pth", 0.7), "manifest"),
    "cut, no manifest": (lambda d: truncate(without_manifest(d), 0.7), "cannot be read"),
    "other content": (lambda d: without_manifest(d).write_bytes(b"PK" * 99), "cannot be read"),
    "plain state dict": (lambda d: torch.save({"w": torch.ones(2)}, without_manifest(d)), "cannot be read"),
    "bit flip": (lambda d: flip_bit(d / "model.pth"), "sha256|manifest"),
    "tokenizer gone": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "config gone": (lambda d: (d / "config.json").unlink(), "config.json"),
    "another config beside it": (lambda d: rewrite(d, "config"), "rope_theta 500000.0"),
    "a tensor of integers": (lambda d: rewrite(d, "dtype"), "norm.weight torch.int32"),
    "a tensor of another shape": (lambda d: rewrite(d, "shape"), r"norm.weight \(15,\)"),
    "a tensor missing": (lambda d: rewrite(d, "missing"), "layers.1.ffn_norm.weight"),
    "a tensor too many": (lambda d: rewrite(d, "unknown"), "layers.1.q_norm.weight"),
}


@pytest.mark.parametrize("damage", MODEL_DAMAGE)
def test_damaged_model_is_refused_before_any_parameter_exists(
    converted: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, said = MODEL_DAMAGE[damage]
    apply(converted)
    built: list[ModelConfig] = []
    monkeypatch.setattr(checkpoint, "Transformer", built.append)
    with pytest.raises(UserError, match=said):
        load_model(converted / "model.pth", verify=True)
    assert built == []


def test_dummy_weights(tmp_path: Path) -> None:
    config = write_side_files(tmp_path)
    by_path = load_model(tmp_path, load_format="dummy", prepack=False)
    by_config = load_model("anything", load_format="dummy", config=config, dtype=torch.bfloat16)
    assert by_path.config == by_config.config == config
    for name, tensor in by_path.state_dict().items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            assert 0.01 < float(tensor.std()) < 0.03
    assert {parameter.dtype for parameter in by_config.parameters()} == {torch.bfloat16}
    assert_same(dict(by_path.state_dict()), dict(load_model(tmp_path, load_format="dummy", prepack=False).state_dict()))


def test_unknown_load_format(converted: Path) -> None:
    with pytest.raises(ConfigError, match="pth or dummy"):
        load_model(converted, load_format="gguf")


def test_command_line(source: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    arguments = ["--checkpoint_dir", str(source), "--out_dir", str(out_dir), "--drop_layers", "0-1"]
    convert_hf_checkpoint.main(cli.read(convert_hf_checkpoint.Flags, arguments))
    assert load_model(out_dir).config.n_layer == 1
    assert {path.name for path in out_dir.iterdir()} == {
        "model.pth",
        "config.json",
        "tokenizer.json",
        "manifest.json",
    }


def test_a_file_in_the_folders_place_is_told_of_its_folder(tmp_path):
    (tmp_path / "smol.gguf").touch()
    with pytest.raises(ConfigError, match=f"use --checkpoint_dir {tmp_path}$"):
        convert_hf_checkpoint.main(convert_hf_checkpoint.Flags(checkpoint_dir=tmp_path / "smol.gguf"))
