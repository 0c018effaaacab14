"""Changes of a model's config.json for one run: a longer context, and other values of its keys."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, flag
from models.config import ModelConfig
from models.hf_rope import extended


@dataclass(frozen=True)
class ConfigChanges:
    """rope_scaling: `yarn:FACTOR` or `linear:FACTOR`. config_overrides: `KEY=VALUE`, with a value in JSON or a word."""

    rope_scaling: str | None = None
    config_overrides: tuple[str, ...] = ()

    def apply(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the keys of a config.json with the changes. Raises ConfigError for a change without effect."""
        changed = dict(values)
        for override in self.config_overrides:
            key, _, value = override.partition("=")
            before = ModelConfig.from_hf(changed, where=where)
            try:
                changed[key] = json.loads(value)
            except ValueError:
                changed[key] = value
            if ModelConfig.from_hf(changed, where=flag("config_overrides")) == before:
                what, required = "this key changes nothing", "KEY=VALUE, a key of config.json and another value for it"
                raise ConfigError(what, flag("config_overrides"), override, required, "see docs/checkpoints.md")
        return extended(changed, self.rope_scaling, where) if self.rope_scaling else changed


NO_CHANGES = ConfigChanges()
