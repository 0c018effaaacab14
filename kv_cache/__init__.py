"""KV caches: one protocol, one visibility rule, one policy per file."""

from kv_cache.base import EMPTY, KVCache
from kv_cache.entries import KV
from kv_cache.full import Full, FullKVCache
from kv_cache.policy import BudgetedPolicy, Policy, policies
from kv_cache.quantized import Quantized, QuantizedKVCache
from kv_cache.retrieval import Retrieval, RetrievalKVCache
from kv_cache.scored import ScoredKVCache, ScoredPolicy
from kv_cache.snapkv import SnapKV
from kv_cache.streaming import Streaming, StreamingKVCache
from kv_cache.verify_topk import VerificationScores, VerifyTopK, VerifyTopKCache
from kv_cache.views import ReadOnlyKVCache, WriteThroughKVCache
