"""The folder of prefilled prompts of a run (`--prefix_cache`)."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch

from bench.plan_types import Plan
from common.checkout import ROOT
from common.provenance import provenance
from common.say import say
from engine.prefix_store import PrefixStore
from engine.runner import prefill_chunk_of
from models import Transformer
from models.tensor_parallel import Shard

# The packages whose code decides the bits of a prefilled row.
CODE = ("kv_cache", "models")


def prefix_store(plan: Plan, model: Transformer, shard: Shard) -> PrefixStore | None:
    """Return the store of `--prefix_cache`, keyed by all that a row's bits depend on; None without the flag."""
    text, target = plan.config.text, plan.config.target
    if text.prefix_cache is None:
        return None
    weights = plan.target.manifest_sha256 if plan.target.has_text else "random"
    if weights is None:
        say("note: --prefix_cache is not used: the checkpoint has no manifest that would identify its weights")
        return None
    origin = provenance()
    machine = [origin[name] for name in ("machine", "gpu", "threads", "torch_version")]
    config = asdict(plan.target.config)
    storage = [str(plan.dtype), str(plan.kv_dtype), target.quantize, target.compile]
    kernels = [model.backend.name, model.pointwise.name, prefill_chunk_of(torch.device(plan.device))]
    parts = [weights, config, storage, kernels, [shard.index, shard.count], machine, code_sha256()]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return PrefixStore(Path(text.prefix_cache), key, int(text.prefix_cache_gb * 1e9))


def code_sha256() -> str:
    """Return a digest of the source files in CODE."""
    digest = hashlib.sha256()
    for path in sorted(
        path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp")
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()
