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


# `...` takes a key away.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ...}, "none given"),
    ({"architectures": 5}, "architecture"),
    *(({"rope_scaling": {key: "yarn", "factor": 4.0}}, "yarn") for key in ("type", "rope_type")),
    *(({"rope_scaling": {"rope_type": kind, "factor": 4.0}}, kind) for kind in ("dynamic", "longrope")),
    (rope(1e4, "yarn", factor=4.0), "yarn"),
    ({"rope_scaling": {"type": "linear"}}, ": factor"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ": low_freq_factor"),
    ({"rope_scaling": {"type": "linear", "factor": "eight"}}, "eight"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    ({"rope_scaling": {"rope_type": 0, "factor": 2.0}}, "rope_type"),
    ({"rope_scaling": False}, "rope"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": "big"}, "big"),
    ({"rms_norm_eps": "tiny"}, "tiny"),
    ({"architectures": ...}, ": architectures"),
    *(
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, key: None}}, key)
        for key in ("rope_type", "rope_theta")
    ),
    (rope(1e4) | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling\n  seen:     yarn"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    *(({key: None}, key) for key in ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")),
    *(({key: True}, key) for key in ("attention_bias", "mlp_bias", "is_encoder_decoder")),
    ({"model_type": "mistral"}, "model_type\n  seen:     'mistral'\n  required: no such key or \"llama\""),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"text_config": {}}, "text_config"),
    (MISTRAL | {"layer_types": None}, "layer_types"),
    (QWEN2 | {"use_sliding_window": True}, "use_sliding_window"),
    (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    (QWEN2 | {"head_dim": None}, "head_dim"),
    (MISTRAL | {"sliding_window": 0}, "sliding_window"),
    ({"num_key_value_heads": 8}, "n_kv_head 8"),
    ({"hidden_size": 64.5}, "hidden_size\n  seen:     64.5"),
    ({"head_dim": 15}, "15"),
    ({"head_dim": 0}, "head_dim"),
    *(({key: value}, f"{key}\n  seen:     {value!r}") for key in SHAPE for value in (0, -4, "4")),
    *(({key: ...}, key) for key in SHAPE if key not in ("num_key_value_heads", "max_position_embeddings")),
    *(({"eos_token_id": value}, f"eos_token_id\n  seen:     {value!r}\n") for value in (1.5, -1, True, "2", {})),
    *(({"eos_token_id": [2, value]}, f"eos_token_id\n  seen:     {value!r}\n") for value in (N_TOKENS, [2], None)),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
    ({"vocab_size": "MORE DIGITS THAN PYTHON READS"}, "not a JSON object"),
]


@pytest.mark.parametrize("changes, named", REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_config_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = tmp_path / "config.json"
    text = json.dumps({key: value for key, value in (LLAMA | changes).items() if value is not ...})
    path.write_text(text.replace('"MORE DIGITS THAN PYTHON READS"', "9" * 5000))
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_json(path)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe", b"<html>not found</html>", b"[" * 10**5]
)
def test_config_that_is_not_a_json_object(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="JSON") as refusal:
        ModelConfig.from_json(path)
    assert str(path) in str(refusal.value)
