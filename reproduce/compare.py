"""Compare drafters with plain decoding in turns, after the same prompts: what they gain, and what is accepted.

    python -m reproduce.compare --drafters self suffix ngram --contexts 512 2000 7500 --B 1 --num_prompts 5
    python -m reproduce.compare --drafters self:streaming self:snapkv --budgets 64 256 --texts sampled book
    python -m reproduce.compare --drafters self --gammas 1 3 5 auto --budgets 128 512 auto --repeats 3
    python -m reproduce.compare --prompts reproduce/prompts/copying.jsonl --drafters ngram suffix+self
    python -m reproduce.compare --chat --prompts spec-bench --per_category 10
    python -m reproduce.compare --tasks ruler:vt longbench:qasper.jsonl --contexts 1000 4000 --drafters self:snapkv
    python -m reproduce.compare --storages float32 int8-int8 --drafters self --texts greedy sampled --repeats 3

A record has the rows of all contenders at a context, on the prompts of a file, or in a category of conversations, and
is appended to --output when these have been measured.
`speedup` counts the rounds in which all rows decode, `wall_speedup` counts until the last row ends; both leave out
prefill, and the time in which drafters that choose (`self@auto`) measure their costs. `drafting_ms` is the mean time of
a round before the target verifies, on a CPU. With --repeats, figures are medians.

With several policies, `self:full` is compared, too: the ceiling, a draft of all entries with weights like theirs, which
are those of the benchmarks unless --draft_weights says others. `difference` is the 95% interval over rows of the
acceptance minus the first drafter's on the same text.

--tasks: `score` is the mean of the task's metric over the answers of plain decoding, which drafts do not change. The
texts of ruler: are made by --seed; contexts of files that are too long lose their middle.

--texts: greedy and sampled are decoded; book (the data set's text after each prompt) is teacher-forced, which measures
acceptance alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

import bench
from bench.config import AUTO, BatchSize, ComparedSampling, Output, Rows, RunConfig, Sampling, Sizes, Target, Text
from bench.data import by_category, load_prompts
from bench.draft_flags import ALONE, DEFAULT_POLICY, DraftNumbers, parse_draft, required_options
from bench.plan import Plan
from common import cli
from common.checkout import ROOT
from common.errors import flag, refuse, require_at_least
from common.jsonl import append_record, publish, require_appendable
from common.provenance import provenance
from common.say import note_without_effect, say
from common.tables import console
from engine.drafters.config import DrafterConfig, DraftPlan, Trait, drafters
from reproduce.helpers.batches import Batch, batches_of, examples_of, longest_form, turns_of
from reproduce.helpers.columns import column, shown
from reproduce.helpers.contenders import SETTINGS, Decoder, Forced, summary_rows
from reproduce.helpers.llama_cpp import peers
from reproduce.helpers.pairs import with_differences
from reproduce.helpers.records import Record
from reproduce.tasks.task import Example, Task, tasks_of

CHATS = "reproduce/prompts/question.jsonl"
PLAIN, GREEDY, SAMPLED, BOOK = "plain", "greedy", "sampled", "book"
TEXTS: Any = Literal["greedy", "sampled", "book"]
TEMPERATURE, CONTEXT = 0.6, 2000
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8-int8": {"dtype": "bfloat16", "quantize": "int8", "kv_dtype": "int8"},
    "int4-int8": {"dtype": "bfloat16", "quantize": "int4", "kv_dtype": "int8"},
}
# Columns of the printed table and their heads. Those of SAME stand above it where their rows are alike.
COLUMNS = {"storage": "storage", "prefix_len": "context", "category": "category", "task": "task", "text": "text"}
COLUMNS |= {"score": "score", "drafter": "drafter", "gamma": "gamma", "entries": "budget", "draft_weights": "weights"}
COLUMNS |= {"sequences": "prompts decoded", "acceptance_paired": "acceptance", "difference_interval": "difference"}
COLUMNS |= {"mean_accepted_length": "per round", "verify_ratio": "verify", "drafting_ratio": "drafts"}
COLUMNS |= {"marked_speedup": "speedup", "wall_speedup": "last row", "identical": "identical"}
SAME = ("storage", "context", "text", "gamma", "budget", "weights", "prompts decoded", "identical")
HEADS = {"per round": "tokens", "verify": "plain steps", "drafts": "plain steps", "last row": "speedup until it ends"}
CEILING = "self:full"
Number = int | Literal["auto"]
Sessions = dict[str | None, bench.Session]
Tasks = Sequence[tuple[Task, list[Example]]]
Configs = Sequence[tuple[str, tuple[DrafterConfig, ...]]]


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"draft": "--drafters", "draft_model": "--drafters", "prefix_len": "--contexts"}

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    output: Output = field(default_factory=Output)
    draft: DraftNumbers = field(default_factory=DraftNumbers)
    drafters: Annotated[tuple[str, ...] | None, arg(help_behavior_hint="(default: all without a second model)")] = None
    """drafters: names, KIND:CHECKPOINT (standalone or a head), or either with its policy (self:POLICY,
    eagle:CHECKPOINT=full); with text drafters before it (suffix+self), with its schedule or gamma after it
    (self@heuristic, self@5, or self@auto, which may take --auto_drafts instead). A run has a single checkpoint"""
    budgets: tuple[Number, ...] = ()  # each drafter that has a budget, once for each of these
    gammas: tuple[Number, ...] = ()  # each drafter whose name has no gamma, once for each of these
    texts: Annotated[tuple[TEXTS, ...], arg(help_behavior_hint="(default: by the temperature)")] = ()
    """kinds of text to draft; sampled: at --temperature, or at 0.6"""
    storages: tuple[Literal[tuple(STORAGES)], ...] = ()  # type: ignore[valid-type]
    """storages of the target as WEIGHTS-ENTRIES, or a dtype of both, all in memory together"""
    contexts: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: 2000)")] = ()  # tokens of the prompts
    num_prompts: Annotated[int | None, arg(help_behavior_hint="(default: B)")] = None  # prompts of each context
    prompts: str | None = None
    """whole prompts in place of stretches of the data set: a file or a known set, as in the benchmarks"""
    chat: bool = False  # decode --prompts as conversations through the chat template, by category
    tasks: tuple[str, ...] = ()
    """prompts with right answers, --num_prompts of each, of at most --contexts tokens: ruler:TASK, or longbench:FILE or
    infinitebench:FILE, a published .jsonl (reproduce/tasks/tasks.toml)"""
    categories: tuple[str, ...] = ()  # with --chat: only these
    per_category: int | None = None  # with --chat: conversations of each category, the first ones
    B: BatchSize = 8  # prompts decoded together
    gen_len: int = 64  # new tokens; with --chat, of each turn, at most; --tasks have their own number
    repeats: int = 1  # decodes of each batch by each drafter
    llama_cpp: bool = False  # time llama.cpp on a GGUF in the model's folder, too: pip install llama-cpp-python==0.3.36

    def check(self) -> None:
        """Errors: ConfigError."""
        self.target.require_trained()
        for name, least in {"gen_len": 2, "repeats": 1, "contexts": 1, "per_category": 1, "num_prompts": 1}.items():
            given = getattr(self, name)
            for number in given if isinstance(given, tuple) else [given] * (given is not None):
                require_at_least(name, number, least)
        given, defaults = vars(self) | vars(self.sampling), vars(Flags()) | vars(Sampling())
        for is_unused, why, *names in (
            (not self.chat, "these are no conversations", "categories", "per_category"),
            (self.prompts or self.chat, "prompts are taken whole, and all of them", "contexts", "num_prompts"),
            (SAMPLED not in self.kinds, "no text is sampled", "temperature", "top_k", "top_p", "min_p"),
        ):
            if is_unused and (unused := [name for name in names if given[name] != defaults[name]]):
                note_without_effect(unused, why)
        whole = [name for name in ("prompts", "chat", "tasks") if getattr(self, name)]
        if self.tasks and len(whole) > 1:
            refuse("tasks", whole[0], "no other prompts", "there are two sets of prompts", "leave one out")
        if self.tasks and self.gen_len != Flags.gen_len:
            refuse("gen_len", self.gen_len, "left out", "tasks have their own numbers of new tokens")
        if whole and BOOK in self.kinds:
            what = "a text that is teacher-forced is cut from the data set"
            refuse("texts", BOOK, f"{GREEDY} or {SAMPLED}", what, f"leave out {flag(whole[0])}")
        if BOOK in self.kinds and (self.num_prompts or self.B) % self.B:
            what = "teacher forcing needs a prompt in every row"
            refuse("num_prompts", self.num_prompts, f"a multiple of {flag('B')} {self.B}", what)
        require_appendable(self.output.output)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of text to draft."""
        return self.texts or ((SAMPLED if self.sampling.temperature > 0 else GREEDY),)

    def tasks_at(self, context: int | None) -> Tasks:
        """Return the tasks, with examples of at most `context` tokens. Errors: UserError."""
        if context is None or not self.tasks:
            return []
        n, seed, target = self.num_prompts or self.B, self.sampling.seed or 0, self.target.with_text()
        return tasks_of(self.tasks, n, context, seed, target, self.text.dataset)

    def sampling_of(self, text: str) -> Sampling:
        """Return how a kind of text is decoded."""
        given = self.sampling
        if text == SAMPLED:
            return given if given.temperature > 0 else replace(given, temperature=TEMPERATURE)
        return Sampling(repetition_penalty=given.repetition_penalty, min_tokens=given.min_tokens)


def named_configs(flags: Flags) -> Configs:
    """Return every drafter with its name, once for each budget and gamma that it can have, and after it the drafts that
    rounds may take instead. Errors: ConfigError."""
    names, given = flags.drafters, flags.draft.given()
    repeats_plain = SAMPLED not in flags.kinds or flags.sampling_of(SAMPLED).mode == "coupled"
    able = {name: drafters()[name] for name in ALONE if given.keys() >= {*required_options(drafters()[name])}}
    usual = [name for name, kind in able.items() if repeats_plain or Trait.NEEDS_BASELINE not in kind.TRAITS]
    chosen = [(name, parse_draft(name, "drafters", is_whole=True)) for name in names or usual]
    of_self = [given | options for _, options in chosen if options["draft"] == "self"]
    policies = {options.get("draft_policy", DEFAULT_POLICY) for options in of_self}
    if len(policies) > 1 and "full" not in policies:
        chosen.append((CEILING, parse_draft(CEILING, "drafters")))
    models = {options["draft_model"]: name for name, options in chosen if "draft_model" in options}
    if len(models) > 1:
        fix, what = "run the other model by itself, into the same file", "a session holds a single draft model"
        refuse("drafters", " ".join(models.values()), "a single checkpoint", what, fix)
    found = []
    for (name, options), budget, gamma in product(chosen, flags.budgets or [None], flags.gammas or [None]):
        varied = {"draft_budget": budget, "gamma": gamma}
        found.append((name, given | {key: value for key, value in varied.items() if value is not None} | options))

    def chooses(options: Mapping[str, Any]) -> bool:
        return AUTO in (options.get("gamma"), options.get("gamma_schedule"))

    if any(chooses(options) for _, options in found):
        # A budget that is chosen while decoding goes with a gamma that is.
        found = [pair for pair in found if pair[1].get("draft_budget") != AUTO or chooses(pair[1])]
    elif "auto_drafts" in given:
        note_without_effect(["auto_drafts"], "no drafter chooses its gamma")
    configs = flags.draft.choices(*(each if chooses(each) else each | {"auto_drafts": ()} for _, each in found))
    require_at_least("gamma", min(first.most_gamma for first, *_ in configs), 1)
    # A drafter without a budget is there once.
    return [*dict.fromkeys(zip((name for name, _ in found), configs, strict=True))]


def open_sessions(
    flags: Flags, configs: Configs, context: int | None, ids: list[list[int]] | None
) -> tuple[Sessions, Configs]:
    """Open a session for each storage, with room for the prompts and for every drafter, and leave out drafts that
    repeat another. ids: the prompts, if they are not those of the flags. Errors: UserError."""
    plans = dict[str | None, Plan]()
    for storage in flags.storages or (None,):  # all are checked before anything is loaded
        target = flags.target if storage is None else replace(flags.target, **STORAGES[storage])
        rows = Rows(flags.prompts, flags.num_prompts, stop_at_eos=flags.chat) if ids is None else Rows(stop_at_eos=True)
        sizes, sampling = Sizes(flags.B, context, flags.gen_len), flags.sampling_of(flags.kinds[0])
        run = RunConfig(target, flags.text, sizes, rows, sampling=sampling, output=flags.output)
        # A drafter that does not choose between caches leaves the memory before the next one is made.
        configs, plans[storage] = without_repeats(configs, bench.resolve_each(run, [each for _, each in configs], ids))
    n_continued = flags.gen_len if BOOK in flags.kinds else 0
    return {storage: bench.Session.of_plan(plan, n_continued) for storage, plan in plans.items()}, configs


def records_at(flags: Flags, configs: Configs, context: int | None, tasks: Tasks) -> Iterator[Record]:
    """Yield the records of a context, of its tasks, of whole prompts, or of the categories of conversations. Errors:
    UserError."""
    if tasks:
        flags = replace(flags, gen_len=max(task.new_tokens for task, _ in tasks))
        ids = [each.prompt for _, examples in tasks for each in examples]
        sessions, configs = open_sessions(flags, configs, None, ids)
        named = {"context": context, "texts_seed": flags.sampling.seed or 0}
        for task, examples in tasks:
            shorter = {storage: session.variant(gen_len=task.new_tokens) for storage, session in sessions.items()}
            batches = examples_of(next(iter(shorter.values())), task, examples)
            yield from measure(flags, configs, shorter, named | {"task": task.name}, batches)
    elif flags.chat:
        prompts = load_prompts(flags.prompts or str(ROOT / CHATS))
        categories = by_category(prompts, flags.categories, flags.per_category)
        template = flags.target.with_text().chat_template()
        ids = [longest_form(template, prompt, flags.gen_len) for prompt in chain(*categories.values())]
        sessions, configs = open_sessions(flags, configs, None, ids)
        for category, talks in categories.items():
            named = {"category": category, "conversations": len(talks)}
            yield from measure(flags, configs, sessions, named, turns_of(talks, template, flags.B))
    else:
        sessions, configs = open_sessions(flags, configs, context, None)
        yield from measure(flags, configs, sessions, {}, batches_of(next(iter(sessions.values()))))


def without_repeats(configs: Configs, run: Plan) -> tuple[Configs, Plan]:
    """Return the drafts without those that repeat another, and the run with these alone. Budgets that cover the run
    repeat each other and all entries (`self:full`), which stay; so does the first draft, the base of differences."""

    def effective(plan: DraftPlan) -> dict[str, Any]:
        options, whole = plan.config.options(), plan.budget_covers(run.target)
        kept = {key: value for key, value in options.items() if not whole or key not in vars(plan.policy)}
        return kept | ({"draft_policy": "full"} if whole else {})

    plans = [run.with_drafts(*drafts).candidates for _, drafts in configs]
    covers = [any(plan.budget_covers(run.target) for plan in each) for each in plans]
    options, kept = [[*map(effective, each)] for each in plans], list[int]()
    for n in sorted(range(len(configs)), key=lambda n: (n > 0, covers[n])):
        same = [configs[each] for each in kept if options[each] == options[n] and covers[each] <= covers[n]]
        if not same:
            kept.append(n)
            continue
        (name, drafts), (other, others) = configs[n], same[0]
        covered = f"with budget {drafts[0].options().get('draft_budget')}, which covers the run, repeats"
        say(f"note: {name} {'has the options of' if drafts == others else covered} {other}, and is left out")
    candidates = tuple(chain.from_iterable(plans[n] for n in sorted(kept)))
    return [configs[n] for n in sorted(kept)], replace(run, candidates=candidates).sized()


def measure(
    flags: Flags, configs: Configs, sessions: Sessions, named: dict[str, Any], batches: Iterable[Batch]
) -> Iterator[Record]:
    """Run every contender on every batch in turns, every second time in reverse, so that all share the drift of the
    machine. Yield a record for each storage, and for llama.cpp."""
    decoders, forced = list[Decoder](), list[Forced]()
    for session, text in product(sessions.values(), flags.kinds):
        drafting = partial(session.variant, sampling=flags.sampling_of(text))
        each = [(name, drafting(drafts=drafts)) for name, drafts in configs]
        if text == BOOK:
            forced += [Forced(name, text, variant) for name, variant in each if not variant.plan.chooses]
        else:
            decoders.append(plain := Decoder(PLAIN, text, drafting(drafts=())))
            decoders += [Decoder(name, text, variant, plain=plain) for name, variant in each]
    forced = [contender for contender in forced if not contender.needs_plain]
    others = peers(flags.target.model, flags.B, [first.gamma for _, (first, *_) in configs]) if flags.llama_cpp else []
    seconds = dict.fromkeys(sessions, 0.0)
    for n_batch, batch in enumerate(batches):
        for storage, session in sessions.items():
            seconds[storage] += bench.prefill(replace(session, prompts=batch.prompts))
        for repeat in range(flags.repeats):
            turn = [*decoders, *others][:: -1 if (n_batch + repeat) % 2 else 1]
            for contender in sorted(turn, key=lambda contender: contender.needs_plain):
                contender.run(batch, repeat)
        for contender in forced:
            contender.run(batch)
        if flags.chat:
            tokenizer = next(iter(sessions.values())).tokenizer
            batch.answer([tokenizer.decode(tokens) for tokens in decoders[0].outputs[0][-1].tokens])
    for storage, session in sessions.items():
        contenders = [each for each in (*decoders, *forced) if each.session.runner is session.runner]
        rows = [contender.row() for contender in contenders if contender.drafter != PLAIN]
        session.runner.drop_graphs()
        measured = {"storage": storage, "prompts": flags.prompts or (CHATS if flags.chat else None)} | named
        measured |= {"repeats": flags.repeats, "prefill_seconds": seconds[storage], "rows": rows}
        measured = {name: value for name, value in measured.items() if value is not None}
        yield bench.rounded(bench.record_of("compare", session, measured, ("draft", "auto_drafts", *SETTINGS)))
    for peer in others:
        sizes = {"B": flags.B, "prefix_len": next(iter(sessions.values())).plan.target.prefix_len}
        measured = {"benchmark": "compare", "storage": str(peer), **sizes, "rows": [peer.row()], **provenance()}
        yield bench.rounded(measured)


def main(flags: Flags) -> None:
    flags.check()
    configs = named_configs(flags)
    contexts = (None,) if flags.prompts or flags.chat else flags.contexts or (CONTEXT,)
    tasks, records = [flags.tasks_at(n) for n in contexts], list[Record]()  # all are read before any is run
    parts = (records_at(flags, configs, *each) for each in zip(contexts, tasks, strict=True))
    for record in chain.from_iterable(parts):
        append_record(flags.output.output, record)
        records.append(record)
    rows = with_differences(summary_rows(records), [f"drafter={configs[0][0]}"])
    drawn = shown([replace(column(name), head=head) for name, head in COLUMNS.items()], rows)
    same = [each for each in drawn if each.head in SAME and len({each.cell(row) for row in rows}) == 1]
    alike = ", ".join(f"{each.head} {each.cell(rows[0])}" for each in same)
    table = console(rows, drawn := [each for each in drawn if each not in same])
    heads = "; ".join(f"{each.head}: {HEADS[each.head]}" for each in drawn if each.head in HEADS)
    notes = [*bench.legend(table), *([f"  {heads}"] if heads else [])]
    if any(row["difference"] for row in rows):
        base = configs[0][0]
        budgets = {row["draft_budget"] for row in rows if row["drafter"] == base}
        of_budget = f", with the same budget, or else with {flags.budgets[0]} entries" if len(budgets) > 1 else ""
        notes.append(f"  difference: acceptance minus that of {base} on the same text{of_budget}, 95% interval")
    by_distinct = sorted(filter(bench.looping, rows), key=itemgetter("distinct_4gram_fraction"), reverse=True)
    worst = {row["text"]: row for row in by_distinct}  # of each kind
    notes += [f"  {text}: {note}" for text, row in worst.items() for note in bench.looping(row)]
    fewest = min(filter(bench.few_rounds, rows), key=itemgetter("steady_rounds"), default={})
    notes += [f"  {note}" for note in bench.few_rounds(fewest)]
    if any(row.get("contended") for row in rows):
        notes.append("  threads waited for processors: no speedup here is to be trusted")
    summary = {"benchmark": "compare_summary", "rows": bench.rounded(rows), **provenance()}
    publish(None, records[0] if len(records) == 1 else summary, *([f"  {alike}"] if same else []), table, *notes)


if __name__ == "__main__":
    cli.run(main, Flags)
