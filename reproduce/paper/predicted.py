"""What the roofline predicts of every published number, from the machines' data sheets and how the kernels work."""

from dataclasses import replace

import numpy as np

from bench.auto.costs import tokens_per_round
from cost_model.machines import Machine, find_machine
from cost_model.roofline import ModelStorage, predict_costs
from models.presets import preset_config
from reproduce.paper.published import SELF, Record, draft_name, pairs_of, published, same_context, target_name

# The published system attends with FlashAttention-2, whose kernels over a cache have tiles of 64 rows, and put heads
# that share KV into one only where there is one token (csrc/flash_attn: kBlockM, seqlenq_ngroups_swapped).
FLASH_ATTENTION_2 = {"tile": 64, "packs_group": False}
GAMMAS = (1, 2, 3, 4, 5, 6)


def machine_of(fact: Record) -> Machine:
    """Of a published speedup; published ratios are of bytes and operations alone, and name no machine."""
    if "kind" in fact:
        return replace(find_machine("A100"), launch=0.0)
    return replace(find_machine("8xH100" if "8xH100" in fact["origin"] else "8xA100"), **FLASH_ATTENTION_2)


def predict(fact: Record, machine: Machine | None = None) -> float:
    """The speedup at the published gamma, or the best; or the ratio of a verification or draft step to a plain one."""
    target, draft = (
        ModelStorage(preset_config(published().checkpoint_names[name][0]))
        for name in (target_name(fact), target_name(fact) if draft_name(fact) == SELF else draft_name(fact))
    )
    sizes = fact["B"], fact["prefix_len"], fact["draft_budget"] or published().draft_budget
    costs = predict_costs(target, draft, machine or machine_of(fact), *sizes, GAMMAS)
    if "kind" in fact:
        return (costs.draft_ms if fact["kind"] == "draft" else costs.verify_ms[fact["gamma"] - 1]) / costs.plain_ms
    gammas, alpha = (fact["gamma"],) if fact["gamma"] else GAMMAS, alpha_of(fact)
    return max(costs.speedup(tokens_per_round(alpha, gamma), gamma) for gamma in gammas)


def is_acceptance_known(fact: Record) -> bool:
    """Whether it was published, of that pair of models and context."""
    known = pairs_of(published().acceptance).get((target_name(fact), draft_name(fact)), [])
    return any(same_context(one["prefix_len"], fact["prefix_len"]) for one in known)


def alpha_of(fact: Record) -> float:
    """The acceptance published for that context, of whatever pair, on straight lines between contexts."""
    by_context = sorted((one["prefix_len"], one["value"]) for one in published().acceptance)
    return float(np.interp(fact["prefix_len"], *zip(*by_context, strict=True)))


def halves(facts: list[Record]) -> tuple[list[Record], list[Record]]:
    """To fit and to test: every other setting, by machine, context and rows; numbers of one setting stay together."""
    settings = [("8xH100" in fact["origin"], fact["prefix_len"], fact["B"]) for fact in facts]
    order = sorted({*settings})
    fitted = [fact for fact, setting in zip(facts, settings, strict=True) if order.index(setting) % 2 == 0]
    return fitted, [fact for fact in facts if fact not in fitted]
