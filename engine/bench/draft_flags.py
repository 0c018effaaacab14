"""Flags of what drafts: those of every drafter and every policy, each of which owns its options in its own file."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from tyro.conf import arg

from common.errors import ConfigError, flag
from engine.drafters.config import DrafterConfig, ModelDrafterConfig, drafters
from kv_cache.policy import BudgetedPolicy, policies

FULL_BUDGET = -1
DEFAULT_POLICY = "streaming"
# The name that the paper's scripts have for it.
ALIASES = {"draft_budget": ["--streamingllm_budget"]}
PolicyName: Any = Literal[tuple(policies())]
BudgetedName: Any = Literal[tuple(name for name, kind in policies().items() if issubclass(kind, BudgetedPolicy))]
# What programs choose by themselves that go through several drafts.
CHOSEN = ("draft", "gamma", "draft_policy", "draft_budget", "draft_model", "draft_ranks")


@dataclass(frozen=True)
class DraftFlags:
    """What drafts, and how."""

    KINDS: ClassVar[Mapping[str, type[DrafterConfig]]]

    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in own.items() if value is not None}

    def config(self, **chosen: Any) -> DrafterConfig:
        """The drafter's options. chosen: what a program chooses in place of a flag.

        Errors: ConfigError for options without effect on that drafter and policy, or that do not go together.
        """
        config = drafter_config(self.KINDS, self.given() | chosen)
        config.check()
        return config

    def variants(self, *each: Mapping[str, Any]) -> list[DrafterConfig]:
        """Several drafts that a program goes through, with what it chooses for each in place of flags: an option is
        given to those that have it. Errors: ConfigError for one that none has.
        """
        options = [_without_full_budget({**self.given(), **chosen}) for chosen in each]
        configs = [drafter_config(self.KINDS, one, strict=False) for one in options]
        every = {name: value for one in options for name, value in one.items()}
        known = every.keys() | {one.name for one in fields(self)}
        allowed = {name for config in configs for name in _options(config) if config.gamma != 0} & known
        allowed |= {"draft", "gamma", *(name for config in configs for name in required(type(config)))}
        if useless := [name for name in every if name not in allowed]:
            _refuse(useless, every, configs, sorted(allowed & known - {"draft"}))
        for config in configs:
            config.check()
        return configs


def draft_flags(
    kinds: Collection[str] | None = None, *, without: Collection[str] = (), flags: Mapping[str, str] | None = None
) -> type[DraftFlags]:
    """A dataclass of the flags of those drafters (all that need no second model, if None) and of all policies.

    without: options that a program has no flag for. flags: what it calls others, by their name.
    """
    every = drafters()
    chosen = {name: every[name] for name in kinds or every if kinds or not required(every[name])}
    owners: dict[str, list[type]] = {}
    of_models = [kind for kind in chosen.values() if issubclass(kind, ModelDrafterConfig)]
    for kind in (*chosen.values(), *(policies().values() if of_models else ())):
        for option in fields(kind):
            owners.setdefault(option.name, []).append(kind)
    owners.pop("policy", None)
    specs: list[tuple[str, Any, Any]] = []
    if len(chosen) > 1:
        says = "; ".join(f"{name}: {_first_line(kind)}" for name, kind in chosen.items())
        names: Any = Literal[tuple(chosen)]
        specs.append(("draft", Annotated[names, arg(help=says)], field(default="self")))
    if of_models:
        says = "; ".join(f"{name}: {_first_line(kind)}" for name, kind in policies().items())
        kept: Any = Annotated[
            PolicyName | None,
            arg(help=f"what the cache keeps. {says}", help_behavior_hint=f"(default: {DEFAULT_POLICY})"),
        ]
        specs.append(("draft_policy", kept, field(default=None)))
    specs += [
        _spec(name, of, every_kind=set(of) >= set(chosen.values()), names=flags or {})
        for name, of in sorted(owners.items(), key=lambda item: item[0] != "gamma")
    ]
    made = [spec for spec in specs if spec[0] not in without]
    return make_dataclass(
        "DraftFlags",
        made,
        bases=(DraftFlags,),
        namespace={"KINDS": chosen, "__doc__": DraftFlags.__doc__},
        frozen=True,
        kw_only=True,
    )


def required(kind: type[DrafterConfig]) -> list[str]:
    """The options of a drafter that have to be given."""
    return [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]


def drafter_config(
    kinds: Mapping[str, type[DrafterConfig]], options: Mapping[str, Any], strict: bool = True
) -> DrafterConfig:
    """The options of the drafter that `options["draft"]` names, and of its policy.

    Errors: ConfigError for what has no effect on it, where `strict`.
    """
    given = _without_full_budget(options)
    kind = kinds[given.pop("draft", next(iter(kinds)))]
    own = {one.name: given[one.name] for one in fields(kind) if one.name in given}
    if issubclass(kind, ModelDrafterConfig):
        policy = policies()[given.get("draft_policy") or DEFAULT_POLICY]
        own["policy"] = policy(**{one.name: given[one.name] for one in fields(policy) if one.name in given})
    config = kind(**own)
    allowed = _options(config)
    needed = {"gamma", *required(kind)}
    useless = [name for name in given if name not in allowed or (config.gamma == 0 and name not in needed)]
    if strict and useless:
        _refuse(useless, given, [config], allowed)
    return config


def _options(config: DrafterConfig) -> list[str]:
    """What has an effect on that drafter with that policy."""
    own = [one.name for one in fields(config) if one.name != "policy"]
    if not isinstance(config, ModelDrafterConfig):
        return own
    return ["draft_policy", *(one.name for one in fields(config.policy)), *own]


def _called(config: DrafterConfig) -> str:
    policy = f", {config.policy.name}" if isinstance(config, ModelDrafterConfig) else ""
    return config.name + policy + (", gamma 0" if config.gamma == 0 else "")


def _without_full_budget(options: Mapping[str, Any]) -> dict[str, Any]:
    """A budget of -1 is the policy that keeps everything. Errors: ConfigError beside another policy."""
    given = dict(options)
    if given.get("draft_budget") != FULL_BUDGET:
        return given
    named = given.get("draft_policy")
    if named not in (None, "full"):
        raise ConfigError(
            f"a budget of {FULL_BUDGET} keeps everything",
            where=f"{flag('draft_budget')} (--streamingllm_budget)",
            seen=f"{FULL_BUDGET} with {flag('draft_policy')} {named}",
            required=f"a budget of entries, or {flag('draft_policy')} full",
            fix=f"leave out {flag('draft_policy')}",
        )
    del given["draft_budget"]
    return given | {"draft_policy": "full"}


def _refuse(
    useless: Sequence[str], given: Mapping[str, Any], configs: Sequence[DrafterConfig], allowed: Sequence[str]
) -> None:
    draft = " and ".join(dict.fromkeys(map(_called, configs)))
    takes = f"draft {draft} takes only {', '.join(map(flag, allowed))}"
    nothing_is_drafted = all(config.gamma == 0 for config in configs)
    raise ConfigError(
        "a draft flag has no effect on this draft",
        where=", ".join(map(_with_aliases, useless)),
        seen=f"{', '.join(str(given[name]) for name in useless)} with draft {draft}",
        required=f"a larger {flag('gamma')}: nothing is drafted" if nothing_is_drafted else takes,
        fix=f"leave out {' and '.join(map(flag, useless))}",
    )


def _with_aliases(name: str) -> str:
    """The flag, and its other names: whichever the user typed."""
    return flag(name) + "".join(f" ({alias})" for alias in ALIASES.get(name, ()))


def _spec(name: str, owners: list[type], every_kind: bool, names: Mapping[str, str]) -> tuple[str, Any, Any]:
    """A field that is None unless it is given, or required where its owner has no default."""
    owner = owners[0]
    option = next(one for one in fields(owner) if one.name == name)
    hint = get_type_hints(owner)[name]
    default = option.default
    whose = "" if every_kind or (issubclass(owner, BudgetedPolicy) and len(owners) > 1) else f"{owner.name}: "  # type: ignore[attr-defined]
    known = f"(default: {default})" if default not in (None, MISSING) else ""
    how = arg(
        help=whose + documented(owner, name), name=names.get(name), aliases=ALIASES.get(name), help_behavior_hint=known
    )
    if default is MISSING and option.default_factory is MISSING:
        return name, Annotated[hint, how], field()
    return name, Annotated[hint | None, how], field(default=None)


def documented(kind: type, name: str) -> str:
    """The text below a field's definition, in the class or one that it is derived from."""
    for base in kind.__mro__:
        if name in vars(base).get("__annotations__", {}):
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for line, below in pairwise(definition.body):
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == name:
                    text = below.value if isinstance(below, ast.Expr) else None
                    return " ".join(str(text.value).split()) if isinstance(text, ast.Constant) else ""
    return ""


def _first_line(kind: type) -> str:
    text = (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")
    return text[:1].lower() + text[1:]
