"""Llama-family models: one configuration, one Transformer, one loader."""

from typing import TYPE_CHECKING

from common.lazy import lazily
from models.config import ModelConfig

if TYPE_CHECKING:
    from models.checkpoints.loading import load_model
    from models.llama import Transformer

__all__ = ["ModelConfig", "Transformer", "load_model"]
__getattr__ = lazily(__name__, {"load_model": "models.checkpoints.loading", "Transformer": "models.llama"})
