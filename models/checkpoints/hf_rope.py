"""Translate the rotary settings of a Hugging Face config.json into fields of a ModelConfig, or refuse them by key."""

import math
from collections.abc import Collection
from typing import Any

from common.errors import flag, refuse
from models.checkpoints.hf_rules import BOOLEAN, MAX_SIZE, NUMBER, STRING, Values, check, of_type, positive, unsupported

RULES = {"rope_type": STRING, "type": STRING, "rope_theta": NUMBER, "truncate": BOOLEAN}
RULES |= dict.fromkeys(("mscale", "mscale_all_dim"), of_type("a number or null", int, float, type(None)))
# The numbers that each type needs.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}
ORIGINAL = "original_max_position_embeddings"


def rope_fields(values: Values, head_dim: int, types: Collection[str], where: str) -> dict[str, Any]:
    """Return the fields `rope_theta`, `rope_scaling`, `rotary_dim` and `max_context` of a ModelConfig.

    A token's frequencies must not depend on the text around it, as they do in transformers for two types. `dynamic`
    has the unscaled frequencies here, which transformers has for texts within `max_position_embeddings`. `longrope`
    has its `long_factor` if `max_position_embeddings` exceeds the original context. Raises ConfigError naming the key.
    """
    settings, where = _settings(values, where)
    check(settings, RULES, where)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in types:
        unsupported(where, kind, f"one of {', '.join(types)}", "unsupported rope type")
    max_context = positive(values, "max_position_embeddings", where)
    # The model's key overrides the key in the rotary settings; the default is max_position_embeddings.
    original = positive({ORIGINAL: values.get(ORIGINAL, settings.get(ORIGINAL))}, ORIGINAL, where, max_context)
    rotary_dim = int(head_dim * positive(settings, "partial_rotary_factor", where, 1.0, kind=float))
    if not 2 <= rotary_dim <= head_dim:
        unsupported(f"{where}: partial_rotary_factor", f"{rotary_dim} of {head_dim} elements", "2 elements to all")
    theta = positive(settings, "rope_theta", where, kind=float)
    if kind in ("yarn", "longrope") and (theta == 1 or original == 1):
        unsupported(where, f"rope_theta {theta}, {ORIGINAL} {original}", "numbers whose logarithm is not 0")
    scaling = {key: positive(settings, key, where, kind=float) for key in ROPE_TYPES[kind]}
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        required = f"more than low_freq_factor, {scaling['low_freq_factor']}"
        unsupported(f"{where}: high_freq_factor", scaling["high_freq_factor"], required)
    if kind == "yarn":
        scaling |= _yarn(settings, scaling["factor"], where)
        max_context = max(max_context, int(original * scaling["factor"]))
    if kind == "longrope":
        scaling |= _longrope(settings, max_context, original, rotary_dim // 2, where)
    if kind in ("llama3", "yarn"):
        scaling["original_context"] = original
    return {
        "rope_theta": theta,
        "rope_scaling": None if kind in ("default", "dynamic") else {"kind": kind, **scaling},
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "max_context": max_context,
    }


def extended(values: Values, scaling: str, where: str) -> dict[str, Any]:
    """Return the keys of a config.json for a context extended by `yarn:FACTOR` or `linear:FACTOR`. Raises ConfigError
    for another scaling, or a model whose frequencies are scaled already."""
    kind, _, factor = scaling.partition(":")
    try:
        by = float(factor) if kind in ("yarn", "linear") else 0.0
    except ValueError:
        by = 0.0
    if not 1 < by < MAX_SIZE:
        refuse("rope_scaling", scaling, "yarn:FACTOR or linear:FACTOR, with a factor above 1")
    settings, where = _settings(values, where)
    if (present := settings.pop("type", settings.get("rope_type", "default"))) != "default":
        required = f"default, with {flag('rope_scaling')}"
        unsupported(where, present, required, "the context is extended already")
    context = positive(values, "max_position_embeddings", where)
    rope = settings | {"rope_type": kind, "factor": by, ORIGINAL: context}
    changed = {**values, "max_position_embeddings": int(context * by), "rope_parameters": rope}
    return {key: value for key, value in changed.items() if key not in ("rope_scaling", ORIGINAL)}


def _settings(values: Values, where: str) -> tuple[dict[str, Any], str]:
    """Return the rotary settings, in which the model's keys are defaults, and the name of their place. Raises
    ConfigError if `rope_scaling` and `rope_parameters` differ: programs disagree on which of them holds."""
    given = {name: values[name] for name in ("rope_parameters", "rope_scaling") if values.get(name)}
    if len({str(sorted(settings.items())) for settings in given.values()}) > 1:
        unsupported(where, given, "rope_scaling or rope_parameters, or equal ones", "two rotary settings differ")
    usual = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if values.get(key) is not None}
    for name, settings in given.items():
        where = f"{where}: {name}"
        if nested := [key for key, value in settings.items() if isinstance(value, dict)]:
            unsupported(where, nested, "the same settings for each type of layer")
        return usual | settings, where
    return usual, where


def _yarn(settings: Values, factor: float, where: str) -> dict[str, Any]:
    """Return the fields of YaRN (arXiv 2309.00071) next to its factor, with the defaults of the paper."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(max(factor, 1.0)) + 1

    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    usual = scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1)
    return {
        "attention_factor": positive(settings, "attention_factor", where, usual, float),
        "beta_fast": positive(settings, "beta_fast", where, 32.0, float),
        "beta_slow": positive(settings, "beta_slow", where, 1.0, float),
        "truncate": settings.get("truncate", True),
    }


def _longrope(settings: Values, max_context: int, original: int, n_pair: int, where: str) -> dict[str, Any]:
    """Return the fields of LongRoPE (arXiv 2402.13753): the divisor of each pair's frequency, and the factor of
    cosines and sines."""
    name = "long_factor" if max_context > original else "short_factor"
    divisors = settings.get(name)
    if not isinstance(divisors, list) or len(divisors) != n_pair:
        unsupported(f"{where}: {name}", divisors, f"{n_pair} numbers")
    factor = max(positive(settings, "factor", where, max_context / original, float), 1.0)
    usual = math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "attention_factor": positive(settings, "attention_factor", where, usual, float),
        "divisors": tuple(positive({name: divisor}, name, where, kind=float) for divisor in divisors),
    }
