"""KV caches: one protocol, one visibility rule, one policy per file."""

from kv_cache.base import EMPTY, KVCache
from kv_cache.entries import KV
from kv_cache.full import FullKVCache
from kv_cache.read_only import ReadOnlyKVCache
from kv_cache.snapkv import SnapKVCache
from kv_cache.streaming import StreamingKVCache
from kv_cache.write_through import WriteThroughKVCache

__all__ = [
    "EMPTY",
    "KV",
    "FullKVCache",
    "KVCache",
    "ReadOnlyKVCache",
    "SnapKVCache",
    "StreamingKVCache",
    "WriteThroughKVCache",
]
