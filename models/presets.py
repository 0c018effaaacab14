"""Published configurations by name, for runs with random weights (`--load_format dummy`) and for tests."""

import json
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from models.config import ModelConfig


def _published() -> dict[str, dict[str, Any]]:
    """The keys of each config.json: what `presets.json` says beside those of the model that it is like."""
    stored = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for name, own in stored.items():
        found[name] = found[own.pop("like", "usual")] | own if found else own
    del found["usual"]
    return found


PRESETS = _published()


def preset_name(path: str) -> str:
    """The Hugging Face repository, ORG/NAME, whose NAME is that of a path's folder. Raises ConfigError unless its
    configuration is stored."""
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
