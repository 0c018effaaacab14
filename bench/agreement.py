"""Facts that all ranks of a run need to have in common: configuration, versions and weights, by flag or by name."""

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch

from bench.plan import Plan
from bench.prefixes import code_sha256
from common.errors import flag
from common.process import rank, world_size
from common.provenance import package_version
from engine.drafters.config import DraftPlan
from engine.drafters.stored import Weights

# Files and folders: ranks compare only whether each is given, since paths differ between machines.
PATHS = {"model", "draft_model", "draft_of_draft", "draft_text", "markov_table", "prompts", "dataset"}
PATHS |= {"prefix_cache", "save_rows", "output", "path"}
# What may differ between machines, and names that come from paths.
LEFT_OUT = {"device", "name", "rank_timeout", "prefix_cache_gb"}
KIND = "kind"  # stands for the name of a class
CODE = ("common/*.py", "kv_cache/*.py", "models/**/*.*", "engine/**/*.py", "bench/**/*.py")
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
