"""Facts that the ranks of a run, or a run and its cached prompts, have in common: configuration, versions, weights."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from bench.plan import Plan
from common.checkout import ROOT
from common.errors import flag
from common.process import rank, world_size
from common.provenance import package_version, provenance
from engine.drafters.config import DraftPlan
from engine.drafters.stored import Weights
from engine.prefix_store import PrefixStore
from engine.runner import prefill_chunk_of
from models import Transformer
from models.kernels.build import KERNELS, BuildError, choose
from models.kernels.build import PACKAGES as WITH_KERNELS
from models.tensor_parallel import ModelRanks

# Files and folders: ranks compare only whether each is given, since paths differ between machines.
PATHS = {"model", "draft_model", "draft_of_draft", "draft_text", "markov_table", "prompts", "dataset"}
PATHS |= {"prefix_cache", "save_rows", "output", "path"}
# What may differ between machines, and names that come from paths.
LEFT_OUT = {"device", "name", "rank_timeout", "prefix_cache_gb"}
KIND = "kind"  # stands for the name of a class
CODE = ("common/*.py", "kv_cache/*.py", "models/**/*.*", "engine/**/*.py", "bench/**/*.py")
# The source files that decide the bits of a prefilled row.
ROW_CODE = (
    *("models/**/*.*", "kv_cache/base.py", "kv_cache/entries.py", "kv_cache/full.py"),
    *("engine/runner.py", "engine/parallel/*.py", "engine/prefix_store.py"),
)
PACKAGES = ("torch", "numpy", "triton")


def common_facts(plan: Plan, options: object = None) -> dict[str, str | None]:
    """Return what has to be the same on all ranks of a run, by name; None: the weights of a draft that this rank does
    not hold. options: a dataclass of further options."""
    found: dict[str, str | None] = {}
    models = {draft.source: draft.group for draft in plan.candidates if draft.source is not None}
    named = {"target_source": plan.target.source} | {f"draft_source.{n}": source for n, source in enumerate(models)}
    sources = [_flat(source, f"{name}.") for name, source in named.items()]
    for path, value in chain(_flat(plan), _flat(options, "config."), *sources):
        *_, last = path.split(".")
        name = flag(last) if path.startswith("config.") and last != KIND else path
        found[path if name in found else name] = value  # texts and alternatives have options of the draft's names
    found["device"] = torch.device(plan.target.device).type
    found |= {package: package_version(package) or "none" for package in PACKAGES}
    found["the project's code"] = code_sha256(CODE)[:16]
    found["ENABLE_INTRA_NODE_COMM"] = os.environ.get("ENABLE_INTRA_NODE_COMM", "1")
    found["end tokens"] = str(plan.target.source.end_tokens)
    whole = plan.config.ranks is not None and plan.config.ranks.check_ranks
    found["the target's weights"] = plan.target.source.digest(whole)
    for number, (source, group) in enumerate(models.items(), 1):
        holds = rank() % (world_size() // plan.config.n_replicas) in group
        name = "the draft's weights" if number == 1 else f"the weights of draft model {number}"
        found[name] = source.digest(whole) if holds else None
    return found


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested dataclasses, as texts, and the dataclasses' names, by their paths."""
    if is_dataclass(value):
        yield f"{path}{KIND}", type(value).__name__
        # A draft's options are the configuration's, and models are facts of their own.
        repeated = {"config", "source"} if isinstance(value, DraftPlan | Weights) else set()
        for name in (part.name for part in fields(value) if part.name not in LEFT_OUT | repeated):
            leaf = getattr(value, name)
            yield from _flat("given" if name in PATHS and leaf else leaf, f"{path}{name}.")
    elif isinstance(value, tuple) and any(map(is_dataclass, value)):
        for number, part in enumerate(value):
            yield from _flat(part, f"{path}{number}.")
    elif not callable(value):
        yield path.rstrip("."), str(value)


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
    key = json.dumps([*parts, builds(), code_sha256(ROW_CODE)])
    digest = hashlib.sha256(key.encode()).hexdigest()
    return PrefixStore(Path(folder), digest, int(plan.config.text.prefix_cache_gb * 1e9))


def builds() -> list[str | None]:
    """Return the builds of the C++ kernels, and the versions of packages with kernels; None for what is missing."""
    found: list[str | None] = []
    for name in (name for name, kernel in KERNELS.items() if kernel.source):
        with suppress(BuildError):
            found.append(choose(name).build)
    return found + list(map(package_version, WITH_KERNELS))


def code_sha256(patterns: Sequence[str]) -> str:
    """Return a digest of the project's source files that match patterns."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        if path.suffix in (".py", ".cpp", ".hpp"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
