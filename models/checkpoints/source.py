"""What a downloaded checkpoint is once it is open, whatever its format: lazily read tensors and a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the source; `read` returns it as a CPU tensor of `shape` and `dtype`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Source:
    """The weight files of a folder, their tensors by Hugging Face name, and the Hugging Face config.

    `side_files` are the config.json, tokenizer and the like that the folder has for these weights. What is not among
    them is made from the weight file's metadata: `hf_config`, and `tokenizer_json` if the file carries one.
    """

    files: tuple[Path, ...]
    tensors: dict[str, SourceTensor]
    hf_config: dict[str, Any]
    config: ModelConfig
    side_files: tuple[str, ...]
    tokenizer_json: str | None = None


def read_hf_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """The config.json of a folder, raw and translated. Raises ConfigError naming the file."""
    path = folder / "config.json"
    config = ModelConfig.from_json(path)
    return json.loads(path.read_text(encoding="utf-8")), config
