"""Flags of drafts. A flag that is not given leaves the default to the draft's file."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from tyro.conf import arg

from bench.draft_names import (
    DEFAULT_POLICY,
    FORMS,
    FULL_BUDGET,
    drafts_of,
    parse_draft,
    parse_options,
    required_options,
)
from common.errors import flag, refuse
from common.say import note_without_effect
from engine.drafters.combined import text_kinds
from engine.drafters.config import DrafterConfig
from kv_cache.policy import policies
from models.names import Dtype, KVDtype, Scheme

Value = TypeVar("Value")
# An option that may be left out, whose help says the default.
Given = Annotated[Value | None, arg(help_behavior_hint="")]
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
    default: bfloat16 next to a float32 target on a CPU that computes in bfloat16, else same"""
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

    def choices(self, *chosen: Mapping[str, Any]) -> list[tuple[DrafterConfig, ...]]:
        """Return the drafts to choose among for each mapping of options that the program sets, which override flags.

        A note names the flags that no draft has an option for. Errors: ConfigError.
        """
        given, known = self.given(), type(self).__dataclass_fields__
        named = parse_draft(given.pop("draft", self.DEFAULT), is_whole="draft_model" not in known)
        if {"gamma", "gamma_schedule"} & named.keys() and given.get("gamma") == getattr(type(self), "gamma", None):
            given.pop("gamma", None)  # a program's default, such as the server's
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
