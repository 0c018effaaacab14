"""Weights are compared with the sums in the manifest where that is asked for, and are finite whatever it says."""

from pathlib import Path

import pytest
import torch
from checkpoint_folders import hf_weights, write_source

from common.errors import CheckpointError
from convert_hf_checkpoint import convert
from engine.bench.config import RunConfig, Sizes, Target
from engine.bench.plan import resolve
from models.checkpoints.loading import load_model, read_checkpoint, save_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_source(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "model")
    return tmp_path / "model"


def test_zeroed_weights_are_refused_where_they_are_verified(folder: Path) -> None:
    path = folder / "model.pth"
    content = bytearray(path.read_bytes())
    start = content.index(bytes(read_checkpoint(folder)[1]["layers.1.attention.wo.weight"].numpy().data))
    content[start : start + 64] = bytes(64)
    path.write_bytes(content)
    load_model(folder)
    with pytest.raises(CheckpointError, match=r"manifest describes\n.*model\.pth"):
        load_model(folder, verify=True)
    target, sizes = Target(model=str(folder), device="cpu", verify=True), Sizes(B=2, prefix_len=8, gen_len=4)
    with pytest.raises(CheckpointError, match=r"manifest describes\n.*model\.pth"):
        resolve(RunConfig(target, sizes=sizes)).target.load()


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
    with pytest.raises(CheckpointError, match=rf"NaN or inf.*\n.*{path.name}\n.*{named}"):
        convert(path.parent, path.parent, dtype=dtype)
    assert not (path.parent / "model.pth").exists()
    stacked = {name: tensor.clone() for name, tensor in state_dict.items()}
    stacked["layers.1.attention.wqkv.weight"][17, 2] = value
    (folder / "manifest.json").unlink()
    save_checkpoint(folder / "model.pth", config, stacked)
    with pytest.raises(CheckpointError, match=rf"NaN or inf[\s\S]*{named} in torch\.{dtype}"):
        load_model(folder, dtype=getattr(torch, dtype))
