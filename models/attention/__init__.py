"""Attention over a slot cache: one protocol, one file per backend, nothing imported before it is asked for."""

from models.attention.base import MAX_BLOCK, AttentionBackend, AttentionSpec, Slots
from models.attention.select import BACKENDS, Selection, select_backend
from models.attention.torch_backend import TorchAttention
