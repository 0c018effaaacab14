"""A context extended for a run, and other values for keys of a config.json."""

import json
from pathlib import Path

import pytest
import torch
from hf_tiny import N_TOKENS, SHAPE, random_model, rope, save_folder
from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from common.errors import UserError
from convert_hf_checkpoint import convert
from kv_cache import FullKVCache
from models.checkpoints.model_source import find_model
from models.config_changes import ConfigChanges


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    config = Qwen3Config(**SHAPE, **rope(1000000.0), head_dim=16, eos_token_id=None)
    save_folder(random_model(config), folder)
    convert(folder, folder)
    return folder


def logits_with(folder: Path, changes: ConfigChanges, row: torch.Tensor) -> torch.Tensor:
    source = find_model(str(folder), "pth", None, "--model", changes=changes)
    model = source.load()
    assert model.config == source.config
    return model(row[None], torch.arange(len(row))[None], FullKVCache(model.config, 1, len(row)))[0]


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_an_extended_context_has_the_logits_of_transformers(folder: Path, kind: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    settings = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    theirs = Qwen3Config(**values | {"rope_parameters": settings | {"rope_theta": 1000000.0}})
    model = AutoModelForCausalLM.from_pretrained(folder, config=theirs, attn_implementation="eager")
    row = torch.randint(N_TOKENS, (200,), generator=torch.Generator().manual_seed(1))
    ours = logits_with(folder, ConfigChanges(f"{kind}:4"), row)
    torch.testing.assert_close(ours, model(row[None]).logits[0].detach(), rtol=0, atol=2e-5)
    assert find_model(str(folder), "pth", None, "", changes=ConfigChanges(f"{kind}:4")).config.max_context == 512


def test_an_override_takes_the_place_of_a_key(folder: Path) -> None:
    changes = ConfigChanges(config_overrides=("rms_norm_eps=0.5", "max_position_embeddings=64"))
    config = find_model(str(folder), "pth", None, "", changes=changes).config
    assert (config.norm_eps, config.max_context) == (0.5, 64)
    row = torch.arange(20)
    assert not torch.allclose(logits_with(folder, changes, row), logits_with(folder, ConfigChanges(), row), atol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        *(ConfigChanges(scaling) for scaling in ("yarn", "yarn:1", "yarn:x", "ntk:2", "yarn:nan")),
        *(ConfigChanges(config_overrides=(override,)) for override in ("rms_norm_epz=0.5", "hidden_act=gelu", "x")),
        ConfigChanges("yarn:2", ('rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}',)),
    ],
)
def test_a_change_without_effect_or_meaning_is_refused(folder: Path, changes: ConfigChanges) -> None:
    with pytest.raises(UserError):
        find_model(str(folder), "pth", None, "", changes=changes)


def test_other_shapes_than_those_of_the_file_are_refused(folder: Path) -> None:
    with pytest.raises(UserError):
        find_model(str(folder), "pth", None, "", changes=ConfigChanges(config_overrides=("hidden_size=32",))).load()
