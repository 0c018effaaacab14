"""What a step costs while some rows of a batch decode, and what speculation gains where rows come and go.

    python reproduce/busy_rows.py --B 8 --prefix_len 2000 --rows 1 2 4 8 --num_prompts 24 --repeats 3

rows: plain steps and rounds while so many of the B rows decode, interleaved with those of a batch that has no others,
over random entries. stream: prompts of prefix_len / 2 to 2 * prefix_len tokens, each with gen_len / 2 to 3 / 2 *
gen_len new ones, through the B rows, plainly and with speculation in turns: seconds of decoding in all.
"""

import itertools
import operator
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import engine
from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import publish
from common.tables import Column, console
from engine.bench.config import AUTO, Output, Rows, RunConfig, Sampling, Sizes, Target, Text
from engine.bench.draft_flags import draft_flags

SelfDraft: Any = draft_flags(["self"])
# New tokens that there is room for where steps are timed, and seconds that each measurement may take.
ROOM, SECONDS = 64, 4.0
# Of the record those that were asked for, not those of the cache.
SIZES = ("prefix_len", "gen_len")
COLUMNS = [
    Column("rows", "busy rows"),
    Column("step_ms", "step", ".1f"),
    Column("step_ms_alone", "step of a batch of so many", ".1f"),
    Column("step_ratio", "ratio", ".2f"),
    Column("round_ms", "round", ".1f"),
    Column("round_ms_alone", "round of a batch of so many", ".1f"),
    Column("round_ratio", "ratio", ".2f"),
]


@dataclass(frozen=True)
class Flags:
    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sampling: Sampling = field(default_factory=Sampling)
    draft: SelfDraft = field(default_factory=SelfDraft)
    output: Output = field(default_factory=Output)
    B: int = 8  # rows of the batch
    prefix_len: int = 2000  # prompt tokens of busy rows; of the stream, of a middling one
    gen_len: int = 64  # new tokens of a middling row of the stream
    num_prompts: int = 24  # prompts of the stream
    rows: tuple[int, ...] = (1, 2, 4, 8)  # how many rows of the batch are busy
    repeats: int = 3  # how often all are run, interleaved

    def config(self) -> RunConfig:
        """Errors: ConfigError."""
        for name, least in (("prefix_len", 2), ("gen_len", 4), ("repeats", 1), ("num_prompts", self.B)):
            require_at_least(name, getattr(self, name), least)
        require_at_least("rows", min(self.rows), 1)
        require_at_least("B", self.B, max(self.rows))
        draft = self.draft.config()
        gamma, budget = draft.gamma, getattr(draft.policy, "draft_budget", 0)
        if AUTO in (gamma, budget):
            what, where = "a round of one kind is timed", f"{flag('gamma')} and {flag('draft_budget')}"
            raise ConfigError(what, where, f"{gamma} and {budget}", "numbers", f"name them: {flag('gamma')} 3")
        require_at_least("gamma", gamma, 1)
        sizes = Sizes(self.B, 2 * self.prefix_len, max(ROOM, self.gen_len * 3 // 2))
        rows = Rows(num_prompts=self.num_prompts)
        return RunConfig(self.target, self.text, sizes, rows, self.sampling, output=self.output, draft=draft)


def busy_rows(session: engine.Session, flags: Flags) -> list[dict[str, Any]]:
    """Of each number of busy rows the medians over repeats, in ms."""
    batches = [(n, kind) for n in sorted(set(flags.rows)) for kind in ("", "_alone")]
    seen: dict[tuple[int, str], list[tuple[float, float]]] = {batch: [] for batch in batches}
    for _, (n, kind) in itertools.product(range(flags.repeats), batches):
        seen[n, kind].append(step_and_round_ms(session, n, n if kind else flags.B, flags.prefix_len))
    rows = {n: {"rows": n} for n, _ in batches}
    for n, row in rows.items():
        for place, part in enumerate(("step", "round")):
            ms, alone = ([each[place] for each in seen[n, kind]] for kind in ("", "_alone"))
            row |= {f"{part}_ms": median(ms), f"{part}_ms_alone": median(alone)}
            row[f"{part}_ratio"] = median(map(operator.truediv, ms, alone))
    return list(rows.values())


def step_and_round_ms(session: engine.Session, n_busy: int, n_rows: int, prefix_len: int) -> tuple[float, float]:
    """While the first rows of a batch of `n_rows` are busy, over random entries."""
    from engine.bench.dummy_prefill import fill_with_noise
    from engine.cost_model.measure import measure_costs

    gamma = session.draft.gamma
    own = session.narrowed(n_rows, prefix_len + ROOM + gamma + 1)
    prompts = [[(row + i) % own.runner.vocab_size for i in range(prefix_len)] for row in range(n_busy)]
    fill_with_noise(own.runner, prompts)
    how = own.how | {"max_new_tokens": ROOM, "seconds": SECONDS}
    (costs,) = measure_costs(own.runner, [own.drafter()], prompts, gammas=[gamma], **how)
    return costs.plain_ms, costs.round_ms(gamma)


def stream(session: engine.Session, flags: Flags) -> dict[str, Any]:
    """Seconds of decoding all prompts, plainly and with speculation, one of each a repeat."""
    shares = [index * 7 % flags.num_prompts / flags.num_prompts for index in range(flags.num_prompts)]
    lengths = [round(flags.prefix_len * (0.5 + 1.5 * share)) for share in shares]
    limits = [round(flags.gen_len * (1.5 - share)) for share in shares]
    prompts = [prompt[:length] for prompt, length in zip(session.prompts, lengths, strict=True)]
    ragged, drafter = session.variant(prompts=prompts), session.drafter()
    plain, speculative = [], []
    for _ in range(flags.repeats):
        plain.append(ragged.generate(max_new_tokens=limits))
        speculative.append(ragged.generate(drafter, max_new_tokens=limits))
    seconds = [[output.stats.decode_seconds for output in outputs] for outputs in (plain, speculative)]
    same = [sum(map(operator.eq, one.tokens, other.tokens)) for one, other in zip(plain, speculative, strict=True)]
    return {
        "prompts": len(prompts),
        "plain_seconds": seconds[0],
        "seconds": seconds[1],
        "speedup": median(map(operator.truediv, *seconds)),
        "acceptance_rate": speculative[0].stats.counts.acceptance_rate,
        "identical_rows": min(same) if session.sampling.reproducible else None,
    }


def main(flags: Flags) -> None:
    from engine.bench.record import record_of, rounded

    session = engine.Session.open(flags.config())
    streamed = stream(session, flags)
    rows = busy_rows(session, flags)
    sizes = {name: getattr(flags, name) for name in SIZES}
    measured = rounded({**sizes, "repeats": flags.repeats, "busy_rows": rows, "stream": streamed})
    publish(flags.output.output, record_of("busy_rows", session, measured, SIZES), console(rows, COLUMNS))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
