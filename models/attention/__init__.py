"""Attention over a slot cache: a protocol with several backends, each in its file and imported when it is selected."""

from models.attention.base import MAX_BLOCK, AttentionBackend, AttentionSpec, Slots
from models.attention.select import BACKENDS, Selection, select_backend
from models.attention.torch_backend import TorchAttention
