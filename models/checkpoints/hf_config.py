"""Translate a Hugging Face config.json into the fields of a ModelConfig, or refuse it by key.

An accepted file has the logits that transformers (5.23) computes from it. A key that is neither read nor in a table
below has no effect on them; docs/checkpoints.md lists both kinds.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import refuse
from common.jsonl import parse_json
from models.checkpoints.hf_rope import ORIGINAL, ROPE_TYPES, rope_fields
from models.checkpoints.hf_rules import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    UNSET,
    Rule,
    Values,
    check,
    of_type,
    only,
    positive,
    unsupported,
)
from models.checkpoints.quantized_source import quantized_format
from models.config import ModelConfig

GENERATION_CONFIG = "generation_config.json"
FULL_LAYERS = Rule(
    'no such key, null, or "full_attention" for each layer',
    lambda value: value is None or (isinstance(value, list) and all(kind == "full_attention" for kind in value)),
)
LAYER_FLAGS = Rule(
    "no such key, null, or 0 or 1 for each layer",
    lambda value: value is None or (isinstance(value, list) and all(type(x) is int and x in (0, 1) for x in value)),
)

RULES = {
    "hidden_act": only("silu"),
    "max_position_embeddings": INTEGER,
    "rms_norm_eps": of_type("a number with a decimal point", float),
    "tie_word_embeddings": BOOLEAN,
    "rope_theta": NUMBER,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "partial_rotary_factor": only(None, 1, 1.0),
    "is_causal": only(True),
    "is_encoder_decoder": only(False),
    # Layers, or their cache entries, would differ from each other.
    **dict.fromkeys(("attention_chunk_size", "kv_sharing_modes", "per_layer_config"), UNSET),
    # Keys or weights would come from another file or section.
    **dict.fromkeys(("attribute_map", "configuration_files", "transformers_weights"), UNSET),
    **dict.fromkeys(("text_config", "text_encoder", "decoder", "generator"), UNSET),
}
# Fields of ModelConfig, and the keys that give them in most architectures.
SIZES = {"vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "dim": "hidden_size"}
SIZES |= {"n_head": "num_attention_heads", "ffn_dim": "intermediate_size"}
DEFAULTS: Values = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Architecture:
    """An architecture's rules in addition to RULES, and transformers' defaults for absent keys.

    renamed: keys of older files, and their present names. is_fused: q, k and v are one tensor, gate and up another.
    fixed: fields of ModelConfig that every model of the architecture has. sizes, switches: fields that a key gives, a
    number or true or false.
    """

    model_type: str
    rules: Mapping[str, Rule]
    defaults: Values
    renamed: Mapping[str, str] = field(default_factory=dict)
    rope_types: Collection[str] = tuple(ROPE_TYPES)
    is_fused: bool = False
    fixed: Mapping[str, bool] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)


ATTENTION_BIAS = {"qkv_bias": "attention_bias", "wo_bias": "attention_bias"}
FULL_ATTENTION = {"use_sliding_window": only(False), "layer_types": FULL_LAYERS}
ARCHITECTURES = {
    # transformers' Llama ignores a window when it attends, but its cache drops the entries after the window.
    "LlamaForCausalLM": Architecture(
        "llama",
        {"sliding_window": UNSET, "layer_types": FULL_LAYERS},
        {"max_position_embeddings": 2048},
        switches=ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
    ),
    # transformers takes a Mistral with types of layers for a Ministral.
    "MistralForCausalLM": Architecture(
        "mistral",
        {"layer_types": only()},
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        {"head_dim": INTEGER, **FULL_ATTENTION},
        {"max_position_embeddings": 32768, "num_key_value_heads": 32},
        fixed={"qkv_bias": True},
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        {"head_dim": INTEGER, **FULL_ATTENTION},
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
        fixed={"qk_norm": True},
        switches=ATTENTION_BIAS,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        # Other values of the last two keys: some layers lack experts.
        {"head_dim": INTEGER, **FULL_ATTENTION, "decoder_sparse_step": only(1), "mlp_only_layers": only(None, [])},
        {
            **{"max_position_embeddings": 32768, "num_key_value_heads": 4, "moe_intermediate_size": 768},
            **{"num_local_experts": 128, "num_experts_per_tok": 8},
        },
        fixed={"qk_norm": True},
        renamed={"num_experts": "num_local_experts"},
        sizes={
            "n_expert": "num_local_experts",
            "n_expert_per_token": "num_experts_per_tok",
            "ffn_dim": "moe_intermediate_size",
        },
        switches=ATTENTION_BIAS | {"normalise_experts": "norm_topk_prob"},
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        {"partial_rotary_factor": NUMBER, "layer_types": only()},
        {"max_position_embeddings": 4096, ORIGINAL: 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
        rope_types=("default", "longrope"),
        is_fused=True,
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        {"no_rope_layers": LAYER_FLAGS, **FULL_ATTENTION},
        {
            **{"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2000000.0},
            **{"tie_word_embeddings": True, "no_rope_layers": None, "no_rope_layer_interval": 4},
        },
        switches=ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
    ),
}
FUSED = [name for name, architecture in ARCHITECTURES.items() if architecture.is_fused]


def config_from_hf(given: Values, *, where: str = "config") -> ModelConfig:
    """Translate the keys of a Hugging Face config.json. Raises ConfigError naming the key."""
    quantized_format(given, where)
    names = given.get("architectures")
    name = names[0] if isinstance(names, list) and names else "(none given)"
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        unsupported(f"{where}: architectures", name, f"one of {', '.join(ARCHITECTURES)}")
    switches = dict.fromkeys(architecture.switches.values(), BOOLEAN)
    check(given, {"model_type": only(architecture.model_type)} | RULES | switches | dict(architecture.rules), where)
    renamed = {architecture.renamed.get(key, key): value for key, value in given.items()}
    if len(renamed) < len(given):
        seen = ", ".join(f"{old} and {new}" for old, new in architecture.renamed.items())
        unsupported(where, seen, "one name for each key")
    values = {**DEFAULTS, **architecture.defaults, **renamed}
    sizes = {field: positive(values, key, where) for field, key in {**SIZES, **architecture.sizes}.items()}
    n_layer, n_head = sizes["n_layer"], sizes["n_head"]
    head_dim = positive(values, "head_dim", where, sizes["dim"] // n_head)
    rope = rope_fields(values, head_dim, architecture.rope_types, where)
    if rope["rotary_dim"] and "partial_rotary_factor" not in architecture.rules:
        unsupported(f"{where}: partial_rotary_factor", rope["rotary_dim"], "whole heads")
    has_window = architecture.defaults.keys() >= {"sliding_window"} and values["sliding_window"] is not None
    ends = values.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int and 0 <= token < sizes["vocab_size"] for token in ends):
        required = f"ids of tokens, at least 0 and less than {sizes['vocab_size']}"
        at = f"{where}: eos_token_id ({GENERATION_CONFIG}'s, if it has the key)"
        fix = f"correct the ids, or take the key out of {GENERATION_CONFIG} for config.json's"
        unsupported(at, repr(ends)[:200], required, fix=fix)
    fields = {
        **sizes,
        "n_kv_head": positive(values, "num_key_value_heads", where, n_head),
        "head_dim": head_dim,
        "norm_eps": positive(values, "rms_norm_eps", where, kind=float),
        **rope,
        "unrotated_layers": _unrotated_layers(values, n_layer, where) if "no_rope_layers" in architecture.rules else [],
        "sliding_window": positive(values, "sliding_window", where) if has_window else None,
        "tie_embeddings": values["tie_word_embeddings"],
        **architecture.fixed,
        **{field: values.get(key, False) for field, key in architecture.switches.items()},
        "eos_tokens": ends,
    }
    return ModelConfig.from_dict(fields)


def _unrotated_layers(values: Values, n_layer: int, where: str) -> list[int]:
    """Return the layers without rotary embedding, which SmolLM3 lists as 0 in `no_rope_layers`."""
    if (rotates := values["no_rope_layers"]) is None:
        interval = positive(values, "no_rope_layer_interval", where)
        return list(range(interval - 1, n_layer, interval))
    if len(rotates) < n_layer:
        unsupported(f"{where}: no_rope_layers", f"{len(rotates)} layers", f"{n_layer} layers")
    return [layer for layer in range(n_layer) if not rotates[layer]]


def config_from_json(path: str | Path) -> ModelConfig:
    """Read a Hugging Face `config.json`, and the end tokens of the generation_config.json next to it. Raises
    ConfigError naming the file and the field."""
    return config_from_hf(with_end_tokens(read_config(Path(path)), Path(path).parent), where=str(path))


def read_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`, or a file like it, into a dictionary. Raises ConfigError naming the file."""
    required, fix = f"the checkpoint's {path.name}, a JSON object", "download it again (download.py)"
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it is a {type(values).__name__}")
    except (OSError, ValueError) as error:
        refuse(path, error, required, f"the model's {path.name} is missing, or cannot be read", fix)
    return dict(values)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read the generation_config.json of a folder, empty without the file. Raises ConfigError if it is damaged."""
    path = folder / GENERATION_CONFIG
    return read_config(path) if path.exists() else {}


def with_end_tokens(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys of a config.json with the end tokens of the folder's generation_config.json, which take the place
    of config.json's if it names any, as in transformers. Raises ConfigError."""
    ends = read_generation_config(folder).get("eos_token_id")
    return values if ends in (None, []) else values | {"eos_token_id": ends}
