"""Flags of what drafts: those of every drafter and every policy, each of which owns its options in its own file."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from docstring_parser import parse_from_object
from tyro.conf import arg

from bench.config import AUTO
from common.errors import ConfigError, flag
from common.flags import COMMON
from common.say import note_without_effect
from engine.drafters.config import DrafterConfig, HostDrafterConfig, ModelDrafterConfig, drafters
from engine.drafters.schedules import OF_SCHEDULES
from kv_cache.policy import BudgetedPolicy, policies

FULL_BUDGET = -1
DEFAULT_POLICY = "streaming"
# Fields of drafters that are no options.
NO_OPTIONS = ("policy", "policies", "texts")
# The name that the paper's scripts have for it.
ALIASES = {"draft_budget": ["--streamingllm_budget"]}
PolicyName: Any = Literal[tuple(policies())]
TEXTS = {name: kind for name, kind in drafters().items() if issubclass(kind, HostDrafterConfig)}
TextName: Any = Literal[tuple(TEXTS)]
BudgetedName: Any = Literal[tuple(name for name, kind in policies().items() if issubclass(kind, BudgetedPolicy))]
# What programs choose by themselves that go through several drafts.
CHOSEN = ("draft", "gamma", "draft_policy", "draft_budget", "draft_model", "draft_ranks", *OF_SCHEDULES)


@dataclass(frozen=True)
class DraftFlags:
    """What drafts, and how."""

    KINDS: ClassVar[Mapping[str, type[DrafterConfig]]]

    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        return {name: value for name, value in vars(self).items() if value not in (None, ())}

    def config(self, **chosen: Any) -> DrafterConfig:
        """The drafter's options. chosen: what a program chooses in place of flags. Errors: as of `variants`."""
        return self.variants(chosen)[0]

    def variants(self, *each: Mapping[str, Any]) -> list[DrafterConfig]:
        """Several drafts, with what a program chooses for each in place of flags: an option is given to those that have
        it, and one that none has is noted. Errors: ConfigError for those that do not go together."""
        options = [_without_full_budget(self.given() | dict(chosen)) for chosen in each]
        configs = [_drafter_config(self.KINDS, one) for one in options]
        taken = {"draft", *(name for config in configs for name in _options(config))}
        if useless := dict.fromkeys(name for one in options for name in one if name not in taken):
            note_without_effect(useless, f"not for draft {' and '.join(dict.fromkeys(map(_called, configs)))}")
        for config in configs:
            config.check()
        return configs


def draft_flags(
    kinds: Collection[str] | None = None, *, without: Collection[str] = (), flags: Mapping[str, str] | None = None
) -> type[DraftFlags]:
    """A dataclass of the flags of those drafters (all that need no second model, if None) and of all policies. without:
    options that a program has no flag for. flags: what it calls others, by their name."""
    every = drafters()
    chosen = {name: every[name] for name in kinds or every if kinds or not _required(every[name])}
    kept = policies() if any(issubclass(kind, ModelDrafterConfig) for kind in chosen.values()) else {}
    owners: dict[str, list[Any]] = {}
    beside = [kind for name, kind in TEXTS.items() if kept and name not in chosen]
    kinds_of_options: list[Any] = [*chosen.values(), *kept.values(), *beside]
    for kind in kinds_of_options:
        for option in fields(kind):
            if option.name not in NO_OPTIONS:
                owners.setdefault(option.name, []).append(kind)
    specs: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    if len(chosen) > 1:
        first = "self" if "self" in chosen else next(iter(chosen))
        specs.append(("draft", Annotated[Literal[tuple(chosen)], arg(help=_listed(chosen)), COMMON], first))
    if kept:
        chooses = f"{AUTO}, of a self-draft: whichever with a budget pays best, chosen while decoding"
        hint = f"(default: {DEFAULT_POLICY})"
        says = arg(help=f"what the cache keeps. {_listed(kept)}; {chooses}", help_behavior_hint=hint)
        specs.append(("draft_policy", Annotated[PolicyName | Literal["auto"] | None, says, COMMON], None))
        says = arg(help="what guesses beside a draft model, where it is sure", help_behavior_hint="(default: none)")
        specs.append(("text_drafts", Annotated[tuple[TextName, ...], says], ()))
    for name, (owner, *others) in owners.items():
        of_all = {owner, *others} >= set(chosen.values()) or (others and issubclass(owner, BudgetedPolicy))
        hint, marked = (get_type_hints(owner, include_extras=extras)[name] for extras in (False, True))
        says = arg(
            help=("" if of_all else f"{', '.join(one.name for one in (owner, *others))}: ") + _documented(owner, name),
            name=(flags or {}).get(name),
            aliases=ALIASES.get(name),
            help_behavior_hint=_defaults(name, (owner, *others)),
        )
        is_required = name in _required(owner)
        taken: Any = Annotated[(hint if is_required else hint | None, says, *getattr(marked, "__metadata__", ()))]
        specs.append((name, taken) if is_required else (name, taken, None))
    made = [spec for spec in specs if spec[0] not in without]
    own = {"KINDS": chosen, "__doc__": DraftFlags.__doc__}
    return make_dataclass("DraftFlags", made, bases=(DraftFlags,), namespace=own, frozen=True, kw_only=True)


def _drafter_config(kinds: Mapping[str, type[DrafterConfig]], given: Mapping[str, Any]) -> DrafterConfig:
    """The drafter that `given["draft"]` names, or the first, and its policy, with those of the options that it has."""

    def own(kind: Any) -> dict[str, Any]:
        return {one.name: given[one.name] for one in fields(kind) if one.name in given}

    kind = kinds[given.get("draft", next(iter(kinds)))]
    given = {"gamma": "auto", **given} if given.get("gamma_schedule") == "auto" else given
    if not issubclass(kind, ModelDrafterConfig):
        return kind(**own(kind))
    name = given.get("draft_policy", DEFAULT_POLICY)
    budgeted = [one for one in policies().values() if issubclass(one, BudgetedPolicy)]
    budgeted.sort(key=lambda one: one.name != DEFAULT_POLICY)  # the first drafts until another pays more
    several = tuple(one(**own(one)) for one in budgeted) if name == AUTO else ()
    policy = several[0] if several else policies()[name](**own(policies()[name]))
    # How far rows draft is told of the model.
    texts = tuple(TEXTS[name](**own(TEXTS[name]) | {"gamma_schedule": None}) for name in given.get("text_drafts", ()))
    return kind(**own(kind), policy=policy, policies=several, texts=texts)


def _defaults(name: str, owners: Sequence[type[Any]]) -> str:
    """An option's default, or those of its owners where they differ."""
    values = {one.name: getattr(one, name, None) for one in owners}
    default, *others = dict.fromkeys(values.values())
    if others:
        return f"(default: {', '.join(f'{value} for {owner}' for owner, value in values.items())})"
    return "" if default is None else f"(default: {default})"


def _required(kind: type[DrafterConfig]) -> list[str]:
    """The options of a drafter that have to be given."""
    return [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]


def _options(config: DrafterConfig) -> list[str]:
    """What has an effect on that drafter with that policy."""
    if config.gamma == 0:
        return ["gamma", *_required(type(config))]
    unused = {*NO_OPTIONS, *config.unused}
    own = [one.name for one in fields(config) if one.name not in unused]
    if not isinstance(config, ModelDrafterConfig):
        return own
    owners: list[Any] = [*(config.policies or [config.policy]), *config.texts]
    return ["draft_policy", "text_drafts", *(one.name for owner in owners for one in fields(owner)), *own]


def _called(config: DrafterConfig) -> str:
    policy = ""
    if isinstance(config, ModelDrafterConfig):
        policy = f", {AUTO if config.policies else config.policy.name}"
    return config.name + policy + (", gamma 0" if config.gamma == 0 else "")


def _without_full_budget(given: dict[str, Any]) -> dict[str, Any]:
    """A budget of -1 is the policy that keeps everything. Errors: ConfigError beside another policy."""
    if given.get("draft_budget") != FULL_BUDGET:
        return given
    named, policy = given.get("draft_policy"), flag("draft_policy")
    if named not in (None, "full"):
        what, where = f"a budget of {FULL_BUDGET} keeps everything", f"{flag('draft_budget')} (--streamingllm_budget)"
        seen, required = f"{FULL_BUDGET} with {policy} {named}", f"a budget of entries, or {policy} full"
        raise ConfigError(what, where, seen, required, f"leave out {policy}")
    return {name: value for name, value in given.items() if name != "draft_budget"} | {"draft_policy": "full"}


def _documented(kind: type, name: str) -> str:
    """The text below a field's definition, in the class or one that it is derived from."""
    owner = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))
    return _said_below(owner).get(name, "")


@cache
def _said_below(kind: type) -> dict[str, str]:
    """The same of all fields that the class itself defines. Kept: reading a class's source takes a while."""
    return {one.arg_name: " ".join((one.description or "").split()) for one in parse_from_object(kind).params}


def _listed(kinds: Mapping[str, type]) -> str:
    """Each with the first line of what it is."""
    says = {name: (kind.__doc__ or "").strip().splitlines()[0].rstrip(".") for name, kind in kinds.items()}
    return "; ".join(f"{name}: {text[:1].lower()}{text[1:]}" for name, text in says.items())
