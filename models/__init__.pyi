from .checkpoints.loading import load_model as load_model
from .config import ModelConfig as ModelConfig
from .llama import Transformer as Transformer
