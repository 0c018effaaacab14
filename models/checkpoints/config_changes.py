"""Changes of a model's config.json for one run: a longer context, and other values of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, flag, refuse
from common.jsonl import parse_json
from models.checkpoints.hf_config import config_from_hf
from models.checkpoints.hf_rope import ORIGINAL, extended
from models.config import ModelConfig

ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings", ORIGINAL)


@dataclass(frozen=True)
class ConfigChanges:
    """rope_scaling: `yarn:FACTOR` or `linear:FACTOR`. config_overrides: `KEY=VALUE`, with a value in JSON or a word.
    may_be_void: an override without effect is no error."""

    rope_scaling: str | None = None
    config_overrides: tuple[str, ...] = ()
    may_be_void: bool = False

    @property
    def rotary(self) -> ConfigChanges | None:
        """The changes of rotary settings, for a draft that may have these values already; None without any."""
        overrides = tuple(override for override in self.config_overrides if _parsed(override)[0] in ROTARY)
        return ConfigChanges(self.rope_scaling, overrides, may_be_void=True) if self.rope_scaling or overrides else None

    def apply(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the keys of a config.json with the changes. Raises ConfigError for a change without effect."""
        overrides = {override: _parsed(override) for override in self.config_overrides}
        changed = {**values, **dict(overrides.values())}
        for override in () if self.may_be_void else overrides:
            others = {**values, **dict(pair for name, pair in overrides.items() if name != override)}
            if _config(changed) == _config(others):
                required = "KEY=VALUE, a key of config.json (docs/checkpoints.md) and another value for it"
                refuse("config_overrides", override, required, "this key changes nothing")
        if self.rope_scaling is None:
            return changed
        changed = extended(changed, self.rope_scaling, where)
        config_from_hf(changed, where=f"{flag('rope_scaling')} {self.rope_scaling}")  # a family may lack the type
        return changed


def _parsed(override: str) -> tuple[str, Any]:
    """Return a key and its value, which is JSON or else a word."""
    key, _, value = override.partition("=")
    try:
        return key, parse_json(value)
    except ValueError:
        return key, value


def _config(values: Mapping[str, Any]) -> ModelConfig | None:
    """Return the config of these keys; None if they are refused."""
    try:
        return config_from_hf(values)
    except ConfigError:
        return None


NO_CHANGES = ConfigChanges()
