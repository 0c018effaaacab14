"""What drafters gain on a prompt set, by category: conversations through the chat template, plain decoding beside each.

    python reproduce/spec_bench.py --output reproduction/spec_bench.jsonl
    python reproduce/spec_bench.py --prompts spec-bench --per_category 10 --drafters self standalone:DRAFT/model.pth

How conversations are decoded, and what is counted: docs/prompt_sets.md. The same command goes on with categories that
have no record in --output yet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from operator import itemgetter
from typing import Annotated, Any, ClassVar

from tyro.conf import arg

import bench
from bench.config import AUTO, BatchSize, ComparedSampling, Output, Rows, RunConfig, Sizes, Target
from bench.draft_flags import TEXTS, draft_flags
from bench.prompt_sets import Prompt, by_category, load_prompts
from common import cli
from common.checkout import ROOT
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import append_or_put_off, publish, read_lines, require_appendable
from common.provenance import provenance
from common.tables import console
from engine.contention import contention
from engine.counts import Counts, acceptance_standard_error, total
from engine.drafters import Drafter
from engine.drafters.config import DrafterConfig, drafters
from kv_cache.policy import policies
from models.checkpoints.chat_template import ChatTemplate
from reproduce.paper.columns import SLOWER, of
from reproduce.paper.published import Record, grouped

PROMPTS = "reproduce/prompts/question.jsonl"
BENCHMARK, STANDALONE, PLAIN, ALL = "spec_bench", "standalone", "plain", "all"
Draft: Any = draft_flags(drafters(), without=("draft", "draft_model", "draft_ranks"))
ALONE = draft_flags().KINDS
WITH_MODEL = [name for name in drafters() if name not in ALONE]
SCHEDULES = ("constant", "heuristic", "confidence")
# The bytes of a character that was cut off are read again as three tokens each.
READ_AGAIN = 3
# What says nothing of how a conversation is decoded; what rows that are summed share; what is summed.
ELSEWHERE = ("output", "prompts", "categories", "per_category")
SHARED = ("model", "prompts", "B", "gen_len", "verification", "temperature", "drafter", "gamma", "draft_budget")
SUMMED = ("sequences", "identical_sequences", "rounds", "drafted", "judged", "accepted", "emitted", "seconds")
SUMMED += ("baseline_emitted", "baseline_seconds")


@dataclass(frozen=True)
class Drafters:
    """Of a program that compares drafters: what drafts, for which target and sampling."""

    FLAGS: ClassVar[dict[str, str]] = {"draft": "--drafters", "draft_model": "--drafters"}

    target: Target = field(default_factory=Target)
    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    output: Output = field(default_factory=Output)
    draft: Draft = field(default_factory=Draft)
    drafters: Annotated[tuple[str, ...] | None, arg(help_behavior_hint="(default: all without a second model)")] = None
    """what drafts: names, KIND:CHECKPOINT (standalone, eagle, medusa), or self:POLICY; before one, text drafters
    (suffix+self); behind one, its schedule or gamma (self@heuristic, self@5); each has the draft flags that it takes"""

    def configs(self) -> dict[str, DrafterConfig]:
        """Every drafter by its name; of themselves, those that can be. Errors: ConfigError."""
        self.target.require_trained("random weights have nothing to say")
        sampled = self.sampling.temperature > 0 and self.sampling.mode != "coupled"
        given = self.draft.given()
        able = {name: kind for name, kind in ALONE.items() if kind.needs_option is None or kind.needs_option in given}
        names = self.drafters or [name for name, kind in able.items() if not (sampled and kind.needs_baseline)]
        chosen = {name: _chosen(name) for name in names}
        if auto := [name for name, value in given.items() if value == AUTO]:
            fix = "name one; reproduce/gamma_cell.py compares auto with fixed drafts"
            raise ConfigError("fixed drafts are compared here", ", ".join(map(flag, auto)), AUTO, "a number", fix)
        models = {one["draft_model"]: name for name, one in chosen.items() if "draft_model" in one}
        if len(models) > 1:
            fix, what = "run the other one by itself, into the same file", "a session holds one draft model"
            raise ConfigError(what, flag("drafters"), " ".join(models.values()), f"one {STANDALONE}:CHECKPOINT", fix)
        configs = self.draft.variants(*chosen.values())
        require_at_least("gamma", min(int(config.gamma) for config in configs), 1)
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

    def cell(self, category: Sequence[Prompt]) -> str:
        """16 digits of what is run: these conversations, and all flags that have a say in how."""
        own = {name: value for name, value in asdict(self).items() if name not in ELSEWHERE}
        own["sampling"]["verification"] = self.sampling.mode
        said = json.dumps([own, [asdict(prompt) for prompt in category]], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def _chosen(name: str) -> dict[str, Any]:
    what, at, length = name.rpartition("@")
    own = {"gamma": int(length)} if length.isdecimal() else {"gamma_schedule": length} if length in SCHEDULES else {}
    head, _, path = (what if at and own else name).partition(":")
    *texts, kind = head.split("+")
    behind = "draft_model" if kind in WITH_MODEL else "draft_policy"
    is_known = bool(path) if kind in WITH_MODEL else kind in (ALONE.keys() - TEXTS.keys() if texts else ALONE)
    is_known &= kind in WITH_MODEL or not path or (kind == "self" and path in policies())
    if is_known and set(texts) <= TEXTS.keys():
        given = {"draft": kind, behind: path, "text_drafts": tuple(texts)}
        return {name: value for name, value in given.items() if value} | own
    required = f"{', '.join(ALONE)}, or {STANDALONE}:CHECKPOINT"
    raise ConfigError("there is no such drafter", flag("drafters"), name, required, "choose among these")


def open_session(
    run: RunConfig, configs: Sequence[DrafterConfig], ids: Sequence[Sequence[int]] | None = None
) -> bench.Session:
    """With room for the prompts, those or the run's own, and for every drafter. Errors: UserError."""
    for draft in configs:  # all are checked before anything is loaded
        bench.resolve(replace(run, draft=draft), ids)
    gamma = max(int(draft.gamma) for draft in configs)
    # The first is what a session is opened with: the draft model, if there is one.
    deepest = [replace(draft, gamma=gamma) for draft in sorted(configs, key=lambda one: not one.has_model)]
    return bench.Session.of_plan(bench.resolve_several(run, deepest, texts=ids))


def longest_form(template: ChatTemplate, prompt: Prompt, gen_len: int) -> list[int]:
    """The last turn's prompt, with as many tokens as the answers before it may have."""
    said = [{"role": "user", "content": turn} for turn in prompt.turns]
    empty = {"role": "assistant", "content": ""}
    ids = template.encode([*chain.from_iterable((turn, empty) for turn in said[:-1]), said[-1]])
    return ids + ids[:1] * (READ_AGAIN * gen_len * (len(said) - 1))


def converse(
    sessions: Mapping[str, bench.Session],
    drafters: Mapping[str, Drafter],
    template: ChatTemplate,
    category: Sequence[Prompt],
    first: int,
) -> dict[str, Record]:
    """What each drafter did beside plain decoding, over all turns of a category: in the other order every other batch,
    but for drafters that plain decoding's text makes. Requests are numbered from `first` on."""
    name, n_rows, talks = category[0].category, sessions[PLAIN].plan.n_rows, [[] for _ in category]
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
                own = replace(sessions[draft], prompts=prompts, numbered_from=first)
                drafter = drafters.get(draft)
                if drafter is None and draft != PLAIN:
                    drafter = own.drafter(texts=[*[()] * first, *seen[PLAIN].tokens])
                seen[draft] = bench.decode(own, f"{name}, {draft}", drafter)
            for draft, parts in batches.items():
                parts.append(counted(seen[PLAIN], seen[draft], own.plan.reproducible))
                for row, counts in zip(rows, seen[draft].stats.rows, strict=True):
                    each[draft][row].append(counts)
            for row, tokens in zip(rows, seen[PLAIN].tokens, strict=True):
                talks[row].append({"role": "assistant", "content": template.tokenizer.decode(tokens)})
            first += len(rows)
    return {draft: summed(parts, [*map(total, each[draft])]) for draft, parts in batches.items()}


def counted(plain: bench.Decoded, drafted: bench.Decoded, comparable: bool) -> Record:
    """What is summed of a batch; seconds are of decoding alone, to its last row. contended: whether threads waited."""
    counts, before = drafted.stats.counts, plain.stats
    return {
        "sequences": len(drafted.tokens),
        "identical_sequences": bench.identical_rows(plain.tokens, drafted.tokens) if comparable else None,
        "rounds": counts.rounds,
        "judged": counts.verified,
        **{name: getattr(counts, name) for name in ("drafted", "accepted", "emitted")},
        "seconds": drafted.stats.decode_seconds,
        "baseline_emitted": before.counts.emitted,
        "baseline_seconds": before.decode_seconds,
        "contended": contention([plain.usage, drafted.usage])["contended"],
    }


def summed(parts: Sequence[Record], each: Sequence[Counts]) -> Record:
    """Sum up records, with their rates. each: counts of each conversation over its turns; empty if unknown."""
    sums = {name: None if parts[0][name] is None else sum(part[name] for part in parts) for name in SUMMED}
    plain, drafted = (bench.ratio(sums[f"{of}emitted"], sums[f"{of}seconds"]) for of in ("baseline_", ""))
    rates = {"acceptance_rate": bench.ratio(sums["accepted"], sums["judged"]), "speedup": bench.ratio(drafted, plain)}
    rates |= {"mean_accepted_length": bench.ratio(sums["emitted"], sums["rounds"])}
    rates |= {"acceptance_standard_error": acceptance_standard_error(each)}
    rates |= {"judged_of_each": [one.verified for one in each], "accepted_of_each": [one.accepted for one in each]}
    rates |= {"contended": any(part.get("contended") for part in parts)}
    return parts[0] | sums | rates | {"baseline_tokens_per_second": plain, "decode_tokens_per_second": drafted}


def table_rows(records: Iterable[Record]) -> list[Record]:
    """A drafter's categories together, and last what they sum up to."""
    own = ((record | row, row) for record in records for row in record["rows"])
    rows = [{name: one[name] for name in (*SHARED, "category", *row)} for one, row in own]
    groups = grouped(rows, itemgetter(*SHARED)).values()
    return [row for own in groups for row in (*own, *([_all(own)] if len(own) > 1 else []))]


def _all(rows: Sequence[Record]) -> Record:
    """Sum up a drafter's categories. Records that were written before had no counts of each conversation."""
    is_known = all("judged_of_each" in row for row in rows)
    pairs = (zip(row["judged_of_each"], row["accepted_of_each"], strict=True) for row in rows if is_known)
    each = [Counts(verified_at=[judged], accepted_at=[accepted]) for judged, accepted in chain(*pairs)]
    return summed(rows, each) | {"category": ALL}


def measure(
    flags: Flags,
    configs: Mapping[str, DrafterConfig],
    cells: Mapping[str, Sequence[Prompt]],
    firsts: Mapping[str, int],
    done: Collection[str],
    put_off: list[Exception],
) -> Iterable[Record]:
    """A record of each category that is not done, numbered from `firsts`, appended to the output. Errors: UserError."""
    options = ("draft_model", "gamma", "draft_policy", "draft_budget")
    template = flags.target.with_text().chat_template()
    ids = [longest_form(template, prompt, flags.gen_len) for prompt in chain(*cells.values())]
    sizes, own_rows = Sizes(flags.B, None, flags.gen_len), Rows(stop_at_eos=True)
    run = RunConfig(flags.target, sizes=sizes, rows=own_rows, sampling=flags.sampling, output=flags.output)
    session = open_session(run, list(configs.values()), ids)
    each: dict[str, DrafterConfig | None] = {PLAIN: None, **configs}
    sessions = {name: session.variant(draft=draft) for name, draft in each.items()}
    settings = {name: bench.settings_record(sessions[name]) for name in configs}
    own = {name: {"drafter": name} | {key: settings[name].get(key) for key in options} for name in configs}
    for name, config in configs.items():
        own[name] |= bench.options_of({"config": {"draft": bench.nested(config)}})
    drafters = {name: sessions[name].drafter() for name, one in configs.items() if not one.needs_baseline}
    for name in (PLAIN, *drafters):
        bench.warm_up(sessions[name], [drafters[name]] if name in drafters else [])
    for cell, prompts in cells.items():
        if cell in done:
            continue
        found = converse(sessions, drafters, template, prompts, firsts[prompts[0].category])
        rows = [own[name] | seen for name, seen in found.items()]
        named = {"cell": cell, "prompts": flags.prompts or PROMPTS, "B": flags.B, "category": prompts[0].category}
        named |= {"conversations": len(prompts), "rows": rows}
        record = bench.record_of(BENCHMARK, sessions[PLAIN], bench.rounded(named), options)
        append_or_put_off(flags.output.output, record, put_off)
        yield record


def main(flags: Flags) -> None:
    if flags.per_category is not None:
        require_at_least("per_category", flags.per_category, 1)
    require_appendable(flags.output.output)
    configs = flags.configs()
    prompts = load_prompts(flags.prompts or str(ROOT / PROMPTS))
    n_turns = {name: sum(len(one.turns) for one in own) for name, own in by_category(prompts).items()}
    firsts = dict(zip(n_turns, accumulate(n_turns.values(), initial=0), strict=False))
    asked = by_category(prompts, flags.categories or (), flags.per_category)
    cells, put_off = {flags.cell(prompts): prompts for prompts in asked.values()}, []
    lines = [line for _, line in read_lines(flags.output.output)] if flags.output.output else []
    done = {line["cell"]: line for line in lines if isinstance(line, dict) and line.get("benchmark") == BENCHMARK}
    if not cells.keys() <= done.keys():
        done |= {record["cell"]: record for record in measure(flags, configs, cells, firsts, [*done], put_off)}
    rows = bench.rounded(table_rows(done[cell] for cell in cells))
    summary = {"benchmark": f"{BENCHMARK}_summary", "prompts": flags.prompts or PROMPTS, "rows": rows, **provenance()}
    said = f"{SLOWER}: slower than plain decoding"
    if any(row.get("contended") for row in rows):
        said += "; threads waited for processors: no speedup here is to be trusted"
    publish(None, summary, console(rows, of("conversations")), f"  {said}", put_off=put_off)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
