"""The folder of prefilled prompts of a run (`--prefix_cache`)."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from bench.plan import Plan
from common.checkout import ROOT
from common.provenance import package_version, provenance
from engine.prefix_store import PrefixStore
from engine.runner import prefill_chunk_of
from models import Transformer
from models.kernels.build import KERNELS, PACKAGES, BuildError, choose
from models.tensor_parallel import ModelRanks

# The source files that decide the bits of a prefilled row.
CODE = (
    *("models/**/*.*", "kv_cache/base.py", "kv_cache/entries.py", "kv_cache/full.py"),
    *("engine/runner.py", "engine/parallel/*.py", "engine/prefix_store.py"),
)


def prefix_store(folder: str, plan: Plan, model: Transformer, ranks: ModelRanks) -> PrefixStore:
    """Return the store of prefilled prompts in a folder, keyed by all that a row's bits depend on."""
    target = plan.config.target
    origin = provenance()
    machine = [origin[name] for name in ("machine", "gpu", "threads", "torch_version")]
    storage = [str(plan.target.weights.dtype), str(plan.target.kv_dtype), target.quantize, target.compile]
    kernels = [model.backend.name, model.pointwise.name, prefill_chunk_of(torch.device(plan.target.device))]
    shard = [ranks.shard.index, ranks.shard.count, ranks.backend]
    source = plan.target.source
    parts = [source.digest(whole=False), asdict(source.config), storage, kernels, shard, machine]
    key = json.dumps([*parts, builds(), code_sha256()])
    digest = hashlib.sha256(key.encode()).hexdigest()
    return PrefixStore(Path(folder), digest, int(plan.config.text.prefix_cache_gb * 1e9))


def builds() -> list[str | None]:
    """Return the builds of the C++ kernels, and the versions of packages with kernels; None for what is missing."""
    found: list[str | None] = []
    for name in (name for name, kernel in KERNELS.items() if kernel.source):
        with suppress(BuildError):
            found.append(choose(name).build)
    return found + list(map(package_version, PACKAGES))


def code_sha256(patterns: Sequence[str] = CODE) -> str:
    """Return a digest of the project's source files that match patterns."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        if path.suffix in (".py", ".cpp", ".hpp"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
