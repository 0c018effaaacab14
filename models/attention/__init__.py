"""Attention over a slot cache: one protocol and one file per backend, imported when it is needed."""

from models.attention.base import MAX_BLOCK, AttentionBackend, AttentionSpec, Slots
from models.attention.select import BACKENDS, Selection, select_backend
from models.attention.torch_backend import TorchAttention
