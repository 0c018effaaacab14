"""Llama-family models: one configuration, one Transformer, one loader."""

from models.checkpoints.loading import load_model
from models.config import ModelConfig
from models.llama import Transformer

__all__ = ["ModelConfig", "Transformer", "load_model"]
