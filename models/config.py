"""The shape of a Transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from common.errors import refuse

FIX = "use a checkpoint of a supported family (docs/checkpoints.md) with a matching config.json"
unsupported = partial(refuse, fix=FIX)


@dataclass(frozen=True)
class RopeScaling:
    """Context extension of the rotary frequencies.

    `linear`: all frequencies are divided by `factor` (position interpolation, arXiv 2306.15595).
    `llama3`: low frequencies are divided by `factor`, high frequencies stay, with a ramp between (Llama 3.1).
    `yarn`: likewise, with a ramp over the pairs from `beta_fast` to `beta_slow` turns in the original context, to
    whole pairs if `truncate`; cosines and sines are multiplied by `attention_factor` (arXiv 2309.00071).
    `longrope`: each pair's frequency has a divisor; `attention_factor` as in yarn (arXiv 2402.13753).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-family decoder. Sizes count elements; `max_context` and `sliding_window` count tokens.

    rotary_dim: leading elements of a head that are rotated; None: all.
    unrotated_layers: layers without rotary embedding (SmolLM3).
    qk_norm: RMSNorm of every query and key head before rotation (Qwen3).
    n_expert: feed-forward experts of a layer, 0 for a plain layer; `ffn_dim` is an expert's.
    n_expert_per_token: experts that a token runs through; with shares that sum to 1 if `normalise_experts`.
    """

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
    rotary_dim: int | None = None
    unrotated_layers: tuple[int, ...] = ()
    max_context: int = 2048
    sliding_window: int | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    wo_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    n_expert: int = 0
    n_expert_per_token: int = 0
    normalise_experts: bool = False
    eos_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.n_head % self.n_kv_head:
            seen = f"n_head {self.n_head}, n_kv_head {self.n_kv_head}"
            unsupported("num_attention_heads, num_key_value_heads", seen, "n_head a multiple of n_kv_head")
        if self.head_dim % 2 or (self.rotary_dim or 0) % 2:
            seen = f"head_dim {self.head_dim}, rotary_dim {self.rotary_dim}"
            unsupported("head_dim, partial_rotary_factor", seen, "even numbers")
        if self.n_expert_per_token > self.n_expert:
            unsupported("config.json: num_experts_per_tok", self.n_expert_per_token, f"<= {self.n_expert}")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_kv_head

    @property
    def n_parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        n_qkv = self.head_dim * (self.n_head + 2 * self.n_kv_head)
        biases = self.qkv_bias * n_qkv + self.wo_bias * self.dim + self.mlp_bias * (2 * self.ffn_dim + self.dim)
        norms = 2 * self.dim + self.qk_norm * 2 * self.head_dim
        layer = self.n_linear_weights_per_layer + biases + norms
        heads = 1 if self.tie_embeddings else 2
        return self.n_layer * layer + heads * self.vocab_size * self.dim + self.dim

    @property
    def n_linear_weights_per_layer(self) -> int:
        """Weights of a layer's matrix products, without biases."""
        attention = self.dim * self.head_dim * (2 * self.n_head + 2 * self.n_kv_head)
        return attention + self.n_expert * self.dim + max(self.n_expert, 1) * self.n_weights_of_expert

    @property
    def n_weights_of_expert(self) -> int:
        """Weights of an expert's matrix products, or of the layer's feed-forward."""
        return 3 * self.dim * self.ffn_dim

    def experts_touched(self, n_token: int) -> float:
        """Return the expected number of a layer's experts that `n_token` tokens run through, chosen evenly."""
        return self.n_expert * (1 - (1 - self.n_expert_per_token / max(self.n_expert, 1)) ** n_token)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of a token's keys and values in all layers."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * itemsize

    def with_layers(self, layers: Sequence[int]) -> ModelConfig:
        """Return the config of a model with these layers alone, in this order."""
        unrotated = tuple(index for index, layer in enumerate(layers) if layer in self.unrotated_layers)
        return replace(self, n_layer=len(layers), unrotated_layers=unrotated)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build a config from the dictionary that `asdict` returns, or JSON's copy of it (lists for tuples)."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        if (scaling := known.get("rope_scaling")) is not None:
            known["rope_scaling"] = RopeScaling(**scaling | {"divisors": tuple(scaling.get("divisors", ()))})
        for name in ("eos_tokens", "unrotated_layers"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)
