"""Flags of drafts: one for every option of the drafts, policies and wrappers that there are."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, get_type_hints

from docstring_parser import parse_from_object
from tyro.conf import arg

from bench.draft_names import (
    DEFAULT_POLICY,
    FORMS,
    FULL_BUDGET,
    PARTS,
    drafts_of,
    kinds_with_options,
    parse_draft,
    parse_options,
    required_options,
)
from common.errors import refuse
from common.say import note_without_effect
from engine.drafters.combined import text_kinds
from engine.drafters.config import DrafterConfig
from kv_cache.policy import policies

# Other names, those of MagicDec's scripts.
ALIASES = {"draft_budget": ["--streamingllm_budget"], "snapkv_window": ["--window_size"]}
ALIASES |= {"draft_ranks": ["--draft_rank_group"]}
POLICY: Any = arg(
    help_behavior_hint="",
    help=f"what the cache keeps (default: {DEFAULT_POLICY}): {', '.join(policies())}; auto, of a self-draft: whichever "
    "with a budget pays best, chosen while decoding",
)
DRAFT: Any = arg(help_behavior_hint="", metavar="DRAFT", help=f"{FORMS}; with others in its name: suffix+self=snapkv@3")
TEXTS: Any = arg(
    help=f"drafts from text that stand in for a draft model where they find a long match: {', '.join(text_kinds())}"
)


def _flags() -> list[tuple[str, Any, None]]:
    """Return the name, type and default of a flag for each option: None, which leaves the default to the option's kind.
    Help is the docstring of its field, between the names of the kinds that have it and their defaults."""
    kinds, flags = kinds_with_options(), list[tuple[str, Any, None]]()
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if is_dataclass(base))
    texts = {each.arg_name: each.description for base in reversed(bases) for each in parse_from_object(base).params}
    for name in dict.fromkeys(option.name for kind in kinds for option in fields(kind)):
        if name in (*PARTS, "draft_model"):  # a flag of some programs only
            continue
        having = [kind for kind in kinds if name in kind.__dataclass_fields__]
        of_all = name in DrafterConfig.__dataclass_fields__
        named = [each.name for each in having if hasattr(each, "name") and not of_all]
        defaults = dict.fromkeys(each.__dataclass_fields__[name].default for each in having)
        known = [str(default) for default in defaults if default not in (None, MISSING)]
        text = ": ".join(filter(None, [", ".join(named), " ".join((texts.get(name) or "").split())]))
        hint = f"(default: {' or '.join(known)})" if known else ""
        how = arg(help=text, help_behavior_hint=hint, aliases=ALIASES.get(name))
        flags.append((name, Annotated[get_type_hints(having[0])[name] | None, how], None))
    return flags


OPTIONS: Any = make_dataclass("OPTIONS", _flags(), frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class DraftNumbers(OPTIONS):
    """The draft."""

    DEFAULT: ClassVar[str] = "self"

    draft_policy: Annotated[str | None, POLICY] = None
    text_drafts: Annotated[tuple[str, ...], TEXTS] = ()
    auto_drafts: tuple[str, ...] = ()
    """drafts that --gamma auto may take instead of the draft, in any round, if they pay more: self, or from text"""
    draft_options: tuple[str, ...] = ()
    """NAME=VALUE ...: options of drafts and policies, in the place of their flags"""

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by flag. Errors: ConfigError for an unknown one."""
        given = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return given | parse_options(given.pop("draft_options", ()))

    def config(self, **chosen: Any) -> DrafterConfig:
        """Return the configuration of the draft. chosen: options that the program sets. Errors: ConfigError, also for
        several drafts to choose among."""
        (drafts,) = self.choices(chosen)
        if len(drafts) > 1:
            names = " or ".join(dict.fromkeys(draft.kind for draft in drafts))
            refuse("draft", names, "one draft with one policy", "this program does not choose among drafts")
        return drafts[0]

    def choices(self, *chosen: Mapping[str, Any]) -> list[tuple[DrafterConfig, ...]]:
        """Return the drafts to choose among for each mapping of options that the program sets, which override flags.

        A note names the flags that no draft has an option for. Errors: ConfigError.
        """
        given = self.given()
        can_name_model = "draft_model" in type(self).__dataclass_fields__
        named = parse_draft(given.pop("draft", self.DEFAULT), is_whole=not can_name_model)
        options = [{**named, **given, **each} for each in chosen]
        found = [drafts_of(each) for each in options]
        drafts = [*chain.from_iterable(found)]
        used = {"draft", *(name for draft in drafts for name in _used_options(draft))}
        if any(len(each) > 1 for each in found):
            used.add("auto_drafts")
        pairs = chain.from_iterable(each.items() for each in options)
        chosen_by = (None, (), FULL_BUDGET)  # not given, or it has chosen the policy
        if unused := dict.fromkeys(name for name, value in pairs if name not in used and value not in chosen_by):
            first = [each[0].options() for each in found]
            kinds = [" by ".join(filter(None, [each["draft"], each.get("draft_policy")])) for each in first]
            note_without_effect(unused, f"not for draft {' and '.join(dict.fromkeys(kinds))}")
        for draft in drafts:
            draft.check()
        return found


@dataclass(frozen=True, kw_only=True)
class DraftFlags(DraftNumbers):
    """The draft."""

    draft: Annotated[str | None, DRAFT] = None


@dataclass(frozen=True, kw_only=True)
class ModelDraft(DraftFlags):
    """The draft."""

    DEFAULT: ClassVar[str] = "standalone"

    draft_model: Annotated[str | None, arg(name="model", help_behavior_hint="")] = None
    """the draft's converted checkpoint; of dflash, eagle and medusa: the head as it was published, a folder or its
    weights"""


def _used_options(draft: DrafterConfig) -> Sequence[str]:
    """Return the options that have an effect on a draft."""
    return ["gamma", *required_options(type(draft))] if draft.gamma == 0 else [*draft.options()]


def option_names() -> list[str]:
    """Return the names of the options of drafts and policies, but gamma and a draft's checkpoint."""
    return [name for name in DraftNumbers.__dataclass_fields__ if name not in ("gamma", "draft_options")]
