"""Published configurations by name, for runs with random weights (`--load_format dummy`) and for tests."""

import json
from pathlib import Path
from typing import Any

from common.errors import refuse
from models.checkpoints.hf_config import config_from_hf
from models.config import ModelConfig


def _published() -> dict[str, dict[str, Any]]:
    """Read the keys of each config.json: an entry of `presets.json` overrides the model that it is "like"."""
    stored = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    presets = {"usual": stored.pop("usual")}
    for name, keys in stored.items():
        presets[name] = presets[keys.pop("like", "usual")] | keys
    del presets["usual"]
    return presets


PRESETS = _published()


def preset_name(path: str) -> str:
    """Return the preset, ORG/NAME, whose NAME is the name of a path's folder. Raises ConfigError if there is none."""
    folder = Path(path).parent if path.endswith(".pth") else Path(path)
    for name in PRESETS:
        if folder.name == name.partition("/")[2]:
            return name
    required = f"one of {', '.join(sorted(PRESETS))}, or a folder of such a name, or with a config.json"
    refuse("model name", path, required, "no published configuration is stored under this name")


def preset_config(path: str) -> ModelConfig:
    """Return the published configuration of the preset for a path (`preset_name`). Raises ConfigError."""
    name = preset_name(path)
    return config_from_hf(PRESETS[name], where=name)
