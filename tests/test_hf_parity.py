"""The Transformer against Hugging Face's own models, family by family, and the configs that are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tiny import N_TOKENS, random_model, save_folder
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from common.errors import ConfigError
from convert_hf_checkpoint import convert
from engine import ModelRunner
from kv_cache import FullKVCache
from models import ModelConfig, Transformer, load_model
from models.checkpoints.loading import read_checkpoint
from models.rope import inverse_frequencies

TOLERANCE = 1e-5
LENGTHS = [27, 48]  # of the two rows
PREFILLED = [7, 28]  # 20 tokens of each row are left to decode
SHAPE = {
    "vocab_size": N_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MHA = {"num_key_value_heads": 4}


def rope(theta: float, rope_type: str = "default", **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": rope_type, **settings}}


def llama3_rope(factor: float) -> dict[str, Any]:
    """Of head_dim 16 at theta 5e5: wavelength 6 is kept, 32 is on the ramp, 167 and beyond are slowed down."""
    corners = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return rope(500000.0, "llama3", factor=factor, **corners)


@dataclass(frozen=True)
class Family:
    """A transformers config, and what sets the family apart: the ModelConfig fields whose loss must show."""

    config: type[PreTrainedConfig]
    settings: dict[str, Any]
    lost: dict[str, Any] = field(default_factory=dict)
    max_shard_size: str = "1GB"


FAMILIES = {
    "llama-2": Family(LlamaConfig, MHA | rope(10000.0)),
    "llama-3": Family(LlamaConfig, rope(500000.0) | {"rms_norm_eps": 1e-5}, {"rope_theta": 10000.0}, "40KB"),
    "llama-3.1": Family(LlamaConfig, llama3_rope(8.0), {"rope_scaling": None}),
    "llama-3.2": Family(LlamaConfig, llama3_rope(32.0) | {"tie_word_embeddings": True}, {"rope_scaling": None}),
    "llama-2-7b-32k": Family(LlamaConfig, MHA | rope(10000.0, "linear", factor=8.0), {"rope_scaling": None}),
    "tinyllama": Family(LlamaConfig, {"num_attention_heads": 16} | rope(10000.0)),
    "llama-68m": Family(
        LlamaConfig, MHA | rope(10000.0) | {"hidden_size": 32, "rms_norm_eps": 0.1}, {"norm_eps": 1e-6}
    ),
    "smollm2": Family(
        LlamaConfig,
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
        | rope(100000.0),
    ),
    "mistral-0.1": Family(MistralConfig, {"sliding_window": 11} | rope(10000.0), {"sliding_window": None}),
    "mistral-0.3": Family(MistralConfig, {"sliding_window": None, "head_dim": 24} | rope(1000000.0)),
    "yi-1.5": Family(LlamaConfig, rope(5000000.0), {"rope_theta": 10000.0}),
    "qwen2.5": Family(Qwen2Config, rope(1000000.0), {"rope_theta": 10000.0}),
    "qwen2.5-tied": Family(Qwen2Config, {"tie_word_embeddings": True} | rope(1000000.0)),
}


@dataclass(frozen=True)
class Case:
    """A family's model by transformers, converted: the folder, two rows of tokens, the logits `[T, V]` of each."""

    family: Family
    folder: Path
    rows: list[Tensor]
    logits: list[Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(family.config(**(SHAPE | family.settings)))
    save_folder(model, folder, family.max_shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (family.max_shard_size != "1GB")
    convert(folder, folder)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(N_TOKENS, (length,), generator=generator) for length in LENGTHS]
    return Case(family, folder, rows, [reference_logits(model, row) for row in rows])


def reference_logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    logits = model(row[None]).logits[0]
    assert 0.3 < float(logits.std()) < 3, "the tolerance is absolute: it means something for logits of order 1"
    return logits


def all_logits(model: Transformer, row: Tensor) -> Tensor:
    """One forward over a whole row in an empty cache."""
    cache = FullKVCache(model.config, 1, len(row))
    return model(row[None], torch.arange(len(row))[None], cache)[0]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("prepack", [True, False], ids=["packed", "plain"])
def test_whole_prefill(case: Case, prepack: bool) -> None:
    model = load_model(case.folder, prepack=prepack)
    for row, theirs in zip(case.rows, case.logits, strict=True):
        assert_close(all_logits(model, row), theirs)


@pytest.mark.parametrize("prepack, chunk", [(True, 5), (False, 5), (True, 18)])  # 18: beyond a packed block
def test_chunked_prefill(case: Case, prepack: bool, chunk: int) -> None:
    model = load_model(case.folder, prepack=prepack)
    runner = ModelRunner(model, FullKVCache(model.config, len(case.rows), max(LENGTHS)), chunk)
    for i, (row, theirs) in enumerate(zip(case.rows, case.logits, strict=True)):
        assert_close(runner.prefill_row(i, row.tolist()).logits, theirs[-1])


@pytest.mark.parametrize("prepack, block", [(True, 1), (False, 1), (True, 4)])
def test_cached_decode_of_two_rows_of_different_length(case: Case, prepack: bool, block: int) -> None:
    model = load_model(case.folder, prepack=prepack)
    runner = ModelRunner(model, FullKVCache(model.config, len(case.rows), max(LENGTHS)))
    for i, (row, length) in enumerate(zip(case.rows, PREFILLED, strict=True)):
        runner.prefill_row(i, row[:length].tolist())
    starts = torch.tensor(PREFILLED)
    for done in range(0, LENGTHS[0] - PREFILLED[0], block):
        positions = starts[:, None] + done + torch.arange(block)
        tokens = torch.stack([row[at] for row, at in zip(case.rows, positions, strict=True)])
        theirs = torch.stack([logits[at] for logits, at in zip(case.logits, positions, strict=True)])
        assert_close(runner.step(tokens, positions), theirs)


def test_what_sets_the_family_apart_shows_in_the_logits(case: Case) -> None:
    """Otherwise parity would not notice its loss."""
    config, state_dict = read_checkpoint(case.folder)
    for name, value in case.family.lost.items():
        model = Transformer(replace(config, **{name: value}))
        model.load_state_dict(state_dict)
        model.requires_grad_(False)
        change = all_logits(model, case.rows[1]) - case.logits[1]
        assert float(change.abs().max()) > 1000 * TOLERANCE


def test_llama3_rope_has_its_three_branches() -> None:
    config = ModelConfig.from_hf(
        LlamaConfig(**(SHAPE | llama3_rope(8.0)), architectures=["LlamaForCausalLM"]).to_dict()
    )
    slowed = inverse_frequencies(replace(config, rope_scaling=None)) / inverse_frequencies(config)
    assert slowed[0] == 1
    assert 1 < slowed[1] < 8
    torch.testing.assert_close(slowed[2:], torch.full((6,), 8.0))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "old, new",
    [
        ({"rope_theta": 5e5}, rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, rope(5e5)),
        ({}, rope(1e4)),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, rope(1e4, "linear", factor=8.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, rope(5e5, "llama3", **LLAMA3)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}, rope(5e5, "llama3", **LLAMA3)),
    ],
)
def test_old_and_new_keys_give_equal_configs(old: dict[str, Any], new: dict[str, Any]) -> None:
    base = SHAPE | {"architectures": ["LlamaForCausalLM"]}
    theirs = LlamaConfig(**(base | new)).to_dict()
    assert ModelConfig.from_hf(base | old) == ModelConfig.from_hf(base | new)
    assert ModelConfig.from_hf(theirs) == ModelConfig.from_hf(base | new | {"eos_token_id": 2})


def without(*keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys, ...)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    "no architecture": (without("architectures"), "none given"),
    "architectures not a list": ({"architectures": 5}, "architecture"),
    "another activation": ({"hidden_act": "gelu"}, "gelu"),
    **{
        f"rope {kind}, {key}": ({"rope_scaling": {key: kind, "factor": 4.0}}, kind)
        for kind in ("yarn", "dynamic", "longrope")
        for key in ("type", "rope_type")
    },
    "new rope yarn": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "yarn"),
    "linear rope without factor": ({"rope_scaling": {"type": "linear"}}, ": factor"),
    "llama3 rope without corners": ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ": low_freq_factor"),
    "llama3 rope with equal corners": (
        {
            "rope_scaling": {
                "type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "high_freq_factor 4.0",
    ),
    "rope factor is text": ({"rope_scaling": {"type": "linear", "factor": "eight"}}, "eight"),
    "rope factor of zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    "rope settings not an object": ({"rope_scaling": "linear"}, "rope"),
    "rope theta of zero": ({"rope_theta": 0}, "rope_theta"),
    "rope theta is text": ({"rope_theta": "big"}, "big"),
    "norm_eps is text": ({"rms_norm_eps": "tiny"}, "tiny"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias"),
    "attention_bias on Llama": ({"attention_bias": True}, "attention_bias"),
    "use_sliding_window on Qwen2": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
        "use_sliding_window",
    ),
    "sliding window of zero": ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
    "heads do not divide": ({"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 4}, "n_kv_head 4"),
    "more KV heads than heads": ({"num_key_value_heads": 8}, "n_kv_head 8"),
    "hidden size does not divide": ({"hidden_size": 66}, "hidden_size 66"),
    "odd head_dim": ({"head_dim": 15}, "15"),
    **{f"{key} is zero": ({key: 0}, f"{key}\n  seen:     0") for key in SHAPE},
    **{f"{key} is negative": ({key: -4}, f"{key}\n  seen:     -4") for key in SHAPE},
    **{f"{key} is text": ({key: "4"}, f"{key}\n  seen:     '4'") for key in SHAPE},
    "head_dim is zero": ({"head_dim": 0}, "head_dim"),
    **{
        f"end token {value!r}": ({"eos_token_id": value}, f"config.json: eos_token_id\n  seen:     {seen!r}\n")
        for value, seen in (
            *((1.5, 1.5), (-1, -1), (True, True), ("2", "2"), ([2, N_TOKENS], N_TOKENS), ([[2]], [2]), ({}, {})),
            ([2, None], None),
        )
    },
    "a size beyond any": ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
    "more digits than Python reads": ({"hidden_act": "silu", "vocab_size": "LONG"}, "not JSON"),
    "tied is text": ({"tie_word_embeddings": "false"}, "'false'"),
    "rope settings are false": ({"rope_scaling": False}, "rope"),
    "rope type is a number": ({"rope_scaling": {"rope_type": 0, "factor": 2.0}}, "rope type"),
    "fractional size": ({"hidden_size": 64.5}, "hidden_size\n  seen:     64.5"),
    **{
        f"no {key}": (without(key), key)
        for key in SHAPE
        if key not in ("num_key_value_heads", "max_position_embeddings")
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_config_is_refused_by_name(tmp_path: Path, what: str) -> None:
    changes, named = REFUSED[what]
    values = {"architectures": ["LlamaForCausalLM"]} | SHAPE | changes
    path = tmp_path / "config.json"
    text = json.dumps({key: value for key, value in values.items() if value is not ...})
    path.write_text(text.replace('"LONG"', "9" * 5000))
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_json(path)
    assert named in str(refusal.value)


@pytest.mark.parametrize("token", [-1, 1.5, True, N_TOKENS])
def test_an_end_token_of_a_stored_config_is_in_its_vocabulary(token: object) -> None:
    stored = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]} | SHAPE).to_dict()
    with pytest.raises(ConfigError, match=f"end token[\\s\\S]*{token}"):
        ModelConfig.from_dict(stored | {"eos_tokens": [2, token]})


def test_a_window_that_is_not_given_is_that_of_transformers() -> None:
    """MistralConfig without the key has one of 4096, with null none; Llama has none in any case."""
    mistral = {"architectures": ["MistralForCausalLM"]} | SHAPE
    assert ModelConfig.from_hf(mistral).sliding_window == MistralConfig().sliding_window == 4096
    assert ModelConfig.from_hf(mistral | {"sliding_window": None}).sliding_window is None
    assert ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]} | SHAPE).sliding_window is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe", b"<html>not found</html>", b"[" * 10**5]
)
def test_config_that_is_not_a_json_object(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="JSON") as refusal:
        ModelConfig.from_json(path)
    assert str(path) in str(refusal.value)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        ModelConfig.from_json(tmp_path / "config.json")
