"""ModelConfig: what the Transformer needs to know, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import ConfigError

MAX_SIZE = 1 << 31
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


@dataclass(frozen=True)
class RopeScaling:
    """Context extension of the rotary frequencies.

    `linear`: all frequencies divided by `factor` (position interpolation, arXiv 2306.15595).
    `llama3`: low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Sizes are counts of elements; `max_context` is in tokens."""

    vocab_size: int
    n_layer: int
    dim: int
    n_head: int
    n_kv_head: int
    head_dim: int
    ffn_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_context: int = 2048
    sliding_window: int | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    eos_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.n_head % self.n_kv_head:
            what = "query heads do not divide into groups of KV heads"
            where = "n_head and n_kv_head (num_attention_heads, num_key_value_heads)"
            seen = f"n_head {self.n_head}, n_kv_head {self.n_kv_head}"
            raise _refuse(what, where, seen, "n_head a multiple of n_kv_head")
        if self.head_dim % 2:
            raise _refuse("rotary embedding needs pairs", "head_dim", self.head_dim, "an even number")
        for token in self.eos_tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                where, required = "eos_token_id", f"0 <= id < {self.vocab_size}"
                raise _refuse("an end token is not in the vocabulary", where, repr(token), required)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.n_head // self.n_kv_head

    @property
    def n_parameters(self) -> int:
        """Parameters of the model, a tied head counted once."""
        bias = self.head_dim * (self.n_head + 2 * self.n_kv_head) if self.qkv_bias else 0
        layer = self.n_linear_weights_per_layer + bias + 2 * self.dim
        heads = 1 if self.tie_embeddings else 2
        return self.n_layer * layer + heads * self.vocab_size * self.dim + self.dim

    @property
    def n_linear_weights_per_layer(self) -> int:
        """Weights of a layer's matrix products, biases not counted."""
        return self.dim * (self.head_dim * (2 * self.n_head + 2 * self.n_kv_head) + 3 * self.ffn_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token of one row takes, over all layers."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * itemsize

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Inverse of `asdict`; also takes what JSON makes of it (lists for tuples)."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        if known.get("rope_scaling") is not None:
            known["rope_scaling"] = RopeScaling(**known["rope_scaling"])
        known["eos_tokens"] = tuple(known.get("eos_tokens", ()))
        return cls(**known)

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read a Hugging Face `config.json`. Raises ConfigError naming the file and the field."""
        return cls.from_hf(read_config(Path(path)), where=str(path))

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], *, where: str = "config") -> ModelConfig:
        """Translate the keys of a Hugging Face Llama, Mistral or Qwen2 configuration."""
        given = values.get("architectures")
        architecture = given[0] if isinstance(given, list) and given else "(none given)"
        if architecture not in ARCHITECTURES:
            raise _refuse("unsupported architecture", where, architecture, f"one of {', '.join(ARCHITECTURES)}")
        if values.get("hidden_act", "silu") != "silu":
            raise _refuse("unsupported activation", f"{where}: hidden_act", values["hidden_act"], "silu")
        qwen, mistral = architecture == "Qwen2ForCausalLM", architecture == "MistralForCausalLM"
        if values.get("use_sliding_window"):
            raise _refuse("use_sliding_window is not supported", where, values["use_sliding_window"], "false or absent")
        n_head, dim = positive(values, "num_attention_heads", where), positive(values, "hidden_size", where)
        # transformers gives a Mistral configuration without this key a window of 4096.
        window = {"sliding_window": values.get("sliding_window", 4096 if mistral else None)}
        windowed = not qwen and window["sliding_window"] is not None
        rope = _rope(values, where)
        eos = values.get("eos_token_id", [])
        return cls(
            vocab_size=positive(values, "vocab_size", where),
            n_layer=positive(values, "num_hidden_layers", where),
            dim=dim,
            n_head=n_head,
            n_kv_head=positive(values, "num_key_value_heads", where, n_head),
            head_dim=positive(values, "head_dim", where, dim // n_head),
            ffn_dim=positive(values, "intermediate_size", where),
            norm_eps=positive(values, "rms_norm_eps", where, 1e-6, float),
            rope_theta=positive(rope, "rope_theta", where, 10000.0, float),
            rope_scaling=_rope_scaling(rope, where),
            max_context=positive(values, "max_position_embeddings", where, 2048),
            sliding_window=positive(window, "sliding_window", where) if windowed else None,
            tie_embeddings=bool(values.get("tie_word_embeddings")),
            qkv_bias=qwen,
            eos_tokens=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a `config.json` as they are. Raises ConfigError naming the file."""
    required, fix = "a JSON object", "download it again (download.py)"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it is a {type(values).__name__}")
    except FileNotFoundError:
        what, required = "the model's config.json is missing", "the config.json that belongs to the checkpoint"
        fix += ", or copy config.json beside the weights"
        raise ConfigError(what, path, "no such file", required, fix) from None
    except (ValueError, RecursionError) as error:  # ValueError: other text, or a number of 5000 digits
        raise ConfigError("the model's config.json is not a JSON object", path, error, required, fix) from None
    return dict(values)


def _refuse(what: str, where: str, seen: object, required: str) -> ConfigError:
    fix = "use a checkpoint of a supported family (Llama, Mistral, Qwen2) with a matching config.json"
    return ConfigError(what, where, seen, required, fix)


def positive(
    values: Mapping[str, Any], key: str, where: str, default: float | None = None, kind: type[float] = int
) -> Any:
    """A size, or with `kind` float another number; `default` where it is absent. Errors: ConfigError."""
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, (int, kind)) or isinstance(value, bool) or not 0 < value < MAX_SIZE:
        seen, name = "no such key" if value is None else repr(value), "integer" if kind is int else "number"
        raise _refuse(f"{key} is not a positive {name}", f"{where}: {key}", seen, f"> 0 and < {MAX_SIZE}")
    return kind(value)


def _rope(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rotary settings: `rope_parameters` (transformers 5), else `rope_theta` + `rope_scaling`."""
    given = [values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key) is not None]
    for settings in given:
        if not isinstance(settings, dict):
            raise _refuse("the rope settings are not an object", where, repr(settings), "an object with a rope_type")
    return {"rope_theta": values.get("rope_theta")} | next(filter(None, given), {})


def _rope_scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = next((rope[key] for key in ("rope_type", "type") if rope.get(key) is not None), "default")
    number = partial(positive, rope, where=where, kind=float)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", number("factor"))
    if kind == "llama3":
        corners = number("low_freq_factor"), number("high_freq_factor")
        original_context = positive(rope, "original_max_position_embeddings", where)
        return RopeScaling("llama3", number("factor"), *corners, original_context)
    raise _refuse("unsupported rope type", where, kind, "default, linear or llama3")
