"""Weights that replace others in a folder never get the config.json or the tokenizer of the earlier ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_folders import write_source
from gguf_files import convert_tiny_gguf, write_tiny_gguf
from hf_tiny import llama3_rope

from common.errors import CheckpointError
from convert_hf_checkpoint import convert
from models.checkpoints.loading import read_checkpoint
from models.checkpoints.tokenizer import load_tokenizer
from models.config import ModelConfig, RopeScaling
from models.rope import inverse_frequencies

TEXT = "the 1234"
SCALED = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}


def contents(folder: Path) -> tuple[object, ...]:
    config, weights = read_checkpoint(folder)
    return config, weights["norm.weight"].sum(), load_tokenizer(folder).encode(TEXT)


@pytest.mark.parametrize("how", ["in place", "under another name", "elsewhere"])
def test_a_replaced_gguf_brings_its_own_config_and_tokenizer(tmp_path: Path, how: str) -> None:
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


def test_a_users_files_beside_a_gguf_are_used_and_kept(tmp_path: Path) -> None:
    convert_tiny_gguf(tmp_path / "plain", pre="gpt-2")
    folder = tmp_path / "beside"
    beside = json.loads((tmp_path / "plain" / "config.json").read_text()) | llama3_rope(8.0)
    config = ModelConfig.from_hf(beside)
    slowed = inverse_frequencies(replace(config, rope_scaling=None)) / inverse_frequencies(config)
    factors = {"extra_tensor": "rope_freqs.weight", "extra_values": slowed.tolist()}
    write_tiny_gguf(folder, pre="deepseek-coder", metadata={"llama.rope.freq_base": 500000.0}, **factors)
    (folder / "config.json").write_text(json.dumps(beside))
    shutil.copyfile(tmp_path / "plain" / "tokenizer.json", folder / "tokenizer.json")
    before = {name: (folder / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    convert(folder, folder)
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert read_checkpoint(folder)[0].rope_scaling == RopeScaling("llama3", 8.0, original_context=64)


def test_an_edited_config_is_not_made_again_over_the_edit(tmp_path: Path) -> None:
    convert_tiny_gguf(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("50000.0", "60000.0"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        convert(tmp_path, tmp_path)
    assert "60000.0" in path.read_text()
    path.unlink()
    convert(tmp_path, tmp_path, force=True)
    assert "50000.0" in path.read_text()


@pytest.mark.parametrize("there", ["model.safetensors", "tokenizer_config.json"])
def test_files_that_no_conversion_wrote_are_not_overwritten(tmp_path: Path, there: str) -> None:
    """Another checkpoint, or what somebody put there for one."""
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
