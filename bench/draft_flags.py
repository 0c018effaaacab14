"""Flags of drafts, names of drafts such as `suffix+eagle:HEAD=full@auto`, and the configurations that both stand for.

A flag that is not given leaves the default to the draft's file. A name is a kind, or a checkpoint, with drafts from
text before it (`suffix+self`), its checkpoint after a colon (`eagle:HEAD`), its policy after `=` (for a kind without a
checkpoint also after the colon), and its gamma or schedule after `@`. Grids, sweeps and records use these names, too.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

from common.errors import flag, refuse
from common.flags import Given
from common.plug_ins import PACKAGES, errors_refused, import_files, name_of
from common.say import note_without_effect, say_once
from engine.drafters.config import AUTO, DrafterConfig, Trait, Wrapper, drafters, plug_ins, wrappers
from engine.drafters.text_drafter import text_kinds
from kv_cache import Policy
from kv_cache.policy import BudgetedPolicy, policies
from models.names import Dtype, KVDtype, Scheme

DEFAULT_POLICY = "streaming"
# A budget that means the policy `full`.
FULL_BUDGET = -1
NAME = re.compile(r"(?:([\w+]+)\+)?(\w+)(?::(.+?))?(?:=(\w+))?(?:@([1-9]\d*|constant|heuristic|confidence|auto))?")
BUDGETED = [name for name, kind in policies().items() if issubclass(kind, BudgetedPolicy)]
# Kinds that need no second model, and those that do.
ALONE = [name for name, kind in drafters().items() if Trait.SECOND_MODEL not in kind.TRAITS]
WITH_MODEL = [name for name in drafters() if name not in ALONE]
FORMS = f"{', '.join(ALONE)}, a converted checkpoint, or {', '.join(f'{name}:PATH' for name in WITH_MODEL)}"

POLICY: Any = arg(
    help_behavior_hint="",
    help=f"what the cache keeps (default: {DEFAULT_POLICY}): {', '.join(policies())}; auto, of a self-draft: whichever "
    "with a budget pays best, chosen while decoding",
)
# Names in MagicDec's scripts.
BUDGET: Any = arg(help_behavior_hint="", aliases=["--streamingllm_budget"])
WINDOW: Any = arg(help_behavior_hint="", aliases=["--window_size"])
DRAFT_RANKS: Any = arg(help_behavior_hint="", aliases=["--draft_rank_group"])
DRAFT: Any = arg(help_behavior_hint="", metavar="DRAFT", help=f"{FORMS}; with others in its name: suffix+self=snapkv@3")
TEXTS: Any = arg(
    help=f"drafts from text that stand in for a draft model where they find a long match: {', '.join(text_kinds())}"
)


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The draft."""

    DEFAULT: ClassVar[str] = "self"
    USUAL: ClassVar[Mapping[str, Any]] = {}  # the program's gamma, unless a flag or a name gives one or a schedule

    n_sink: Given[int] = None
    """streaming, verify_topk, retrieval: attention sinks in the budget (default: 4)"""
    draft_positions: Given[Literal["auto", "absolute", "cache"]] = None
    """streaming: rotary positions of a draft model or head, in the text (absolute), or in the cache (cache), where they
    never exceed the budget; auto, the default: cache if the run is longer than the draft's trained context"""
    snapkv_window: Annotated[int | None, WINDOW] = None
    """policies that select: recent tokens in the budget (default: 32); those of a policy that selects by queries choose
    the other entries"""
    refresh: Given[int] = None
    """verify_topk, retrieval: rounds after which entries are chosen anew (default: 1 and 4)"""
    chunk: Given[int] = None
    """retrieval: tokens of a chunk, which are chosen together (default: 8)"""
    quant_group: Given[int] = None
    """quantized: numbers that share a scale: tokens of a key's channel, channels of a value (default: 16); a CPU reads
    groups of a multiple of 16 directly, and unpacks others first"""
    quant_window: Given[int] = None
    """quantized: the least number of recent tokens that are not quantised (default: 64)"""
    draft_dtype: Given[Literal["auto", "same"] | Dtype] = None
    """dtype of the draft's weights and cache; same: the target's (a self-draft then shares its weights); auto, the
    default: bfloat16 next to a float32 target on a CPU where bfloat16 is fast, else same"""
    draft_weights: Given[Literal["auto", "same"] | Scheme] = None
    """the draft's linear layers in 8 or 4 bits; the target keeps its own, so the output stays the same; same: as
    --draft_dtype says, or a self-draft's as the target's; auto, the default: on a CPU with AVX2, or a GPU that it is
    faster on, int8, or int4 for a model that was published in 4 bits, if neither --draft_dtype nor --quantize is given,
    else same"""
    draft_kv_dtype: Given[Literal["same"] | KVDtype] = None
    """entries of the draft's KV cache (default: same)"""
    draft_layers: Given[str] = None
    """self: layers that it runs, such as 0-9,20-29: it skips the others (default: all)"""
    draft_of_draft: Given[str] = None
    """self: the draft of the draft: copies from the row's text (ngram); the same model (streaming) or a smaller model,
    given by its converted checkpoint, over --inner_budget entries (default: none)"""
    inner_gamma: Given[int] = None
    """--draft_of_draft: tokens that are drafted for each forward of the draft (default: 2)"""
    inner_budget: Given[int] = None
    """--draft_of_draft streaming or a model: KV entries per row, sinks and recent ones together (default: 64)"""
    text_drafts: Annotated[tuple[str, ...], TEXTS] = ()
    text_match: Given[int] = None
    """tokens that --text_drafts have to have found a guess by, for it to stand in for the model's (default: 8)"""
    max_ngram: Given[int] = None
    """ngram: longest match that is looked for (default: 3)"""
    draft_text: Given[str] = None
    """suffix: file of a text in which matches are looked up, too, such as one that the answer repeats with changes"""
    keep_answers: Given[int] = None
    """suffix: contexts that it keeps of the answers to each of the latest 32 prompts, to draft by for requests of the
    same prompt (default: 0)"""
    markov_table: Given[str] = None
    """markov: a file that reproduce/markov_table.py wrote"""
    draft_options: tuple[str, ...] = ()
    """NAME=VALUE ...: options of drafts and policies that have no flag here"""

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by flag."""
        return {name: value for name, value in vars(self).items() if value not in (None, ())}

    def config(self, **chosen: Any) -> DrafterConfig:
        """Return the configuration of the draft. chosen: options that the program sets. Errors: ConfigError, also for
        several drafts to choose among."""
        (drafts,) = self.choices(chosen)
        if len(drafts) > 1:
            names = " or ".join(dict.fromkeys(draft.kind for draft in drafts))
            refuse("draft", names, "one draft with one policy", "this program does not choose among drafts")
        return drafts[0]

    @errors_refused(*plug_ins())
    def choices(self, *chosen: Mapping[str, Any]) -> list[tuple[DrafterConfig, ...]]:
        """Return the drafts to choose among for each mapping of options that the program sets, which override flags.

        A note names the flags that no draft has an option for. Errors: ConfigError.
        """
        given, known = self.given(), type(self).__dataclass_fields__
        named = parse_draft(given.pop("draft", self.DEFAULT), is_whole="draft_model" not in known)
        if not {"gamma", "gamma_schedule"} & {*named, *given}:
            given |= self.USUAL
        twice = [name for name in named if given.get(name, named[name]) != named[name]]
        if twice and given.get("gamma") != 0:  # 0 turns any draft off
            what = f"{flag('draft')} names another {twice[0]}"
            refuse(twice[0], given[twice[0]], named[twice[0]], what, f"leave out {flag(twice[0])}")
        options = [{**named, **given, **each} for each in chosen]
        found = [drafts_of(each) for each in options]
        drafts = [*chain.from_iterable(found)]
        used = {"draft", "draft_options"}
        for draft in drafts:
            used.update(["gamma", *required_options(type(draft))] if draft.gamma == 0 else draft.options())
        if any(len(each) > 1 for each in found):
            used.add("auto_drafts")
        pairs = chain.from_iterable((each | parse_options(each.get("draft_options", ()))).items() for each in options)
        chosen_by = (None, (), FULL_BUDGET)  # not given, or it has chosen the policy
        if unused := dict.fromkeys(name for name, value in pairs if name not in used and value not in chosen_by):
            first = [each[0].options() for each in found]
            kinds = [" by ".join(filter(None, [each["draft"], each.get("draft_policy")])) for each in first]
            note_without_effect(unused, f"not for draft {' and '.join(dict.fromkeys(kinds))}")
        for draft in drafts:
            draft.check()
        for why in import_files(*PACKAGES):
            say_once(f"note: a file of a policy or a draft is left out: {why}")
        return found


@dataclass(frozen=True, kw_only=True)
class DraftNumbers(DraftOptions):
    """The draft."""

    gamma: Given[int | Literal["auto"]] = None
    """tokens drafted per round (default: 3); auto: 0 to 6, chosen before every round by measured costs and the
    acceptance so far"""
    gamma_schedule: Given[Literal["constant", "heuristic", "confidence", "auto"]] = None
    """how far rows draft. constant: gamma tokens; heuristic: two more if all of the last were accepted, else a
    token less; confidence: while a draft model is sure; auto: as --gamma auto (default: constant, or auto with it)"""
    confidence_threshold: Given[float | Literal["auto"]] = None
    """--gamma_schedule confidence: a row stops after a token less probable than this (default: 0.4); auto: by
    acceptance so far"""
    p_min: Given[float] = None
    """--gamma_schedule confidence: a row stops before a token if the most probable is below this (default: 0)"""
    draft_policy: Annotated[str | None, POLICY] = None
    draft_budget: Annotated[int | Literal["auto"] | None, BUDGET] = None
    """KV entries per row: sinks or selected entries, and recent ones (default: 512); -1 is --draft_policy full; auto,
    for self-drafts: whichever of 64, 128, 256, 512 and 1024 pays best, chosen while decoding"""
    auto_drafts: tuple[str, ...] = ()
    """drafts that --gamma auto may take instead of the draft, in any round, if they pay more: self, or from text"""


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
    draft_ranks: Annotated[tuple[int, ...] | None, DRAFT_RANKS] = None
    """standalone: ranks that share the draft (default: those of --rank_group)"""


def option_names() -> list[str]:
    """Return the names of the options of drafts and policies, but gamma and a draft's checkpoint."""
    return [name for name in DraftNumbers.__dataclass_fields__ if name not in ("gamma", "draft_options")]


def required_options(kind: type[DrafterConfig]) -> list[str]:
    """Return the options of a kind of draft that have no default."""
    return [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]


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
    is_known = bool(names) and policy in ("", AUTO, *policies()) and (not texts or text_kinds().keys() >= {*texts})
    is_fitting = ("policy" in names or not (policy or texts)) and not (path and kind in ALONE)
    if not (is_known and is_fitting) or (is_whole and kind in WITH_MODEL and not path):
        if os.path.exists(name):
            return {"draft": "standalone", "draft_model": name}
        if "policy" in names and policy not in ("", AUTO):
            _known("draft_policy", policy, policies(), AUTO)
        near = [] if "+" in name else get_close_matches(model, [*ALONE, *WITH_MODEL], 1)
        fix = _corrected(model) or "check the spelling and the folder"
        fix = f"use {near[0]}{':PATH' * (near[0] in WITH_MODEL)}" if near else fix
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
        if lacking := ", ".join(sorted(kind.__abstractmethods__)):
            what, fix = "a class lacks methods that its kind needs", f"define {lacking} (docs/extending.md)"
            refuse(name_of(kind), f"no {lacking}", lacking, what, fix)
        if missing := [name for name in required_options(kind) if name not in options]:
            asked = flag(kind.ASKED_BY) if issubclass(kind, Wrapper) else kind.name
            refuse(missing[0], "nothing", "a value", f"{asked} needs {flag(missing[0])}", f"add {flag(missing[0])}")
        return kind(**options)

    draft: DrafterConfig = made(kind)
    for wrapper in wrappers():
        if given.get(wrapper.ASKED_BY) not in (None, (), []):
            draft = wrapper.around(draft, given, made)
    return draft


def _known(field: str, name: str, kinds: Mapping[str, Any], *others: str) -> Any:
    """Return the kind of a name. others: values of the field that are no kinds. Errors: ConfigError for an unknown
    name."""
    if name not in kinds:
        near = get_close_matches(name, [*kinds, *others], 1)
        fix = f"use {near[0]}" if near else _corrected(name) or "use one of these"
        refuse(field, name[:80], ", ".join([*kinds, *others]), f"{flag(field)} has no such value", fix)
    return kinds[name]


def _corrected(name: str) -> str:
    """Return a fix for an unknown name, if there are files that cannot be imported: one of them may define it."""
    files = import_files(*PACKAGES)
    return f"correct the file that defines {name[:80]}: {'; '.join(files)}" if files else ""


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the options of NAME=VALUE pairs. Errors: ConfigError for a name that no draft, policy or wrapper has."""
    known = {option.name for kind in plug_ins() for option in fields(kind)} - {"policy", "draft"}
    parsed = dict[str, Any]()
    for pair in pairs:
        name, is_pair, value = pair.partition("=")
        if not is_pair or name not in known:
            near = get_close_matches(name, sorted(known), 1)
            required = "NAME=VALUE, with an option of a draft or policy (see --help)"
            fix = f"use {near[0] if near else 'NAME'}={value[:80] or 'VALUE'}"
            fix = fix if near else _corrected(name) or fix
            refuse("draft_options", pair[:80], required, "no draft or policy has this option", fix)
        parsed[name] = tuple(read) if isinstance(read := parse_value(value), list) else read
    return parsed


def parse_value(text: str) -> Any:
    """Return a value as TOML reads it (0.5, true, [64, 128], "quoted"), or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
