"""Contenders: ways to decode that are compared on the same batches, and the rows of what each measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from statistics import fmean, median

import bench
from engine.controller import Controller, Fixed
from engine.evaluation.teacher_forcing import forced_acceptance
from engine.stats import Counts, Stats, counts_by_row, ratio_standard_error, total
from engine.timing import PhaseTimer
from reproduce.helpers.batches import Batch
from reproduce.helpers.records import Record, grouped

# Settings that differ between the rows of a record.
SETTINGS = ("draft_model", "gamma", "draft_policy", "draft_budget", "draft_dtype", "draft_weights", "draft_kv_dtype")
SETTINGS += ("draft_weights_share", "draft_entries_share", "draft_kv_share", "temperature", "verification", "seed")
SETTINGS += ("top_k", "top_p", "min_p")
# Medians over repeats of what a contender and plain decoding in the same repeat measured.
MEDIANS = (
    *("speedup", "speedup_standard_error", "wall_speedup"),
    *("baseline_tokens_per_second", "decode_tokens_per_second", "baseline_step_ms"),
    *("round_ms", "draft_step_ms", "verify_step_ms"),
)
# What each repeat chose, and the costs that it chose by.
OF_REPEATS = ("choices", "measured_costs", "measured_costs_seconds")
# Figures of categories that are summed, and settings that are equal in all rows of a sum.
SUMMED = ("sequences", "identical_sequences", "rounds", "drafted", "verified", "accepted", "emitted", "seconds")
SUMMED += ("baseline_emitted", "baseline_seconds")
SHARED = ("model", "prompts", "B", "gen_len", "verification", "temperature", "drafter", "gamma", "draft_budget")
SHARED += ("storage", "text", "draft_weights")
SIZES = ("category", "task", "context", "dataset", "prefix_len")


@dataclass(frozen=True)
class Contender:
    """A drafter on a kind of text. by_source: counts of the rows of each text of a batch's `sources`."""

    drafter: str
    text: str
    session: bench.Session
    by_source: dict[int, list[Counts]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.drafter}, {self.text}"

    @property
    def needs_plain(self) -> bool:
        """True if it drafts the tokens of plain decoding, which therefore has to run before."""
        return self.session.plan.needs_baseline

    def count(self, batch: Batch, rows: Sequence[Counts]) -> None:
        for source, counts in zip(batch.sources, rows, strict=True):
            self.by_source.setdefault(source, []).append(counts)

    def settings(self) -> Record:
        """Return the drafter's name and options, and how its text is sampled."""
        known, config = bench.settings_record(self.session), bench.nested(self.session.plan.config)
        options = bench.options_of({"config": config})
        settings = {name: known.get(name) for name in SETTINGS}
        if "draft_budget" not in options:
            settings["draft_budget"] = None  # all entries, however many
        return {"drafter": self.drafter, "text": self.text} | options | settings

    def acceptance(self) -> Record:
        """Return how many drafts were accepted. Rows of one text depend on each other, and count as one."""
        each = [total(rows) for rows in self.by_source.values()]
        return {"rounds": total(each).rounds} | bench.acceptance(each) | {"by_row": counts_by_row(each)}


@dataclass(frozen=True)
class Decoder(Contender):
    """A contender that decodes. plain: the contender without drafts. outputs: by repeat and batch. costs: those by
    which each repeat chose its drafts. scores: of the first repeat's answers to a task."""

    plain: Decoder | None = None
    outputs: dict[int, list[bench.Decoded]] = field(default_factory=dict)
    costs: dict[int, bench.RunCosts | None] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)

    def run(self, batch: Batch, repeat: int) -> None:
        """Decode a batch from the prefilled state with a new drafter, which knows nothing of other runs."""
        session = replace(self.session, prompts=batch.prompts, numbered_from=batch.first)
        drafters, device = [], session.runner.device
        controller: Controller = Fixed(None)
        if self.plain:
            known = [*[()] * batch.first, *self.plain.outputs[repeat][-1].tokens] if self.needs_plain else None
            drafters = session.drafters(known)
        bench.warm_up(session, drafters)
        if drafters:
            if repeat not in self.costs:
                self.costs[repeat] = bench.costs_of(session, drafters)
            controller = bench.make_controller(session, drafters, self.costs[repeat])
        timer = PhaseTimer(device) if device.type == "cpu" else None  # elsewhere timed phases take longer
        output = bench.decode(session, str(self), controller, timer)
        self.outputs.setdefault(repeat, []).append(output)
        self.count(batch, output.stats.rows)
        if batch.score and session.tokenizer and repeat == 0:
            self.scores.extend(batch.score([session.tokenizer.decode(tokens) for tokens in output.tokens]))

    def row(self) -> Record:
        """Return the row of a record. Lists have a value for each repeat; counts and seconds are sums over repeats."""
        assert self.plain is not None
        runs, pairs = list[Record](), list[tuple[bench.Decoded, bench.Decoded]]()
        for repeat, outputs in self.outputs.items():
            plain, output = in_sequence(self.plain.outputs[repeat]), in_sequence(outputs)
            timed = {"phase times": output} if output.phases else {}
            passes = {"baseline": plain, "speculation": output, **timed}
            runs.append(bench.make_record("", self.session, bench.PassResults(0.0, passes, self.costs[repeat])))
            pairs.append((plain, output))
        values = {name: [run.get(name) for run in runs] for name in (*MEDIANS, *OF_REPEATS)}
        lists = {name: [value for value in values[name] if value] or None for name in OF_REPEATS}
        row = self.settings() | self.acceptance() | lists | {"speedups": values["speedup"]}
        row |= {name: None if None in values[name] else median(values[name]) for name in MEDIANS}
        row |= {name: runs[0][name] for name in ("sequences", "tokens_sha256", "distinct_4gram_fraction")}
        same = [run["identical_sequences"] for run in runs]
        row |= {"identical_sequences": None if None in same else min(same)}
        row |= {"steady_rounds": min(run["steady_rounds"] for run in runs)}
        row |= {"seconds": sum(output.stats.decode_seconds for _, output in pairs)}
        row |= {"baseline_emitted": sum(plain.stats.counts.emitted for plain, _ in pairs)}
        row |= {"baseline_seconds": sum(plain.stats.decode_seconds for plain, _ in pairs)}
        if scores := self.plain.scores:  # drafts change no token
            error = ratio_standard_error([(score, 1.0) for score in scores])
            row |= {"score": fmean(scores), "score_standard_error": error, "scores": scores}
        parts = [[output.phases.get(name, ()) for name in ("resume", "draft")] for _, output in pairs]
        phases = [sum(both) for each in parts for both in zip(*each, strict=True)]
        row |= {"drafting_ms": 1e3 * fmean(phases) if phases else None}
        contended = [kind["contended"] for run in runs for kind in run["contention"].values()]
        return row | {"contended": any(contended)}


@dataclass(frozen=True)
class Forced(Contender):
    """A contender that drafts for a text that neither model wrote. written: its tokens."""

    written: list[list[int]] = field(default_factory=list)

    def run(self, batch: Batch) -> None:
        session, written = self.session, batch.continuations
        self.count(batch, forced_acceptance(session.runner, session.drafter(), batch.prompts, written))
        self.written.extend(written)

    def row(self) -> Record:
        text = {"tokens_sha256": bench.tokens_sha256(self.written)}
        text |= {"distinct_4gram_fraction": bench.distinct_4gram_fraction(self.written)}
        return self.settings() | self.acceptance() | text


def in_sequence(outputs: Sequence[bench.Decoded]) -> bench.Decoded:
    """Join the outputs of batches that were decoded one after the other."""
    each = [output.stats for output in outputs]
    rows, rounds = (tuple(chain.from_iterable(part)) for part in zip(*((x.rows, x.rounds) for x in each), strict=True))
    stats = Stats(rows, (rounds,), sum(x.prefill_seconds for x in each), sum(x.draft_prefill_seconds for x in each))
    return bench.joined(outputs, stats)


def summary_rows(records: Iterable[Record]) -> list[Record]:
    """Return the rows of all records; in categories, each drafter's are followed by their sum."""
    pairs = ((record | row, row) for record in records for row in record["rows"])
    rows = [{name: both.get(name) for name in (*SHARED, *SIZES, *row)} for both, row in pairs]
    if not any(row["category"] for row in rows):
        return rows
    sums = list[Record]()
    for group in grouped(rows, itemgetter(*SHARED)).values():
        sums += [*group, *([_sum_of(group)] if len(group) > 1 and "sequences" in group[0] else [])]
    return sums


def _sum_of(rows: Sequence[Record]) -> Record:
    """Return the sums of categories, and their rates. Seconds end with the last row of each batch."""
    sums = {name: None if rows[0][name] is None else sum(row[name] for row in rows) for name in SUMMED}
    plain, drafted = (bench.ratio(sums[f"{of}emitted"], sums[f"{of}seconds"]) for of in ("baseline_", ""))
    by_row = [counts for row in rows for counts in row.get("by_row", ())]
    text = " ".join(filter(None, (row.get("tokens_sha256") for row in rows)))
    pairs = [(counts["accepted"], counts["verified"]) for counts in by_row if counts["verified"]]
    rates = {"acceptance_rate": bench.ratio(sums["accepted"], sums["verified"])}
    rates |= {"acceptance_standard_error": ratio_standard_error(pairs)}
    rates |= {"mean_accepted_length": bench.ratio(sums["emitted"], sums["rounds"])}
    rates |= {"wall_speedup": bench.ratio(drafted, plain), "contended": any(row.get("contended") for row in rows)}
    named = {name: rows[0][name] for name in SHARED} | {"category": "all", "by_row": by_row, "tokens_sha256": text}
    return named | sums | rates
