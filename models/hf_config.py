"""Translate a Hugging Face config.json into the fields of a ModelConfig, or refuse it by key.

An accepted file has the logits that transformers (5.23) computes from it. A key that is neither read nor in a table
below has no effect on them; docs/checkpoints.md lists both kinds.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError

MAX_SIZE = 1 << 31
FIX = "use a checkpoint of a supported family (Llama, Mistral, Qwen2) with a matching config.json"
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """The accepted values of a key, and how an error describes them."""

    required: str
    accepts: Callable[[Any], bool]


def only(*values: Any) -> Rule:
    """Accept exactly these values: 0 is not false, and 1.0 is not 1."""
    kinds = [(type(value), value) for value in values]
    return Rule(" or ".join(["no such key", *map(json.dumps, values)]), lambda value: (type(value), value) in kinds)


def of_type(name: str, *types: type) -> Rule:
    """Accept values of these types; transformers reads other types differently, or not at all."""
    return Rule(name, lambda value: type(value) in types)


UNSET = only(None)
OBJECT = of_type("an object or null", dict, type(None))
STRING = of_type("a string", str)
INTEGER = of_type("an integer", int)
NUMBER = of_type("a number", int, float)
FULL_LAYERS = Rule(
    'no such key, null, or "full_attention" for each layer',
    lambda value: value is None or (isinstance(value, list) and all(kind == "full_attention" for kind in value)),
)

RULES = {
    "hidden_act": only("silu"),
    "max_position_embeddings": INTEGER,
    "rms_norm_eps": of_type("a number with a decimal point", float),
    "tie_word_embeddings": of_type("true or false", bool),
    "rope_theta": NUMBER,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "partial_rotary_factor": only(None, 1, 1.0),
    "is_causal": only(True),
    "is_encoder_decoder": only(False),
    "quantization_config": UNSET,
    # Layers, or their cache entries, would differ from each other.
    "attention_chunk_size": UNSET,
    "kv_sharing_modes": UNSET,
    "per_layer_config": UNSET,
    # Keys or weights would come from another file or section.
    "attribute_map": UNSET,
    "configuration_files": UNSET,
    "transformers_weights": UNSET,
    "text_config": UNSET,
    "text_encoder": UNSET,
    "decoder": UNSET,
    "generator": UNSET,
}
DEFAULTS: Values = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}

ROPE_RULES = {"rope_type": STRING, "type": STRING, "rope_theta": NUMBER, "partial_rotary_factor": only(1, 1.0)}
# The numbers that each type of rotary settings needs; below, the fields of `RopeScaling` with other names.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_FIELDS = {"original_max_position_embeddings": "original_context"}


@dataclass(frozen=True)
class Architecture:
    """An architecture's rules in addition to RULES, and transformers' defaults for absent keys."""

    model_type: str
    rules: Mapping[str, Rule]
    defaults: Values
    has_window: bool = False
    qkv_bias: bool = False


ARCHITECTURES = {
    # transformers' Llama ignores a window when it attends, but its cache drops the entries behind the window.
    "LlamaForCausalLM": Architecture(
        "llama",
        {"attention_bias": only(False), "mlp_bias": only(False), "sliding_window": UNSET, "layer_types": FULL_LAYERS},
        {"max_position_embeddings": 2048},
    ),
    # transformers takes a Mistral with types of layers for a Ministral.
    "MistralForCausalLM": Architecture(
        "mistral",
        {"layer_types": only()},
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        has_window=True,
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        {"head_dim": INTEGER, "use_sliding_window": only(False), "layer_types": FULL_LAYERS},
        {"max_position_embeddings": 32768, "num_key_value_heads": 32},
        qkv_bias=True,
    ),
}


def config_fields(given: Values, where: str) -> dict[str, Any]:
    """Return the fields of a ModelConfig, for `ModelConfig.from_dict`. Raises ConfigError naming the key."""
    names = given.get("architectures")
    name = names[0] if isinstance(names, list) and names else "(none given)"
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise refuse("unsupported architecture", f"{where}: architectures", name, f"one of {', '.join(ARCHITECTURES)}")
    _check(given, {"model_type": only(architecture.model_type)} | RULES | dict(architecture.rules), where)
    values = {**DEFAULTS, **architecture.defaults, **given}
    n_head, dim = positive(values, "num_attention_heads", where), positive(values, "hidden_size", where)
    has_window = architecture.has_window and values["sliding_window"] is not None
    eos = values.get("eos_token_id")
    return {
        "vocab_size": positive(values, "vocab_size", where),
        "n_layer": positive(values, "num_hidden_layers", where),
        "dim": dim,
        "n_head": n_head,
        "n_kv_head": positive(values, "num_key_value_heads", where, n_head),
        "head_dim": positive(values, "head_dim", where, dim // n_head),
        "ffn_dim": positive(values, "intermediate_size", where),
        "norm_eps": positive(values, "rms_norm_eps", where, kind=float),
        **_rope(values, where),
        "max_context": positive(values, "max_position_embeddings", where),
        "sliding_window": positive(values, "sliding_window", where) if has_window else None,
        "tie_embeddings": values["tie_word_embeddings"],
        "qkv_bias": architecture.qkv_bias,
        "eos_tokens": eos if isinstance(eos, list) else [] if eos is None else [eos],
    }


def _rope(values: Values, where: str) -> dict[str, Any]:
    """Return the fields `rope_theta` and `rope_scaling`. The key `rope_scaling` overrides `rope_parameters`."""
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    settings = {"rope_theta": values["rope_theta"], **(values.get(name) or {})}
    where = f"{where}: {name}" if values.get(name) else where
    if nested := [key for key, value in settings.items() if isinstance(value, dict)]:
        raise refuse("rotary settings for each type of layer are not supported", where, nested, "one for all layers")
    _check(settings, ROPE_RULES, where)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise refuse("unsupported rope type", where, kind, f"one of {', '.join(ROPE_TYPES)}")
    # The model's key overrides the key in the rotary settings; the default is max_position_embeddings.
    context = "original_max_position_embeddings"
    settings[context] = values.get(context, settings.get(context, values["max_position_embeddings"]))
    numbers = {key: positive(settings, key, where, kind=int if key == context else float) for key in ROPE_TYPES[kind]}
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        seen, required = numbers["high_freq_factor"], f"more than low_freq_factor, {numbers['low_freq_factor']}"
        raise refuse("the corners of the rotary scaling cross", f"{where}: high_freq_factor", seen, required)
    scaling = {ROPE_FIELDS.get(key, key): number for key, number in numbers.items()}
    return {
        "rope_theta": positive(settings, "rope_theta", where, kind=float),
        "rope_scaling": {"kind": kind, **scaling} if scaling else None,
    }


def _check(values: Values, rules: Mapping[str, Rule], where: str) -> None:
    """Raise ConfigError for the first key whose value is not accepted."""
    for key, rule in rules.items():
        if key in values and not rule.accepts(values[key]):
            what, seen = f"{key} has a value that is not supported", repr(values[key])[:200]
            fix = f"{FIX}; leave out {key} if the model does not use it"
            raise ConfigError(what, f"{where}: {key}", seen, rule.required, fix)


def positive(values: Values, key: str, where: str, default: float | None = None, kind: type[float] = int) -> Any:
    """Return a positive size, or with `kind=float` a positive number; `default` if the key is absent or null.

    Raises ConfigError.
    """
    value = default if values.get(key) is None else values[key]
    end = MAX_SIZE if kind is int else sys.float_info.max
    if not isinstance(value, (int, kind)) or isinstance(value, bool) or not 0 < value < end:
        seen, name = "no such key" if value is None else repr(value), "integer" if kind is int else "number"
        raise refuse(f"{key} is not a positive {name}", f"{where}: {key}", seen, f"> 0 and < {end:g}")
    return kind(value)


def refuse(what: str, where: str, seen: object, required: str) -> ConfigError:
    """Return the error for a configuration that is not supported."""
    return ConfigError(what, where, seen, required, FIX)
