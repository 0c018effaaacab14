"""Published configurations by name, for runs with random weights (`--load_format dummy`) and for tests."""

from pathlib import Path
from typing import Any

from common.errors import ConfigError
from models.config import ModelConfig


def _llama(
    dim: int, ffn_dim: int, n_layer: int, n_head: int, n_kv_head: int, vocab_size: int, context: int, **others: Any
) -> dict[str, Any]:
    """The keys of a config.json."""
    sizes = {"hidden_size": dim, "intermediate_size": ffn_dim, "num_hidden_layers": n_layer, "vocab_size": vocab_size}
    sizes |= {"num_attention_heads": n_head, "num_key_value_heads": n_kv_head, "max_position_embeddings": context}
    usual = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 2}
    return {"architectures": ["LlamaForCausalLM"]} | sizes | usual | others


def _rope(factor: float) -> dict[str, Any]:
    corners = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **corners}


LLAMA_2 = _llama(4096, 11008, 32, 32, 32, 32000, 4096)
LLAMA_2_32K = {"max_position_embeddings": 32768, "rope_scaling": {"type": "linear", "factor": 8.0}}
TINYLLAMA = _llama(2048, 5632, 22, 32, 4, 32000, 2048)
LLAMA_3 = {"rope_theta": 500000.0, "eos_token_id": 128001}
LLAMA_31 = LLAMA_3 | {"rope_scaling": _rope(8.0)}
LLAMA_32 = LLAMA_3 | {"rope_scaling": _rope(32.0), "tie_word_embeddings": True}
SMOLLM2 = _llama(576, 1536, 30, 9, 3, 49152, 8192, rope_theta=100000, tie_word_embeddings=True)
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN25 = {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "eos_token_id": 151643}

PRESETS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": LLAMA_2,
    "togethercomputer/LLaMA-2-7B-32K": LLAMA_2 | LLAMA_2_32K,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": TINYLLAMA,
    "TinyLlama/TinyLlama_v1.1": TINYLLAMA,
    "JackFram/llama-68m": _llama(768, 3072, 2, 12, 12, 32000, 2048, rms_norm_eps=1e-6),
    "meta-llama/Meta-Llama-3-8B": _llama(4096, 14336, 32, 32, 8, 128256, 8192, **LLAMA_3),
    "meta-llama/Meta-Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, 128256, 131072, **LLAMA_31),
    "meta-llama/Meta-Llama-3.1-70B": _llama(8192, 28672, 80, 64, 8, 128256, 131072, **LLAMA_31),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, 128256, 131072, **LLAMA_32),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, 128256, 131072, **LLAMA_32),
    "HuggingFaceTB/SmolLM2-135M": SMOLLM2 | {"eos_token_id": 0},
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2,
    "mistralai/Mistral-7B-v0.1": _llama(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096, **MISTRAL),
    "mistralai/Mistral-7B-v0.3": _llama(
        4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None, rope_theta=1000000.0, **MISTRAL
    ),
    "01-ai/Yi-1.5-6B": _llama(4096, 11008, 32, 32, 4, 64000, 4096, rope_theta=5000000.0),
    "Qwen/Qwen2.5-7B": _llama(3584, 18944, 28, 28, 4, 152064, 131072, **QWEN25),
    "Qwen/Qwen2.5-0.5B": _llama(896, 4864, 24, 14, 2, 151936, 32768, tie_word_embeddings=True, **QWEN25),
}


def preset_name(path: str) -> str:
    """The Hugging Face repository, ORG/NAME, whose NAME is that of a path's folder.

    Raises ConfigError unless its configuration is stored.
    """
    folder = Path(path).parent if path.endswith(".pth") else Path(path)
    for name in PRESETS:
        if folder.name == name.partition("/")[2]:
            return name
    what, required = "no published configuration is stored under this name", f"one of {', '.join(sorted(PRESETS))}"
    fix = "use one of these names, or give the model's own config.json"
    raise ConfigError(what, "model name", path, f"{required}, or a folder of such a name", fix)


def preset_config(path: str) -> ModelConfig:
    """The published configuration of the repository that `preset_name` finds. Raises ConfigError if unknown."""
    name = preset_name(path)
    return ModelConfig.from_hf(PRESETS[name], where=name)
