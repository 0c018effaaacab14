"""Measure what drafters gain by context: plain decoding and each drafter in turns, behind the same prompts.

    python -m reproduce.context_sweep --drafters self suffix ngram --contexts 512 2000 7500
    python -m reproduce.context_sweep --prompts reproduce/prompts/copying.jsonl --drafters ngram suffix+self
    python -m reproduce.context_sweep --dataset HEADS/held_back.txt --temperature 0.6 --auto_drafts self suffix \\
        --drafters eagle:HEADS/eagle eagle:HEADS/eagle=full eagle:HEADS/eagle@auto self --output lengths.jsonl

A record holds the sums over the prompts of a context, each decoded by every drafter after a single prefill: speedups
are total tokens over total seconds, so a prompt counts by the time that it takes. Seconds end with a batch's last row.
`drafting_ms` is the mean time of a round before the target verifies, on a CPU. Drafters with `@auto` choose before
every round between the drafter and `--auto_drafts`, by costs that are measured behind the first prompts of every
context. Neither the time of measuring nor that of prefill, the target's and the drafter's, counts. With `--repeats`,
the fastest decode of each prompt counts: all do the same work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated

from tyro.conf import arg

import bench
from bench.config import BatchSize, Rows, RunConfig, Sizes, Text
from common import cli
from common.errors import require_at_least
from common.jsonl import append_record, publish, require_appendable
from common.say import note_without_effect
from common.tables import console
from engine.counts import Counts
from engine.drafters.config import DrafterConfig
from engine.timing import PhaseTimer
from reproduce.helpers.columns import of
from reproduce.helpers.records import Record
from reproduce.spec_bench import PLAIN, SETTINGS, Drafters, counted, open_session, settings_of, summed, variants

CONTEXTS = (512, 1000, 2000, 4000, 7500)
NUM_PROMPTS = 5
COLUMNS = "prefix_len drafter gamma acceptance mean_accepted_length drafting_ratio speedup identical"


@dataclass(frozen=True)
class Flags(Drafters):
    text: Text = field(default_factory=Text)
    contexts: Annotated[tuple[int, ...] | None, arg(help_behavior_hint=f"(default: {CONTEXTS})")] = None
    """tokens of the prompts"""
    prompts: str | None = None  # whole prompts, like in the benchmarks, in place of stretches of the data set
    num_prompts: Annotated[int | None, arg(help_behavior_hint=f"(default: {NUM_PROMPTS})")] = None
    """prompts of each context"""
    B: BatchSize = 1  # prompts decoded together
    gen_len: int = 128  # new tokens
    repeats: int = 1  # decodes of each drafter behind each prompt, in turns, of which the fastest counts

    def run(self, context: int | None) -> RunConfig:
        n_prompts = NUM_PROMPTS if self.num_prompts is None else self.num_prompts
        rows = Rows(self.prompts, num_prompts=None if self.prompts else n_prompts)
        sizes = Sizes(self.B, context, self.gen_len)
        return RunConfig(self.target, self.text, sizes, rows, sampling=self.sampling, output=self.output)


def measure(session: bench.Session, configs: Mapping[str, Sequence[DrafterConfig]], repeats: int) -> list[Record]:
    """Return a row for each drafter: the sums over all prompts of the session."""
    sessions = {PLAIN: session.variant(draft=None), **variants(session, configs)}
    parts: dict[str, list[Record]] = {name: [] for name in configs}
    each: dict[str, list[Counts]] = {name: [] for name in configs}
    drafting: dict[str, list[float]] = {name: [] for name in configs}
    steps: list[float] = []
    costs: dict[str, bench.RunCosts | None] = {}
    device, n_rows = session.runner.device, session.runner.max_batch
    # Drafters that are made from plain decoding's text come last.
    last = [name for name in configs if sessions[name].plan.needs_baseline]
    turned = [name for name in sessions if name not in last]
    for first in range(0, len(session.prompts), n_rows):
        prompts = session.prompts[first : first + n_rows]
        bench.prefill(replace(session, prompts=prompts))
        seen: dict[str, bench.Decoded] = {}
        for name in (*turned, *last) * repeats:
            here = replace(sessions[name], prompts=prompts, numbered_from=first)
            texts = [*[()] * first, *seen[PLAIN].tokens] if name in last else None
            drafters, pacing = [] if name == PLAIN else here.drafters(texts), None
            bench.warm_up(here, drafters)
            if drafters:
                if name not in costs:
                    costs[name] = bench.costs_of(here, drafters, whole=True)
                pacing = bench.make_pacing(here, drafters, costs[name])
            timer = PhaseTimer(device) if device.type == "cpu" else None  # elsewhere timed phases take longer
            decoded = bench.decode(here, f"{name}, {len(prompts[0])} tokens", phase=timer, pacing=pacing)
            seen[name] = min(decoded, seen.get(name, decoded), key=lambda each: each.stats.decode_seconds)
        steps += [round_.seconds for round_ in seen[PLAIN].stats.rounds]
        for name in configs:
            parts[name].append(counted(seen[PLAIN], seen[name], session.plan.reproducible))
            each[name] += seen[name].stats.rows
            phases = seen[name].phases
            drafting[name] += map(sum, zip(phases.get("resume", ()), phases.get("draft", ()), strict=True))
        turned.reverse()
    rows = []
    for name in configs:
        means = {"baseline_step_ms": 1e3 * fmean(steps)}
        means["drafting_ms"] = 1e3 * fmean(drafting[name]) if drafting[name] else None
        rows.append(settings_of(name, sessions[name]) | summed(parts[name], each[name]) | means)
    return rows


def record_at(context: int | None, flags: Flags, configs: Mapping[str, Sequence[DrafterConfig]]) -> Record:
    """Return the record of a context, or of whole prompts, appended to the output. Errors: UserError."""
    session = open_session(flags.run(context), list(configs.values()))
    rows = measure(session, configs, flags.repeats)
    text = session.plan.config.rows.prompts or session.plan.dataset
    measured = {"text": text, "repeats": flags.repeats, "rows": rows}
    record = bench.record_of("context_sweep", session.variant(draft=None), bench.rounded(measured), SETTINGS)
    append_record(flags.output.output, record)
    return record


def main(flags: Flags) -> None:
    require_at_least("contexts", min(flags.contexts or CONTEXTS), 1)
    require_at_least("gen_len", flags.gen_len, 2)
    require_at_least("repeats", flags.repeats, 1)
    require_appendable(flags.output.output)
    given = [name for name in ("contexts", "num_prompts") if getattr(flags, name) is not None]
    if flags.prompts and given:
        note_without_effect(given, "prompts are taken whole, and all of them")
    configs = flags.configs()
    records = [record_at(size, flags, configs) for size in ((None,) if flags.prompts else flags.contexts or CONTEXTS)]
    rows = [record | row for record in records for row in record["rows"]]
    publish(None, records[-1], console(rows, of(COLUMNS)))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
