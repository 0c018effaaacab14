"""Llama-like models: one module, its checkpoints, and how it is run."""

from models.checkpoints.loading import load_model
from models.config import ModelConfig
from models.llama import Transformer
