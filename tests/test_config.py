"""ModelConfig: what a Hugging Face config.json comes to, under old and new keys, and the ones that are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tiny import LLAMA3_CORNERS, N_TOKENS, SHAPE, llama3_rope, rope
from transformers import LlamaConfig

from common.errors import ConfigError
from models import ModelConfig
from models.rope import inverse_frequencies

LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"]}
MISTRAL = SHAPE | {"architectures": ["MistralForCausalLM"]}
QWEN2 = SHAPE | {"architectures": ["Qwen2ForCausalLM"]}
LLAMA3 = LLAMA3_CORNERS | {"factor": 8.0}


def test_llama3_rope_has_its_three_branches() -> None:
    config = ModelConfig.from_hf(LlamaConfig(**LLAMA | llama3_rope(8.0)).to_dict())
    slowed = inverse_frequencies(replace(config, rope_scaling=None)) / inverse_frequencies(config)
    assert slowed[0] == 1
    assert 1 < slowed[1] < 8
    torch.testing.assert_close(slowed[2:], torch.full((6,), 8.0))


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
    assert ModelConfig.from_hf(LLAMA | old) == ModelConfig.from_hf(LLAMA | new)
    theirs = LlamaConfig(**LLAMA | new).to_dict()
    assert ModelConfig.from_hf(theirs) == ModelConfig.from_hf(LLAMA | new | {"eos_token_id": 2})


# `...` takes a key away. test_config_cases.py has far more; these are refused by name.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ...}, "architectures"),
    ({"architectures": 5}, "architecture"),
    ({"rope_scaling": {"type": "proportional", "factor": 4.0}}, "proportional"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
    ({"attention_bias": 1}, "attention_bias"),
    ({"model_type": "mistral"}, "model_type"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (QWEN2 | {"use_sliding_window": True}, "use_sliding_window"),
    ({"num_key_value_heads": 8}, "n_kv_head"),
    ({"head_dim": 15}, "15"),
    *(({key: "4"}, key) for key in SHAPE),
    ({"eos_token_id": [2, N_TOKENS]}, "eos_token_id"),
]


@pytest.mark.parametrize("changes, named", REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_config_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in (LLAMA | changes).items() if value is not ...}))
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_json(path)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "content", [b"", b"[1, 2]", b"\xff\xfe", b"[" * 10**5, b'{"vocab_size": ' + b"9" * 5000 + b"}"]
)
def test_config_that_is_not_a_json_object(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="JSON") as refusal:
        ModelConfig.from_json(path)
    assert str(path) in str(refusal.value)
