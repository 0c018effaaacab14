"""Llama-like models: the Transformer, its attention and kernels, storage, checkpoints and trained heads."""

from models.checkpoints.loading import load_model
from models.config import ModelConfig
from models.llama import Transformer
