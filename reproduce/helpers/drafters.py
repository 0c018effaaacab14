"""Drafters on a command line, by name, budget and gamma."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from bench.config import AUTO
from bench.draft_flags import DraftNumbers
from bench.draft_names import ALONE, parse_draft, required_options
from common.errors import refuse, require_at_least
from common.say import note_without_effect
from engine.drafters.config import DrafterConfig, Trait, drafters


def named_configs(
    names: Sequence[str] | None,
    draft: DraftNumbers,
    budgets: Sequence[int | str],
    gammas: Sequence[int | str],
    repeats_plain: bool,
) -> list[tuple[str, tuple[DrafterConfig, ...]]]:
    """Return every drafter with its name, once for each budget and gamma that it can have, and after it the drafts that
    rounds may take instead.

    names: None for all that need no second model. draft: options of all drafters. repeats_plain: False if drafts decode
    other tokens than plain decoding. Errors: ConfigError.
    """
    given = draft.given()
    able = {name: drafters()[name] for name in ALONE if given.keys() >= {*required_options(drafters()[name])}}
    usual = [name for name, kind in able.items() if repeats_plain or Trait.NEEDS_BASELINE not in kind.TRAITS]
    chosen = [(name, parse_draft(name, "drafters", is_whole=True)) for name in names or usual]
    models = {options["draft_model"]: name for name, options in chosen if "draft_model" in options}
    if len(models) > 1:
        fix, what = "run the other model by itself, into the same file", "a session holds a single draft model"
        refuse("drafters", " ".join(models.values()), "a single checkpoint", what, fix)
    found = []
    for (name, options), budget, gamma in product(chosen, budgets or [None], gammas or [None]):
        varied = {"draft_budget": budget, "gamma": gamma}
        found.append((name, given | {key: value for key, value in varied.items() if value is not None} | options))

    def chooses(options: Mapping[str, Any]) -> bool:
        return AUTO in (options.get("gamma"), options.get("gamma_schedule"))

    if any(chooses(options) for _, options in found):
        # A budget that is chosen while decoding goes with a gamma that is.
        found = [pair for pair in found if pair[1].get("draft_budget") != AUTO or chooses(pair[1])]
    elif "auto_drafts" in given:
        note_without_effect(["auto_drafts"], "no drafter chooses its gamma")
    fixed = {"auto_drafts": ()}
    configs = draft.choices(*(options if chooses(options) else options | fixed for _, options in found))
    require_at_least("gamma", min(first.most_gamma for first, *_ in configs), 1)
    # A drafter without a budget is there once.
    return [*dict.fromkeys(zip((name for name, _ in found), configs, strict=True))]
