"""Makes the flags of drafts from the options of all drafters and policies, which their files define."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from docstring_parser import parse_from_object
from tyro.conf import arg

from bench.config import AUTO
from common.errors import ConfigError, flag
from common.say import note_without_effect
from engine.drafters.config import (
    DrafterConfig,
    HeadConfig,
    HostDrafterConfig,
    ModelDrafterConfig,
    drafters,
    require_gamma,
)
from engine.drafters.schedules import OF_SCHEDULES
from kv_cache.policy import BudgetedPolicy, policies

# A budget that means the policy `full`.
FULL_BUDGET = -1
DEFAULT_POLICY = "streaming"
# Fields of drafters that are made from other flags.
NO_OPTIONS = ("policy", "policies", "texts", "alternatives")
# Names of flags in MagicDec's scripts.
ALIASES = {"draft_budget": ["--streamingllm_budget"]}
PolicyName: Any = Literal[tuple(policies())]
TEXTS = {name: kind for name, kind in drafters().items() if issubclass(kind, HostDrafterConfig)}
TextName: Any = Literal[tuple(TEXTS)]
HEADS = [name for name, kind in drafters().items() if issubclass(kind, HeadConfig)]
BUDGETED = {name: kind for name, kind in policies().items() if issubclass(kind, BudgetedPolicy)}
BudgetedName: Any = Literal[tuple(BUDGETED)]
# Options without a flag in a program that runs several drafts and chooses these options itself.
CHOSEN = ("draft", "gamma", "draft_policy", "draft_budget", "draft_model", "draft_ranks", *OF_SCHEDULES)


@dataclass(frozen=True)
class DraftFlags:
    """The draft."""

    KINDS: ClassVar[Mapping[str, type[DrafterConfig]]]

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        return {name: value for name, value in vars(self).items() if value not in (None, ())}

    def config(self, **chosen: Any) -> DrafterConfig:
        """Return the configuration of the drafter. chosen: options that the program sets. Errors: ConfigError."""
        return self.variants(chosen)[0]

    def variants(self, *chosen: Mapping[str, Any]) -> list[DrafterConfig]:
        """Return a configuration for each mapping of options that the program sets, which override flags.

        A note names the flags that no drafter has an option for. Errors: ConfigError.
        """
        options = [_without_full_budget(self.given() | dict(each)) for each in chosen]
        configs = [_drafter_config(self.KINDS, each) for each in options]
        used = {"draft", *(name for config in configs for name in _used_options(config))}
        if unused := dict.fromkeys(name for each in options for name in each if name not in used):
            drafts = [vars(config).get("policy") for config in configs]
            kinds = [
                f"{config.name} by {policy.name}" if policy else config.name
                for config, policy in zip(configs, drafts, strict=True)
            ]
            note_without_effect(unused, f"not for draft {' and '.join(dict.fromkeys(kinds))}")
        for config in configs:
            config.check()
        return configs


def draft_flags(
    kinds: Collection[str] | None = None, *, without: Collection[str] = (), flags: Mapping[str, str] | None = None
) -> type[DraftFlags]:
    """Return a dataclass of flags for some drafters and for all policies.

    kinds: names of drafters; None for all that need no second model. without: options without a flag. flags: names of
    flags that differ from their option's.
    """
    every = drafters()
    chosen = {name: every[name] for name in kinds or [name for name, kind in every.items() if not _required(kind)]}
    has_model = any(issubclass(kind, ModelDrafterConfig) for kind in chosen.values())
    owners: dict[str, list[Any]] = {}
    for kind in dict.fromkeys([*chosen.values(), *([*policies().values(), *TEXTS.values()] if has_model else [])]):
        for option in fields(kind):  # type: ignore[arg-type]
            owners.setdefault(option.name, []).append(kind)
    specs: dict[str, tuple[Any, Any]] = {}
    if len(chosen) > 1:
        default = "self" if "self" in chosen else next(iter(chosen))
        specs["draft"] = Annotated[Literal[tuple(chosen)], arg(help=_listed(chosen))], default
    if has_model:
        says = f"what the cache keeps (default: {DEFAULT_POLICY}). {_listed(policies())}; "
        says += "auto, of a self-draft: whichever with a budget pays best, chosen while decoding"
        specs["draft_policy"] = Annotated[PolicyName | Literal["auto"] | None, arg(help=says)], None
        says = "drafters from text that stand in for a draft model where they find a long match"
        specs["text_drafts"] = Annotated[tuple[TextName, ...], arg(help=says)], ()
    if "gamma" not in without:
        says = "drafters that --gamma auto may take instead of the draft, in any round, if they pay more"
        specs["auto_drafts"] = Annotated[tuple[OtherName, ...], arg(help=says)], ()
    for name, kinds_with in owners.items():
        if name in NO_OPTIONS:
            continue
        first, hint = kinds_with[0], get_type_hints(kinds_with[0])[name]
        value = getattr(first, name, None)
        says = f"{_documented(first, name)} ({', '.join(kind.name for kind in kinds_with)}"
        says += ")" if value is None else f"; default: {value})"
        is_required = name in _required(first)
        markers = arg(help=says, name=(flags or {}).get(name), aliases=ALIASES.get(name), help_behavior_hint="")
        metadata = getattr(get_type_hints(first, include_extras=True)[name], "__metadata__", ())
        hint = Annotated[(hint if is_required else hint | None, markers, *metadata)]
        specs[name] = hint, MISSING if is_required else None
    made = [(name, *spec) if spec[1] is not MISSING else (name, spec[0]) for name, spec in specs.items()]
    namespace = {"KINDS": chosen, "__doc__": DraftFlags.__doc__}
    made = [spec for spec in made if spec[0] not in without]
    return make_dataclass("DraftFlags", made, bases=(DraftFlags,), namespace=namespace, frozen=True, kw_only=True)


def _drafter_config(kinds: Mapping[str, type[DrafterConfig]], given: Mapping[str, Any]) -> DrafterConfig:
    """Return the configuration of the drafter `given["draft"]`, or else the first, from the options that it has."""

    def made(kind: Any, **others: Any) -> Any:
        return kind(**{option.name: given[option.name] for option in fields(kind) if option.name in given} | others)

    kind = kinds[given.get("draft", next(iter(kinds)))]
    given = {"gamma": AUTO, **given} if given.get("gamma_schedule") == AUTO else given
    alone = {name: value for name, value in given.items() if name != "auto_drafts"}
    others = tuple(_drafter_config(OTHERS, alone | {"draft": name}) for name in given.get("auto_drafts", ()))
    if not issubclass(kind, ModelDrafterConfig):
        return made(kind, alternatives=others)
    name = given.get("draft_policy", DEFAULT_POLICY)
    # With auto, the first drafts until another policy pays more.
    several = tuple(map(made, sorted(BUDGETED.values(), key=lambda kind: kind.name != DEFAULT_POLICY))) * (name == AUTO)
    policy = several[0] if several else made(policies()[name])
    texts = tuple(made(TEXTS[text], gamma_schedule=None) for text in given.get("text_drafts", ()))
    return made(kind, policy=policy, policies=several, texts=texts, alternatives=others)


def _required(kind: type[DrafterConfig]) -> list[str]:
    """Return the options of a drafter that have no default."""
    options = [option for option in fields(kind) if option.default is MISSING]
    return [option.name for option in options if option.default_factory is MISSING]


def _used_options(config: DrafterConfig) -> list[str]:
    """Return the options that have an effect on a drafter."""
    if config.gamma == 0:
        return ["gamma", *_required(type(config))]
    used = [option.name for option in fields(config) if option.name not in config.unused]
    used += ["auto_drafts", *(name for other in config.alternatives for name in _used_options(other))]
    if not isinstance(config, ModelDrafterConfig):
        return used
    owners: list[Any] = [*(config.policies or [config.policy]), *config.texts]
    return ["draft_policy", "text_drafts", *(option.name for owner in owners for option in fields(owner)), *used]


def _without_full_budget(given: dict[str, Any]) -> dict[str, Any]:
    """Return options with the policy `full` for a budget of -1. Errors: ConfigError if another policy is named."""
    if given.get("draft_budget") != FULL_BUDGET:
        return given
    policy = flag("draft_policy")
    if (named := given.get("draft_policy", "full")) != "full":
        what, seen = f"a budget of {FULL_BUDGET} keeps everything", f"{FULL_BUDGET} with {policy} {named}"
        raise ConfigError(what, flag("draft_budget"), seen, "a number of entries", f"leave out {policy}")
    return {name: value for name, value in given.items() if name != "draft_budget"} | {"draft_policy": "full"}


def _documented(kind: type, name: str) -> str:
    """Return the text below a field's definition, in the class or in the base class that defines it."""
    owner = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))
    return _texts_below_fields(owner).get(name, "")


@cache
def _texts_below_fields(kind: type) -> dict[str, str]:
    params = parse_from_object(kind).params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def _listed(kinds: Mapping[str, type]) -> str:
    """Return names, each with the first line of its docstring."""
    first_lines = {name: (kind.__doc__ or "").strip().splitlines()[0].rstrip(".") for name, kind in kinds.items()}
    return "; ".join(f"{name}: {line[:1].lower()}{line[1:]}" for name, line in first_lines.items())


# Drafters that can take the place of another in any round.
OTHERS = {name: kind for name, kind in drafters().items() if not _required(kind) and not kind.needs_baseline}
OtherName: Any = Literal[tuple(OTHERS)]
# Drafters that need no other model's checkpoint.
ALONE: Mapping[str, type[DrafterConfig]] = draft_flags().KINDS
WITH_MODEL = [name for name in drafters() if name not in ALONE]
PATHS = ", ".join(f"{name}:PATH" for name in HEADS)
DRAFT: Any = arg(
    metavar="DRAFT",
    help=f"{', '.join(ALONE)}, or a smaller model's converted checkpoint, or a head: {PATHS}",
    help_behavior_hint="(default: self)",
)
EveryDraft: Any = draft_flags(drafters(), without=("draft", "draft_model", "draft_ranks"))


@dataclass(frozen=True, kw_only=True)
class NamedDraft(EveryDraft):
    """The draft."""

    LEAST_GAMMA: ClassVar[int] = 1

    draft: Annotated[str | None, DRAFT] = None

    def variants(self, *chosen: Mapping[str, Any]) -> Sequence[DrafterConfig]:
        named = _named(self.draft or "self")
        return super().variants(*(named | dict(each) for each in chosen))

    def config(self, **chosen: Any) -> DrafterConfig:
        """Return the configuration of the drafter. Errors: ConfigError, also for a gamma below LEAST_GAMMA."""
        if self.gamma is not None:
            require_gamma(self.gamma, self.LEAST_GAMMA)
        return super().config(**chosen)


def _named(name: str) -> dict[str, str]:
    """Return the options that a draft's name or path stands for. Errors: ConfigError for an unknown draft."""
    kind, _, path = name.partition(":")
    if path and kind in WITH_MODEL:
        return {"draft": kind, "draft_model": path}
    if name in ALONE:
        return {"draft": name}
    if os.path.exists(name):
        return {"draft": "standalone", "draft_model": name}
    required = f"{', '.join(ALONE)}, a converted checkpoint, or {PATHS}"
    raise ConfigError("there is no such draft", flag("draft"), name[:80], required, "check the spelling and the folder")
