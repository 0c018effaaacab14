"""Published configurations by name, for runs with random weights (`--load_format dummy`) and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import ConfigError
from models.config import ModelConfig

LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
}

LLAMA_31_8B = LLAMA_3_8B | {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

LLAMA_32_1B = LLAMA_31_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "rope_scaling": LLAMA_31_8B["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}

SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}

MISTRAL_7B_V01: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "eos_token_id": 151643,
}

TINYLLAMA = LLAMA_2_7B | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}

PRESETS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": LLAMA_2_7B,
    "togethercomputer/LLaMA-2-7B-32K": LLAMA_2_7B
    | {"max_position_embeddings": 32768, "rope_scaling": {"type": "linear", "factor": 8.0}},
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": TINYLLAMA,
    "TinyLlama/TinyLlama_v1.1": TINYLLAMA,
    "JackFram/llama-68m": LLAMA_2_7B
    | {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "meta-llama/Meta-Llama-3-8B": LLAMA_3_8B,
    "meta-llama/Meta-Llama-3.1-8B": LLAMA_31_8B,
    "meta-llama/Meta-Llama-3.1-70B": LLAMA_31_8B
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "meta-llama/Llama-3.2-1B": LLAMA_32_1B,
    "meta-llama/Llama-3.2-3B": LLAMA_32_1B
    | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "HuggingFaceTB/SmolLM2-135M": SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2_135M | {"eos_token_id": 2},
    "mistralai/Mistral-7B-v0.1": MISTRAL_7B_V01,
    "mistralai/Mistral-7B-v0.3": MISTRAL_7B_V01
    | {"vocab_size": 32768, "rope_theta": 1000000.0, "sliding_window": None},
    "01-ai/Yi-1.5-6B": LLAMA_2_7B | {"num_key_value_heads": 4, "vocab_size": 64000, "rope_theta": 5000000.0},
    "Qwen/Qwen2.5-7B": QWEN25_7B,
    "Qwen/Qwen2.5-0.5B": QWEN25_7B
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}


def preset_name(path: str) -> str:
    """The Hugging Face repository, ORG/NAME, whose NAME is that of a path's folder.

    Raises ConfigError unless its configuration is stored.
    """
    folder = Path(path).parent if path.endswith(".pth") else Path(path)
    for name in PRESETS:
        if folder.name == name.partition("/")[2]:
            return name
    raise ConfigError(
        "no published configuration is stored under this name",
        where="model name",
        seen=path,
        required=f"one of {', '.join(sorted(PRESETS))}, or a folder of such a name",
        fix="use one of these names, or give the model's own config.json",
    )


def preset_config(path: str) -> ModelConfig:
    """The published configuration of the repository that `preset_name` finds. Raises ConfigError if unknown."""
    name = preset_name(path)
    return ModelConfig.from_hf(PRESETS[name], where=name)
