"""KV caches: one protocol, one visibility rule, one policy per file."""

from kv_cache.base import KVCache
from kv_cache.full import FullKVCache
from kv_cache.policy import Policy
from kv_cache.streaming import StreamingKVCache
from kv_cache.views import ReadOnlyKVCache, WriteThroughKVCache
