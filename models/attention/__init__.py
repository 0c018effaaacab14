"""Attention over a slot cache: a protocol, and a file for each backend."""

from models.attention.base import MAX_BLOCK, AttentionBackend, AttentionSpec, Slots
from models.attention.select import BACKENDS, Selection, select_backend
from models.attention.torch_backend import TorchAttention
