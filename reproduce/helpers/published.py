"""Numbers that the reference system published (published.json), and the roofline's prediction of each."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.auto.costs import tokens_per_round
from cost_model.machines import Machine, find_machine
from cost_model.published import ACCEPTANCE, LLAMA_3, same_context
from cost_model.roofline import ModelStorage, predict_costs
from models.checkpoints.presets import preset_config
from reproduce.helpers.records import Record

SELF = "self"
GAMMAS = (1, 2, 3, 4, 5, 6)
# The published system attends with FlashAttention-2, whose kernels over a cache have tiles of 64 rows, and put query
# heads that share KV into a tile only for blocks of a single token (csrc/flash_attn: kBlockM, seqlenq_ngroups_swapped).
FLASH_ATTENTION_2 = {"tile": 64, "packs_group": False}


@cache
def published() -> dict[str, Any]:
    """Return published.json. A published number is the `value` of a record, whose other keys are those of a run.

    speedup_tables, figure_6: speedups over plain decoding; `origin` is the table's machine, or the figure. ratios: a
    verification or a draft step (their `kind`) over a step of plain decoding. checkpoint_names: names of the published
    models' checkpoints."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def published_speedups() -> list[Record]:
    return [*published()["speedup_tables"], *published()["figure_6"]]


def published_rates() -> list[Record]:
    """Return the shares of verified positions that are accepted."""
    return [
        {"model": model, "draft_policy": policy, "draft_budget": budget, "prefix_len": context, "value": rate}
        for (model, policy, budget), by_context in ACCEPTANCE.items()
        for context, rate in by_context.items()
    ]


def target_name(record: Record) -> str:
    """Return the published name of the record's model, or the model's name if it is not a published model."""
    model = str(record.get("model"))
    name_of_file, names = model.rpartition("/")[2].casefold(), published()["checkpoint_names"].items()
    return next((name for name, known in names if name_of_file in map(str.casefold, (name, *known))), model)


def draft_name(record: Record) -> str:
    """Return the name of the draft model, "self", or the draft from text."""
    if record.get("draft_model"):
        return target_name({"model": record["draft_model"]})
    name = record.get("drafter") or record.get("draft") or SELF
    return SELF if name.startswith(SELF) else name


def find_fact(facts: Iterable[Record], record: Record) -> Record | None:
    """Return the published number of the record's models and setting, or None."""
    for fact in facts:
        given = [name for name in ("B", "gamma", "draft_budget", "draft_policy") if fact.get(name) is not None]
        is_pair = (target_name(fact), draft_name(fact)) == (target_name(record), draft_name(record))
        is_setting = all(record.get(name) == fact[name] for name in given)
        if is_pair and is_setting and same_context(record["prefix_len"], fact["prefix_len"]):
            return fact
    return None


def machine_of(fact: Record) -> Machine:
    """Return the machine of a published number. Published ratios count bytes and operations alone."""
    if "kind" in fact:
        return replace(find_machine("A100"), launch=0.0)
    return replace(find_machine("8xH100" if "8xH100" in fact["origin"] else "8xA100"), **FLASH_ATTENTION_2)


def predict(fact: Record) -> float:
    """Predict a published number from data sheets: a speedup at the published gamma, else at the best gamma; or the
    ratio of a verification or draft step to a plain step."""
    names = target_name(fact), target_name(fact) if draft_name(fact) == SELF else draft_name(fact)
    target, draft = (ModelStorage(preset_config(published()["checkpoint_names"][name][0])) for name in names)
    sizes = fact["B"], fact["prefix_len"], fact["draft_budget"] or published()["draft_budget"]
    costs = predict_costs(target, draft, machine_of(fact), *sizes, GAMMAS)
    if "kind" in fact:
        return (costs.draft_ms if fact["kind"] == "draft" else costs.verify_ms[fact["gamma"] - 1]) / costs.plain_ms
    gammas, alpha = (fact["gamma"],) if fact["gamma"] else GAMMAS, alpha_of(fact)
    return max(costs.speedup(tokens_per_round(alpha, gamma), gamma) for gamma in gammas)


def is_acceptance_known(fact: Record) -> bool:
    """Return whether acceptance was published for the models and the context of a published number."""
    return find_fact([rate | {"draft_policy": None} for rate in published_rates()], fact) is not None


def alpha_of(fact: Record) -> float:
    """Return the published acceptance of Llama-3.1-8B, interpolated between contexts, for any models."""
    contexts, rates = zip(*sorted(LLAMA_3.items()), strict=True)
    return float(np.interp(fact["prefix_len"], contexts, rates))
