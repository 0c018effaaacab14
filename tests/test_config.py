"""ModelConfig: a Hugging Face config.json with old or new keys, and configs that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hf_tiny import LLAMA3_CORNERS, N_TOKENS, SHAPE, rope
from transformers import LlamaConfig

from common.errors import ConfigError
from models import ModelConfig

LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"]}
LLAMA3 = LLAMA3_CORNERS | {"factor": 8.0}


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


# test_config_cases.py has far more cases; these are refused by name.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": 5}, "architecture"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"num_key_value_heads": 8}, "n_kv_head"),
    ({"eos_token_id": [2, N_TOKENS]}, "eos_token_id"),
]


@pytest.mark.parametrize("changes, named", REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_config_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_json(path)
    assert named in str(refusal.value)


@pytest.mark.parametrize("content", [b"[1, 2]", b"\xff\xfe", b"[" * 10**5, b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="JSON") as refusal:
        ModelConfig.from_json(path)
    assert str(path) in str(refusal.value)
