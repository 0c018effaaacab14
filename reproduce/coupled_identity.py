"""One coupled sample, many ways to decode it: drafters, gammas, budgets, row orders, batch sizes.

    python reproduce/coupled_identity.py --output reproduce/results/coupled_identity.jsonl

Rows of different prompt lengths are sampled once without a draft; every other decoding has to emit the same
tokens. Prints a table and appends one record per decoding; exit code 1 if a row differs. In bfloat16 rows may
differ at near-ties: reproduce/certify.py tells those from errors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from tyro.conf import arg

import engine
from common import cli
from common.errors import ConfigError, UserError, flag, require_at_least
from common.jsonl import append_or_put_off, publish
from common.provenance import provenance
from common.say import dtype_name, say
from engine.bench.config import Output, Rows, RunConfig, Sampling, Sizes, Target, Text
from engine.drafters.config import DrafterConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.saved_text import OracleConfig
from engine.drafters.self_speculation import SelfConfig
from kv_cache.streaming import Streaming

SHORTER_BY = 37  # tokens, from each row to the next
MAX_GAMMA, N_SINK, SEED = 5, 4, 7
# Behind the sinks there is room for one verification block.
LEAST_BUDGET = N_SINK + MAX_GAMMA + 1


@dataclass(frozen=True)
class Sampled(Sampling):
    """The distribution of the next token, and the rule by which drafts are verified."""

    seed: Annotated[int | None, arg(help_behavior_hint=f"(default: {SEED})")] = None
    """key of the random numbers"""


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"draft_budget": "--budgets", "gamma": f"gamma {MAX_GAMMA}"}

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sampling: Sampled = field(default_factory=lambda: Sampled(temperature=0.6, verification="coupled"))
    output: Output = field(default_factory=Output)
    B: int = 4
    """rows decoded together"""
    prefix_len: int = 2000
    """prompt tokens of the longest row"""
    gen_len: int = 64
    """new tokens per row"""
    num_prompts: Annotated[int | None, arg(help_behavior_hint="(default: B)")] = None
    """prompts in all, at least B"""
    stop_at_eos: bool = False
    """end a row at the model's end token"""
    budgets: tuple[int, ...] = (64, 512)
    """KV budgets of the draft"""

    def config(self) -> RunConfig:
        """The run, with the largest draft that any of them makes. Errors: ConfigError."""
        from engine.bench.resolved import resolve_sampling

        require_at_least("budgets", min(self.budgets), LEAST_BUDGET)
        sampling = self.sampling
        if sampling.seed is None and sampling.temperature:
            sampling = replace(sampling, seed=SEED)
        resolved = resolve_sampling(sampling)
        if not resolved.reproducible:
            raise ConfigError(
                "samples of this mode depend on the drafter, by design",
                where=flag("verification"),
                seen=resolved.mode,
                required="coupled, or greedy at temperature 0",
                fix=f"use {flag('verification')} coupled",
            )
        return RunConfig(
            target=self.target,
            text=self.text,
            sizes=Sizes(self.B, self.prefix_len, self.gen_len),
            rows=Rows(num_prompts=self.num_prompts, stop_at_eos=self.stop_at_eos),
            sampling=sampling,
            output=self.output,
            draft=streaming(MAX_GAMMA, max(self.budgets)),
        )


@dataclass(frozen=True)
class Decoding:
    """What drafts, the order in which the prompts are handed in, and how many rows are decoded together."""

    name: str
    draft: DrafterConfig | None
    order: list[int]
    n_rows: int


def streaming(gamma: int, budget: int) -> SelfConfig:
    return SelfConfig(gamma=gamma, policy=Streaming(draft_budget=budget, n_sink=N_SINK))


def decodings(n_prompts: int, n_rows: int, budgets: Sequence[int]) -> list[Decoding]:
    """What has to give the baseline's tokens. A prompt's place is also its request id."""
    given, half = list(range(n_prompts)), max(1, n_rows // 2)
    pairs = [(gamma, budget) for gamma in (1, 3, 5) for budget in budgets]
    drafts: dict[str, DrafterConfig] = {}
    drafts |= {f"self, gamma {gamma}, budget {budget}": streaming(gamma, budget) for gamma, budget in pairs}
    drafts |= {f"n-gram, gamma {gamma}": NGramConfig(gamma=gamma) for gamma in (1, 5)}
    drafts |= {f"oracle, gamma {MAX_GAMMA}": OracleConfig(gamma=MAX_GAMMA)}
    return [
        *(Decoding(name, draft, given, n_rows) for name, draft in drafts.items()),
        Decoding("rows reversed, self, gamma 3", streaming(3, budgets[-1]), given[::-1], n_rows),
        Decoding("rows rotated, no draft", None, given[1:] + given[:1], n_rows),
        Decoding(f"rows at a time: {half}, n-gram, gamma 3", NGramConfig(gamma=3), given, half),
    ]


def run_one(session: engine.Session, one: Decoding, baseline: list[list[int]]) -> dict[str, Any]:
    """Decode so; the record of how it compares with the baseline."""
    from engine.bench.record import identical_rows, rounded, tokens_sha256

    prompts = session.prompts
    session = session.variant(draft=one.draft, prompts=[prompts[i] for i in one.order])
    if one.n_rows != session.plan.n_rows:
        session = session.narrowed(one.n_rows, session.plan.capacity)
    out = session.generate(session.drafter(texts=baseline) if one.draft else None, request_ids=one.order)
    tokens = [out.tokens[one.order.index(i)] for i in range(len(one.order))]
    counts = out.stats.counts
    return rounded(
        {
            "benchmark": "coupled_identity",
            "model": session.name,
            "dtype": dtype_name(session.plan.dtype),
            "way": one.name,
            "B": one.n_rows,
            "prompt_lengths": [len(prompt) for prompt in prompts],
            "gen_len": session.plan.gen_len,
            "verification": session.sampling.mode,
            **asdict(session.sampling.params),
            "identical_sequences": identical_rows(tokens, baseline),
            "sequences": len(tokens),
            "tokens_sha256": tokens_sha256(tokens),
            "acceptance_rate": counts.acceptance_rate,
            "mean_accepted_length": counts.mean_accepted_length,
            **provenance(),
        }
    )


def main(flags: Flags) -> None:
    session = engine.Session.open(flags.config())
    prompts = [prompt[: max(2, len(prompt) - SHORTER_BY * row)] for row, prompt in enumerate(session.prompts)]
    session = session.variant(prompts=prompts)
    say("plain decoding")
    baseline = session.generate().tokens
    put_off: list[UserError] = []
    lines, records = ["| way | identical rows | acceptance | tokens per round |", "|---|---|---|---|"], []
    for one in decodings(len(session.prompts), session.plan.n_rows, flags.budgets):
        record = run_one(session, one, baseline)
        append_or_put_off(flags.output.output, record, put_off)
        records.append(record)
        same, rate = f"{record['identical_sequences']} of {record['sequences']}", record["acceptance_rate"]
        lines.append(f"| {one.name} | {same} | {'-' if rate is None else rate} | {record['mean_accepted_length']} |")
        say(f"{one.name}: {same} rows identical")
    differing = sum(record["sequences"] - record["identical_sequences"] for record in records)
    summary = {"benchmark": "coupled_identity", "ways": len(records), "rows_that_differ": differing}
    publish(None, summary, *lines, put_off=put_off)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
