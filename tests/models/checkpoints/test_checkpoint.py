"""Checkpoints: conversion from every Hugging Face format, layers dropped, and files that stay next to the weights."""

import os
import shutil
from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import SmolLM3Config

import convert_hf_checkpoint
from common import cli
from common.errors import CheckpointError
from common.say import dtype_name
from convert_hf_checkpoint import convert
from models.checkpoints.convert import source_parts
from models.checkpoints.hf_config import config_from_hf
from models.checkpoints.loading import drop_layers, expected_shapes, load_model, read_checkpoint
from models.checkpoints.model_source import find_model
from models.checkpoints.tokenizer import load_tokenizer
from models.config import ModelConfig
from tests.support.checkpoint_folders import (
    HF_CONFIG,
    hf_weights,
    write_side_files,
    write_source,
    write_weights,
)
from tests.support.gguf_files import convert_tiny_gguf, write_tiny_gguf
from tests.support.hf_tiny import SHAPE, random_model, save_folder

UNTIED = HF_CONFIG | {"num_hidden_layers": 3, "tie_word_embeddings": False}
CONFIG = config_from_hf(UNTIED)
KINDS = {"llama": UNTIED, "tied": HF_CONFIG, "qwen2": UNTIED | {"architectures": ["Qwen2ForCausalLM"]}}


def stacked(weights: dict[str, torch.Tensor], config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    return {name: torch.cat([weights[part] for part, _ in parts]) for name, parts in source_parts(config).items()}


def assert_same(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == wanted.keys()
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_source(tmp_path, UNTIED, "sharded safetensors")
    return tmp_path


LAYOUTS = {"safetensors": torch.float32, "sharded safetensors": torch.bfloat16}
LAYOUTS |= {"bin": torch.float16, "sharded bin": torch.float32, "old bin": torch.bfloat16}


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_parts_of_a_tensor_with_different_dtypes_keep_their_values(tmp_path: Path, first: torch.dtype) -> None:
    config = write_side_files(tmp_path, UNTIED)
    weights = {
        name: tensor.to(first if "q_proj" in name or "gate_proj" in name else torch.float32)
        for name, tensor in hf_weights(config).items()
    }
    write_weights(tmp_path, weights, "safetensors")
    convert(tmp_path, tmp_path)
    assert_same(read_checkpoint(tmp_path)[1], stacked(weights, config))


@pytest.mark.parametrize("layout, kind", [*zip(LAYOUTS, cycle(KINDS), strict=False)])
def test_a_converted_checkpoint_has_the_weights_of_its_source(tmp_path: Path, layout: str, kind: str) -> None:
    config = write_side_files(tmp_path, KINDS[kind])
    weights = {name: tensor.to(LAYOUTS[layout]) for name, tensor in hf_weights(config).items()}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    if config.tie_embeddings:
        extra["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    write_weights(tmp_path, weights | extra, layout)
    convert(tmp_path, tmp_path)

    read_config, state_dict = read_checkpoint(tmp_path)
    assert read_config == config
    assert {name: tuple(tensor.shape) for name, tensor in state_dict.items()} == expected_shapes(config)
    assert_same(state_dict, stacked(weights, config))
    assert find_model(str(tmp_path), "pth", None, "--model").published == [dtype_name(LAYOUTS[layout])]
    model = load_model(tmp_path / "model.pth", prepack=False)
    assert_same(dict(model.state_dict()), stacked(weights, config))
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


def test_layers_are_dropped_while_converting(source: Path, tmp_path: Path) -> None:
    out_dir, whole = tmp_path / "shallow", stacked(hf_weights(CONFIG))
    flags = ["--checkpoint_dir", str(source), "--out_dir", str(out_dir), "--drop_layers", "1"]
    convert_hf_checkpoint.main(cli.read(convert_hf_checkpoint.Flags, flags, "convert_hf_checkpoint.py"))
    config, state_dict = read_checkpoint(out_dir)
    assert config.n_layer == load_model(out_dir).config.n_layer == 2
    assert_same(state_dict, drop_layers(whole, CONFIG, [1])[0])
    assert not (source / "model.pth").exists()


def test_layers_without_rope_are_known_when_other_layers_are_dropped(tmp_path: Path) -> None:
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = SmolLM3Config(**SHAPE | {"num_hidden_layers": 5}, **special, no_rope_layer_interval=2)
    save_folder(random_model(config), tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "some", layers_to_drop=(0, 3))
    assert load_model(tmp_path / "some").config.unrotated_layers == (0,)
    assert load_model(tmp_path / "some", layers=(0, 2)).config.unrotated_layers == (0,)
    convert(tmp_path / "whole", tmp_path / "none", layers_to_drop=(1, 3))
    assert load_model(tmp_path / "none").config.unrotated_layers == ()


def test_only_the_same_conversion_is_reused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = source / "model.pth"
    convert(source, source)
    before = weights.stat().st_mtime_ns
    os.utime(source / "model-00001-of-00002.safetensors")  # another time of change is no other source
    convert(source, source)
    assert "up to date" in capsys.readouterr().out
    assert weights.stat().st_mtime_ns == before
    weights.write_bytes(weights.read_bytes()[:-1])
    convert(source, source)
    read_checkpoint(source)
    convert(source, source, dtype="float16")
    assert {tensor.dtype for tensor in read_checkpoint(source)[1].values()} == {torch.float16}
    assert {parameter.dtype for parameter in load_model(source, dtype=torch.float64).parameters()} == {torch.float64}


TEXT = "the 1234"
SCALED = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}


def contents(folder: Path) -> tuple[object, ...]:
    config, weights = read_checkpoint(folder)
    return config, weights["norm.weight"].sum(), load_tokenizer(folder).encode(TEXT)


@pytest.mark.parametrize("how", ["in place", "under another name", "elsewhere"])
def test_a_replaced_gguf_brings_its_config_and_tokenizer(tmp_path: Path, how: str) -> None:
    folder, fresh = tmp_path / "model", tmp_path / "fresh"
    out = tmp_path / "out" if how == "elsewhere" else folder
    write_tiny_gguf(folder)
    convert(folder, out)
    first = contents(out)
    convert_tiny_gguf(fresh, pre="gpt-2", tied=False, metadata=SCALED)
    assert first[0] != contents(fresh)[0] and first[2] != contents(fresh)[2]
    (folder / "tiny.gguf").unlink()
    shutil.copyfile(fresh / "tiny.gguf", folder / ("other.gguf" if how == "under another name" else "tiny.gguf"))
    convert(folder, out)
    assert contents(out) == contents(fresh)


@pytest.mark.parametrize("there", ["model.safetensors", "tokenizer_config.json"])
def test_files_that_no_conversion_wrote_are_not_overwritten(tmp_path: Path, there: str) -> None:
    """These are weights of another checkpoint, or a file that somebody put next to weights."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_source(source)
    out.mkdir()
    (out / there).write_text("{}")
    with pytest.raises(CheckpointError, match=there):
        convert(source, out, force=True)
    assert [path.name for path in out.iterdir()] == [there]
    (out / there).unlink()
    convert(source, out)
    (out / "special_tokens_map.json").write_text("{}")
    convert(source, out, force=True)
    assert (out / "special_tokens_map.json").exists()


def test_an_edited_config_is_not_made_again_over_the_edit(tmp_path: Path) -> None:
    convert_tiny_gguf(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("50000.0", "60000.0"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        convert(tmp_path, tmp_path)
    assert "60000.0" in path.read_text()
    with pytest.raises(CheckpointError, match=r"50000\.0, as in the GGUF"):
        convert(tmp_path, tmp_path, force=True)
    assert "60000.0" in path.read_text()
