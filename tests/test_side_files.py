"""Weights that take the place of others in a folder: never with the config.json or the tokenizer of those before."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_folders import hf_weights, write_source, write_weights
from gguf_files import convert_tiny_gguf, llama3_factors, write_tiny_gguf
from hf_tiny import llama3_rope

from common.errors import CheckpointError
from convert_hf_checkpoint import convert
from models.checkpoints.loading import load_model, read_checkpoint
from models.checkpoints.manifest import describe, update_manifest
from models.checkpoints.source_weights import open_source
from models.checkpoints.tokenizer import load_tokenizer
from models.config import ModelConfig, RopeScaling

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


def test_what_a_user_puts_beside_a_gguf_is_taken_and_kept(tmp_path: Path) -> None:
    """Also where the GGUF's own tokenizer would be refused."""
    convert_tiny_gguf(tmp_path / "plain", pre="gpt-2")
    folder = tmp_path / "own"
    own = json.loads((tmp_path / "plain" / "config.json").read_text()) | llama3_rope(8.0)
    factors = {"extra_tensor": "rope_freqs.weight", "extra_values": llama3_factors(ModelConfig.from_hf(own))}
    write_tiny_gguf(folder, pre="deepseek-coder", metadata={"llama.rope.freq_base": 500000.0}, **factors)
    (folder / "config.json").write_text(json.dumps(own))
    shutil.copyfile(tmp_path / "plain" / "tokenizer.json", folder / "tokenizer.json")
    before = {name: (folder / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    for force in (False, True):
        convert(folder, folder, force=force)
        assert {name: (folder / name).read_bytes() for name in before} == before
    assert read_checkpoint(folder)[0].rope_scaling == RopeScaling("llama3", 8.0, original_context=64)


def test_an_edited_config_is_not_made_again_over_the_edit(tmp_path: Path) -> None:
    convert_tiny_gguf(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("50000.0", "60000.0"))
    with pytest.raises(CheckpointError, match=r"manifest describes\n.*config\.json"):
        convert(tmp_path, tmp_path)
    assert "60000.0" in path.read_text()
    path.unlink()
    convert(tmp_path, tmp_path, force=True)
    assert "50000.0" in path.read_text()


def test_a_download_that_was_saved_again_is_refused_unless_forced(tmp_path: Path) -> None:
    """Such as a checkpoint that is trained on."""
    write_source(tmp_path)
    update_manifest(tmp_path, describe(tmp_path, sorted(path.name for path in tmp_path.iterdir())))
    convert(tmp_path, tmp_path)
    write_weights(tmp_path, hf_weights(open_source(tmp_path).config, seed=1), "safetensors")
    with pytest.raises(CheckpointError, match=r"manifest describes\n.*model\.safetensors[\s\S]*--force"):
        convert(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    convert(tmp_path, tmp_path, force=True)
    load_model(tmp_path, verify=True)
    convert(tmp_path, tmp_path)


@pytest.mark.parametrize("there", ["model.safetensors", "tokenizer_config.json"])
def test_what_no_conversion_wrote_is_not_written_over(tmp_path: Path, there: str) -> None:
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


def test_nothing_of_an_earlier_source_stays_elsewhere(tmp_path: Path) -> None:
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    for folder, extra in ((first, "generation_config.json"), (second, "tokenizer_config.json")):
        write_source(folder)
        (folder / extra).write_text("{}")
        convert(folder, out)
        written = {"model.pth", "config.json", "tokenizer.json", "manifest.json", extra}
        assert {path.name for path in out.iterdir()} == written
    (second / "tokenizer.json").write_text((second / "tokenizer.json").read_text().replace('"th"', '"TH"'))
    convert(second, out)
    assert load_tokenizer(out).pieces()[256] == "TH"
    load_model(out)
