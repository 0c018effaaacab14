"""Names of drafts, such as `suffix+eagle:HEAD=full@auto`, and the configurations that their options stand for.

A name is a kind, or a checkpoint, with drafts from text before it (`suffix+self`), its checkpoint after a colon
(`eagle:HEAD`), its policy after `=` (for a kind without a checkpoint also after the colon), and its gamma or schedule
after `@`. Flags, grids, sweeps and records use these names.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from common.errors import flag, refuse
from engine.drafters.combined import text_kinds
from engine.drafters.config import AUTO, DrafterConfig, Trait, drafters, wrappers
from kv_cache import Policy
from kv_cache.policy import BudgetedPolicy, policies

DEFAULT_POLICY = "streaming"
# A budget that means the policy `full`.
FULL_BUDGET = -1
NAME = re.compile(r"(?:([\w+]+)\+)?(\w+)(?::(.+?))?(?:=(\w+))?(?:@([1-9]\d*|constant|heuristic|confidence|auto))?")
BUDGETED = [name for name, kind in policies().items() if issubclass(kind, BudgetedPolicy)]


def required_options(kind: type[DrafterConfig]) -> list[str]:
    """Return the options of a kind of draft that have no default."""
    options = [option for option in fields(kind) if option.default is MISSING]
    return [option.name for option in options if option.default_factory is MISSING]


# Kinds that need no second model, and those that do.
ALONE = [name for name, kind in drafters().items() if Trait.SECOND_MODEL not in kind.TRAITS]
WITH_MODEL = [name for name in drafters() if name not in ALONE]
FORMS = f"{', '.join(ALONE)}, a converted checkpoint, or {', '.join(f'{name}:PATH' for name in WITH_MODEL)}"


def parse_draft(name: str, field: str = "draft", *, is_whole: bool = False) -> dict[str, Any]:
    """Return the options, by flag, of a draft with this name. field: the flag that names it. is_whole: True if no other
    flag can name its checkpoint. Errors: ConfigError."""
    model, _, checkpoint = name.partition(":")
    if model in WITH_MODEL and os.path.exists(checkpoint):  # whatever characters its path has
        return {"draft": model, "draft_model": checkpoint}
    match = NAME.fullmatch(name)
    before, kind, path, policy, length = match.groups(default="") if match else [""] * 5
    texts = tuple(filter(None, before.split("+")))
    if kind in ALONE and path and not policy:
        path, policy = "", path
    names = [option.name for option in fields(drafters()[kind])] if kind in drafters() else []
    is_known = bool(names) and policy in ("", AUTO, *policies()) and text_kinds().keys() >= {*texts}
    is_fitting = ("policy" in names or not (policy or texts)) and not (path and kind in ALONE)
    if not (is_known and is_fitting) or (is_whole and kind in WITH_MODEL and not path):
        if os.path.exists(name):
            return {"draft": "standalone", "draft_model": name}
        if "policy" in names and policy not in ("", AUTO):
            _known("draft_policy", policy, policies(), AUTO)
        near = [] if "+" in name else get_close_matches(model, [*ALONE, *WITH_MODEL], 1)
        fix = f"use {near[0]}{':PATH' * (near[0] in WITH_MODEL)}" if near else "check the spelling and the folder"
        refuse(field, name[:80], FORMS, "there is no such draft", fix)
    options: dict[str, Any] = {"draft": kind, "draft_model": path, "draft_policy": policy, "text_drafts": texts}
    options |= {"gamma": int(length)} if length.isdecimal() else {"gamma_schedule": length}
    options |= {"gamma": AUTO} if length == AUTO else {}
    return {option: value for option, value in options.items() if value not in ("", ())}


def written(options: Mapping[str, Any]) -> str:
    """Return the name of a draft with these options, by flag; `parse_draft` reads it."""
    texts = [f"{text}+" for text in options.get("text_drafts") or ()]
    parts = {":": options.get("draft_model"), "=": options.get("draft_policy"), "@": options.get("gamma")}
    schedule = options.get("gamma_schedule")
    parts["@"] = schedule if schedule not in (None, "constant") else parts["@"]
    return "".join([*texts, options["draft"], *(f"{mark}{part}" for mark, part in parts.items() if part)])


def drafts_of(given: Mapping[str, Any]) -> tuple[DrafterConfig, ...]:
    """Return the drafts to choose among that options, by flag, stand for: `draft`, and those of `auto_drafts`, each
    with every policy that has a budget if the policy is `auto`. A draft takes the options that it has. Errors:
    ConfigError."""
    given = {"gamma": AUTO, **given} if given.get("gamma_schedule") == AUTO else {**given}
    if given.get("draft_budget") == FULL_BUDGET:
        del given["draft_budget"]
        if (named := given.setdefault("draft_policy", "full")) != "full":
            policy, what = flag("draft_policy"), f"a budget of {FULL_BUDGET} keeps everything"
            refuse("draft_budget", f"-1 with {policy} {named}", "a number of entries", what, f"leave out {policy}")
    given |= parse_options(given.pop("draft_options", ()))
    kinds = [_known("draft", given["draft"], drafters())]
    others = {name: drafters()[name] for name in ALONE}
    kinds += [_known("auto_drafts", kind, others) for kind in given.get("auto_drafts", ())]
    names = [given.get("draft_policy", DEFAULT_POLICY)]
    if names == [AUTO]:
        if Trait.SECOND_MODEL in kinds[0].TRAITS:
            what = "a draft with a second model cannot change its cache, which would have to be prefilled again"
            refuse("draft_policy", AUTO, "a policy", what, "name it")
        names = sorted(BUDGETED, key=lambda name: name != DEFAULT_POLICY)  # the first until another pays more
    kept = [_known("draft_policy", name, policies(), AUTO) for name in names]
    return tuple(draft for kind in kinds for draft in dict.fromkeys(_draft(kind, policy, given) for policy in kept))


def _draft(kind: type[DrafterConfig], policy: type[Policy], given: Mapping[str, Any]) -> DrafterConfig:
    """Return the configuration of a kind, with wrappers. Errors: ConfigError for an option that is missing."""

    def made(kind: Any, **options: Any) -> Any:
        names = [option.name for option in fields(kind)]
        options = {name: given[name] for name in names if name in given} | options
        if "policy" in names:
            options["policy"] = made(policy)
        if missing := [name for name in required_options(kind) if name not in options]:
            refuse(missing[0], "nothing", "a value", f"{kind.name} needs {flag(missing[0])}", f"add {flag(missing[0])}")
        return kind(**options)

    draft: DrafterConfig = made(kind)
    for wrapper in wrappers():
        draft = wrapper.around(draft, given, made)
    return draft


def _known(field: str, name: str, kinds: Mapping[str, Any], *others: str) -> Any:
    """Return the kind of a name. others: values of the field that are no kinds. Errors: ConfigError for an unknown
    name."""
    if name not in kinds:
        likely = [*get_close_matches(name, [*kinds, *others], 1), "one of these"]
        refuse(field, name[:80], ", ".join([*kinds, *others]), f"{flag(field)} has no such value", f"use {likely[0]}")
    return kinds[name]


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the options of NAME=VALUE pairs. Errors: ConfigError for a name that no draft, policy or wrapper has."""
    kinds: list[Any] = [*drafters().values(), *policies().values(), *wrappers()]
    known = {option.name for kind in kinds for option in fields(kind)} - {"policy", "draft"}
    parsed = dict[str, Any]()
    for pair in pairs:
        name, is_pair, value = pair.partition("=")
        if not is_pair or name not in known:
            near = [*get_close_matches(name, sorted(known), 1), "NAME"]
            required = "NAME=VALUE, with an option of a draft or policy (see --help)"
            what, fix = "no draft or policy has this option", f"use {near[0]}=VALUE"
            refuse("draft_options", pair[:80], required, what, fix)
        parsed[name] = parse_value(value)
    return parsed


def parse_value(text: str) -> Any:
    """Return a value as TOML reads it (0.5, true, [64, 128], "quoted"), or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
