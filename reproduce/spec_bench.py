"""Measure what drafters gain on a prompt set, by category: conversations through the chat template.

    python -m reproduce.spec_bench --output reproduction/spec_bench.jsonl
    python -m reproduce.spec_bench --prompts spec-bench --per_category 10 --drafters self standalone:DRAFT/model.pth

Plain decoding runs beside every drafter; docs/prompt_sets.md says how conversations are decoded and counted.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any, ClassVar

from tyro.conf import arg

import bench
from bench.config import AUTO, BatchSize, ComparedSampling, Output, Rows, RunConfig, Sizes, Target
from bench.draft_flags import ALONE, TEXTS, WITH_MODEL, EveryDraft
from bench.draft_plan import most_drafts
from bench.prompt_sets import Prompt, by_category, load_prompts
from common import cli
from common.checkout import ROOT
from common.contention import contention
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import append_record, publish, require_appendable
from common.provenance import provenance
from common.say import note_without_effect
from common.tables import console
from engine.counts import Counts, acceptance_standard_error, total
from engine.drafters import Drafter
from engine.drafters.config import DrafterConfig, ModelDrafterConfig, drafters
from kv_cache.policy import policies
from models.checkpoints.chat_template import ChatTemplate
from reproduce.helpers.columns import of
from reproduce.helpers.records import Record, grouped

PROMPTS = "reproduce/prompts/question.jsonl"
PLAIN, ALL = "plain", "all"
# Text drafters, a drafter, its checkpoint or policy, its policy beside a checkpoint, and its gamma or schedule.
NAME = re.compile(r"(?:([\w+]+)\+)?(\w+)(?::(.+?))?(?:=(\w+))?(?:@([1-9]\d*|constant|heuristic|confidence|auto))?")
# Tokens that a token of an answer is at most when its text is encoded again: three for each byte of a character that
# was cut off.
READ_AGAIN = 3
# Fields that are equal in all rows of a sum, and fields that are summed.
SHARED = ("model", "prompts", "B", "gen_len", "verification", "temperature", "drafter", "gamma", "draft_budget")
SUMMED = ("sequences", "identical_sequences", "rounds", "drafted", "verified", "accepted", "emitted", "seconds")
SUMMED += ("baseline_emitted", "baseline_seconds")
# Settings of a drafter beside its options.
SETTINGS = ("draft_model", "gamma", "draft_policy", "draft_budget")
COLUMNS = (
    "drafter gamma draft_budget category sequences acceptance mean_accepted_length plain_rate rate speedup identical"
)


@dataclass(frozen=True)
class Drafters:
    """Flags of a program that compares drafters."""

    FLAGS: ClassVar[dict[str, str]] = {"draft": "--drafters", "draft_model": "--drafters"}

    target: Target = field(default_factory=Target)
    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    output: Output = field(default_factory=Output)
    draft: EveryDraft = field(default_factory=EveryDraft)
    drafters: Annotated[tuple[str, ...] | None, arg(help_behavior_hint="(default: all without a second model)")] = None
    """drafters: names, KIND:CHECKPOINT (standalone or a head), or either with its policy (self:POLICY,
    eagle:CHECKPOINT=full); with text drafters before it (suffix+self), with its schedule or gamma behind it
    (self@heuristic, self@5, or self@auto, which may take --auto_drafts instead). A run has a single checkpoint"""

    def configs(self) -> dict[str, DrafterConfig]:
        """Return every drafter by its name. Errors: ConfigError."""
        self.target.require_trained("random weights have nothing to say")
        sampled = self.sampling.temperature > 0 and self.sampling.mode != "coupled"
        given = self.draft.given()
        able = {name: kind for name, kind in ALONE.items() if kind.needs_option is None or kind.needs_option in given}
        names = self.drafters or [name for name, kind in able.items() if not (sampled and kind.needs_baseline)]
        chosen = {name: _chosen(name) for name in names}
        if auto := [name for name in ("gamma_schedule", *SETTINGS) if given.get(name) == AUTO]:
            what, fix = "drafters choose where their names say so", "give a number here, and a name such as self@auto"
            raise ConfigError(what, ", ".join(map(flag, auto)), AUTO, "a number", fix)
        models = {options["draft_model"]: name for name, options in chosen.items() if "draft_model" in options}
        if len(models) > 1:
            fix, what = "run the other model by itself, into the same file", "a session holds a single draft model"
            raise ConfigError(what, flag("drafters"), " ".join(models.values()), "a single checkpoint", fix)
        fixed = [name for name, options in chosen.items() if options.get("gamma") != AUTO]
        if "auto_drafts" in given and len(fixed) == len(chosen):
            note_without_effect(["auto_drafts"], "no drafter is named with @auto")
        alone = ({"auto_drafts": ()} if name in fixed else {} for name in chosen)
        configs = self.draft.variants(*(options | more for options, more in zip(chosen.values(), alone, strict=True)))
        require_at_least("gamma", min(most_drafts(config) for config in configs), 1)
        return dict(zip(chosen, configs, strict=True))


@dataclass(frozen=True)
class Flags(Drafters):
    prompts: Annotated[str | None, arg(help_behavior_hint=f"(default: {PROMPTS})")] = None
    """a .jsonl or .parquet file of conversations, or a known set (spec-bench, speed-bench/SPLIT)"""
    categories: Annotated[tuple[str, ...] | None, arg(help_behavior_hint="(default: all)")] = None  # only these
    per_category: Annotated[int | None, arg(help_behavior_hint="(default: all)")] = None
    """conversations of each, the first ones"""
    B: BatchSize = 8  # conversations decoded together
    gen_len: int = 128  # new tokens of each turn, at most


def _chosen(name: str) -> dict[str, Any]:
    """Return the draft options that a drafter's name stands for. Errors: ConfigError."""
    match = NAME.fullmatch(name)
    texts, kind, path, policy, length = match.groups(default="") if match else [""] * 5
    has_model, before = kind in WITH_MODEL, tuple(filter(None, texts.split("+")))
    if not has_model and not policy:
        path, policy = "", path
    is_known = kind in {*ALONE, *WITH_MODEL} and policy in ("", *policies()) and bool(path) == has_model
    has_cache = is_known and issubclass(drafters()[kind], ModelDrafterConfig)
    if is_known and TEXTS.keys() >= {*before} and (has_cache or not (policy or before)):
        given = {"draft": kind, "draft_model": path, "draft_policy": policy, "text_drafts": before}
        given |= {"gamma": int(length)} if length.isdecimal() else {"gamma_schedule": length}
        given |= {"gamma": AUTO} if length == AUTO else {}
        return {name: value for name, value in given.items() if value not in ("", ())}
    required = f"{', '.join(ALONE)}, or {', '.join(f'{name}:CHECKPOINT' for name in WITH_MODEL)}; text drafters"
    required += " before it, or a policy behind it, for a drafter with a KV cache; a gamma of 1 or more"
    raise ConfigError("there is no such drafter", flag("drafters"), name, required, "choose among these")


def open_session(
    run: RunConfig, configs: Sequence[DrafterConfig], ids: Sequence[Sequence[int]] | None = None
) -> bench.Session:
    """Open a session with room for the prompts (`ids`, or those of `run`) and for every drafter. Errors: UserError."""
    for draft in configs:  # all are checked before anything is loaded
        bench.resolve(replace(run, draft=draft), ids)
    return bench.Session.of_plan(bench.resolve_several(run, configs, texts=ids))


def settings_of(name: str, session: bench.Session) -> Record:
    """Return what rows of a drafter have in common: its name, and the options of the session's draft."""
    known, config = bench.settings_record(session), bench.nested(session.plan.config.draft)
    settings = {"drafter": name} | {key: known.get(key) for key in SETTINGS}
    return settings | bench.options_of({"config": {"draft": config}})


def longest_form(template: ChatTemplate, prompt: Prompt, gen_len: int) -> list[int]:
    """Return as many token ids as the prompt of the last turn has behind the longest possible answers."""
    turns = [{"role": "user", "content": turn} for turn in prompt.turns]
    empty = {"role": "assistant", "content": ""}
    ids = template.encode([*chain.from_iterable((turn, empty) for turn in turns[:-1]), turns[-1]])
    return ids + ids[:1] * (READ_AGAIN * gen_len * (len(turns) - 1))


def converse(
    sessions: Mapping[str, bench.Session],
    drafters: Mapping[str, Drafter],
    template: ChatTemplate,
    category: Sequence[Prompt],
) -> dict[str, Record]:
    """Decode all turns of a category's conversations with plain decoding and each drafter, in the reverse order every
    second batch; drafters that are made from plain decoding's text come last. Return the sums of each drafter."""
    name, n_rows, talks = category[0].category, sessions[PLAIN].plan.n_rows, [[] for _ in category]
    first = 0  # number of the batch's first request, on which samples depend
    batches: dict[str, list[Record]] = {draft: [] for draft in sessions if draft != PLAIN}
    each: dict[str, list[list[Counts]]] = {draft: [[] for _ in category] for draft in batches}
    turned = [PLAIN, *drafters][::-1]
    for turn in range(max(len(prompt.turns) for prompt in category)):
        going = [row for row, prompt in enumerate(category) if turn < len(prompt.turns)]
        for rows in (going[start : start + n_rows] for start in range(0, len(going), n_rows)):
            for row in rows:
                talks[row].append({"role": "user", "content": category[row].turns[turn]})
            prompts = [template.encode(talks[row]) for row in rows]
            seen: dict[str, bench.Decoded] = {}
            turned = turned[::-1]
            for draft in [*turned, *(draft for draft in batches if draft not in drafters)]:
                session = replace(sessions[draft], prompts=prompts, numbered_from=first)
                drafter = drafters.get(draft)
                if drafter is None and draft != PLAIN:
                    drafter = session.drafter(texts=[*[()] * first, *seen[PLAIN].tokens])
                seen[draft] = bench.decode(session, f"{name}, {draft}", drafter)
            for draft, parts in batches.items():
                parts.append(counted(seen[PLAIN], seen[draft], session.plan.reproducible))
                for row, counts in zip(rows, seen[draft].stats.rows, strict=True):
                    each[draft][row].append(counts)
            for row, tokens in zip(rows, seen[PLAIN].tokens, strict=True):
                talks[row].append({"role": "assistant", "content": template.tokenizer.decode(tokens)})
            first += len(rows)
    return {draft: summed(parts, [*map(total, each[draft])]) for draft, parts in batches.items()}


def counted(plain: bench.Decoded, drafted: bench.Decoded, comparable: bool) -> Record:
    """Return the counts of a batch. Seconds end with the last row. contended: threads waited for processors."""
    counts, before = drafted.stats.counts, plain.stats
    return {
        "sequences": len(drafted.tokens),
        "identical_sequences": bench.identical_rows(plain.tokens, drafted.tokens) if comparable else None,
        "rounds": counts.rounds,
        **{name: getattr(counts, name) for name in ("drafted", "verified", "accepted", "emitted")},
        "seconds": drafted.stats.decode_seconds,
        "baseline_emitted": before.counts.emitted,
        "baseline_seconds": before.decode_seconds,
        "contended": contention([plain.usage, drafted.usage])["contended"],
    }


def summed(parts: Sequence[Record], each: Sequence[Counts]) -> Record:
    """Sum up records and add their rates. each: counts of each conversation, over its turns."""
    sums = {name: None if parts[0][name] is None else sum(part[name] for part in parts) for name in SUMMED}
    plain, drafted = (bench.ratio(sums[f"{of}emitted"], sums[f"{of}seconds"]) for of in ("baseline_", ""))
    rates = {"acceptance_rate": bench.ratio(sums["accepted"], sums["verified"]), "speedup": bench.ratio(drafted, plain)}
    rates |= {"mean_accepted_length": bench.ratio(sums["emitted"], sums["rounds"])}
    rates |= {"acceptance_standard_error": acceptance_standard_error(each)}
    rates |= {f"{name}_of_each": [getattr(counts, name) for counts in each] for name in ("verified", "accepted")}
    rates |= {"contended": any(part.get("contended") for part in parts)}
    return parts[0] | sums | rates | {"baseline_tokens_per_second": plain, "decode_tokens_per_second": drafted}


def table_rows(records: Iterable[Record]) -> list[Record]:
    """Return the rows of each drafter by category, followed by their sum."""
    pairs = ((record | row, row) for record in records for row in record["rows"])
    rows = [{name: both[name] for name in (*SHARED, "category", *row)} for both, row in pairs]
    groups = grouped(rows, itemgetter(*SHARED)).values()
    return [row for group in groups for row in (*group, *([_sum_categories(group)] if len(group) > 1 else []))]


def _sum_categories(rows: Sequence[Record]) -> Record:
    each = [
        Counts(verified_at=[verified], accepted_at=[accepted])
        for row in rows
        for verified, accepted in zip(row.get("verified_of_each", ()), row.get("accepted_of_each", ()), strict=True)
    ]
    return summed(rows, each) | {"category": ALL}


def measure(
    flags: Flags, configs: Mapping[str, DrafterConfig], categories: Mapping[str, Sequence[Prompt]]
) -> Iterable[Record]:
    """Yield a record of each category, appended to the output. Errors: UserError."""
    template = flags.target.with_text().chat_template()
    ids = [longest_form(template, prompt, flags.gen_len) for prompt in chain(*categories.values())]
    sizes, rows = Sizes(flags.B, None, flags.gen_len), Rows(stop_at_eos=True)
    run = RunConfig(flags.target, sizes=sizes, rows=rows, sampling=flags.sampling, output=flags.output)
    session = open_session(run, list(configs.values()), ids)
    each: dict[str, DrafterConfig | None] = {PLAIN: None, **configs}
    sessions = {name: session.variant(draft=draft) for name, draft in each.items()}
    settings = {name: settings_of(name, sessions[name]) for name in configs}
    drafters = {name: sessions[name].drafter() for name, draft in configs.items() if not draft.needs_baseline}
    for name in (PLAIN, *drafters):
        bench.warm_up(sessions[name], [drafters[name]] if name in drafters else [])
    for category, prompts in categories.items():
        found = converse(sessions, drafters, template, prompts)
        measured = {"prompts": flags.prompts or PROMPTS, "B": flags.B, "category": category}
        measured |= {"conversations": len(prompts), "rows": [settings[name] | row for name, row in found.items()]}
        record = bench.record_of("spec_bench", sessions[PLAIN], bench.rounded(measured), SETTINGS)
        append_record(flags.output.output, record)
        yield record


def main(flags: Flags) -> None:
    if flags.per_category is not None:
        require_at_least("per_category", flags.per_category, 1)
    require_appendable(flags.output.output)
    configs = flags.configs()
    if auto := [name for name, config in configs.items() if config.gamma == AUTO]:
        what, fix = "costs are not measured for conversations", "leave it out, or use reproduce/context_sweep.py"
        raise ConfigError(what, flag("drafters"), auto[0], "a gamma, or a schedule other than auto", fix)
    prompts = load_prompts(flags.prompts or str(ROOT / PROMPTS))
    categories = by_category(prompts, flags.categories or (), flags.per_category)
    rows = bench.rounded(table_rows(measure(flags, configs, categories)))
    summary = {"benchmark": "spec_bench_summary", "prompts": flags.prompts or PROMPTS, "rows": rows, **provenance()}
    notes = ["*: slower than plain decoding"]
    if any(row.get("contended") for row in rows):
        notes.append("threads waited for processors: no speedup here is to be trusted")
    publish(None, summary, console(rows, of(COLUMNS)), *(f"  {note}" for note in notes))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
