"""One coupled sample, many ways to decode it: drafters, gammas, budgets, row orders, batch sizes.

    python reproduce/coupled_identity.py --output reproduce/results/coupled_identity.jsonl

Rows of different prompt lengths are sampled once without a draft; every other decoding has to emit the same
tokens. Prints a table and appends one record per decoding; exit code 1 if a row differs. In bfloat16 rows may
differ at near-ties: reproduce/certify.py tells those from errors.
"""

import itertools
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

from tyro.conf import arg

import engine
from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import append_or_put_off, publish
from common.say import say
from common.tables import Column, markdown
from engine.bench.config import Output, Rows, RunConfig, Sampling, Sizes, Target, Text
from engine.drafters.config import DrafterConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.saved_text import OracleConfig
from engine.drafters.self_speculation import SelfConfig
from kv_cache.streaming import Streaming
from reproduce.paper.columns import of

SHORTER_BY = 37  # tokens, from each row to the next
MAX_GAMMA, N_SINK, SEED = 5, 4, 7
# Behind the sinks there is room for one verification block.
LEAST_BUDGET = N_SINK + MAX_GAMMA + 1
COLUMNS = of(Column("way", "way", align="<"), "identical", "acceptance_rate", "mean_accepted_length")


@dataclass(frozen=True)
class Sampled(Sampling):
    """The distribution of the next token, and the rule by which drafts are verified."""

    seed: Annotated[int | None, arg(help_behavior_hint=f"(default: {SEED})")] = None  # key of the random numbers


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"draft_budget": "--budgets", "gamma": f"gamma {MAX_GAMMA}"}

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sampling: Sampled = field(default_factory=lambda: Sampled(temperature=0.6, verification="coupled"))
    output: Output = field(default_factory=Output)
    B: int = 4  # rows decoded together
    prefix_len: int = 2000  # prompt tokens of the longest row
    gen_len: int = 64  # new tokens per row
    num_prompts: Annotated[int | None, arg(help_behavior_hint="(default: B)")] = None  # prompts in all, at least B
    stop_at_eos: bool = False  # end a row at the model's end token
    budgets: tuple[int, ...] = (64, 512)  # KV budgets of the draft

    def config(self) -> RunConfig:
        """The run, with the largest draft that any of them makes. Errors: ConfigError."""
        from engine.bench.resolved import resolve_sampling

        require_at_least("budgets", min(self.budgets), LEAST_BUDGET)
        sampling = self.sampling
        if sampling.seed is None and sampling.temperature:
            sampling = replace(sampling, seed=SEED)
        resolved, mode = resolve_sampling(sampling), flag("verification")
        if not resolved.reproducible:
            what = "samples of this mode depend on the drafter, by design"
            required = "coupled, or greedy at temperature 0"
            raise ConfigError(what, mode, resolved.mode, required, f"use {mode} coupled")
        sizes = Sizes(self.B, self.prefix_len, self.gen_len)
        rows = Rows(num_prompts=self.num_prompts, stop_at_eos=self.stop_at_eos)
        draft = streaming(MAX_GAMMA, max(self.budgets))
        return RunConfig(self.target, self.text, sizes, rows, sampling, output=self.output, draft=draft)


class Way(NamedTuple):
    """What drafts, the order in which the prompts are handed in, and how many rows are decoded together."""

    name: str
    draft: DrafterConfig | None
    order: list[int]
    n_rows: int


def streaming(gamma: int, budget: int) -> SelfConfig:
    return SelfConfig(gamma=gamma, policy=Streaming(draft_budget=budget, n_sink=N_SINK))


def ways(n_prompts: int, n_rows: int, budgets: tuple[int, ...]) -> list[Way]:
    """What has to give the baseline's tokens. A prompt's place is also its request id."""
    given, half = list(range(n_prompts)), max(1, n_rows // 2)
    pairs = itertools.product((1, 3, 5), budgets)
    return [
        *(Way(f"self, gamma {g}, budget {budget}", streaming(g, budget), given, n_rows) for g, budget in pairs),
        *(Way(f"n-gram, gamma {gamma}", NGramConfig(gamma=gamma), given, n_rows) for gamma in (1, 5)),
        Way(f"oracle, gamma {MAX_GAMMA}", OracleConfig(gamma=MAX_GAMMA), given, n_rows),
        Way("rows reversed, self, gamma 3", streaming(3, budgets[-1]), given[::-1], n_rows),
        Way("rows rotated, no draft", None, given[1:] + given[:1], n_rows),
        Way(f"rows at a time: {half}, n-gram, gamma 3", NGramConfig(gamma=3), given, half),
    ]


def compared(session: engine.Session, way: Way, baseline: list[list[int]]) -> dict:
    """Decode so; the record of how it compares with the baseline."""
    from engine.bench.record import identical_rows, record_of, rounded, tokens_sha256

    lengths = list(map(len, session.prompts))
    session = session.variant(draft=way.draft, prompts=[session.prompts[i] for i in way.order])
    if way.n_rows != session.plan.n_rows:
        session = session.narrowed(way.n_rows, session.plan.capacity)
    out = session.generate(session.drafter(texts=baseline) if way.draft else None, request_ids=way.order)
    tokens = [out.tokens[way.order.index(i)] for i in range(len(way.order))]
    measured = {
        "way": way.name,
        "prompt_lengths": lengths,
        "identical_sequences": identical_rows(tokens, baseline),
        "sequences": len(tokens),
        "tokens_sha256": tokens_sha256(tokens),
        "acceptance_rate": out.stats.counts.acceptance_rate,
        "mean_accepted_length": out.stats.counts.mean_accepted_length,
    }
    return rounded(record_of("coupled_identity", session, measured))


def main(flags: Flags) -> None:
    session = engine.Session.open(flags.config())
    prompts = [prompt[: max(2, len(prompt) - SHORTER_BY * row)] for row, prompt in enumerate(session.prompts)]
    session = session.variant(prompts=prompts)
    say("plain decoding")
    baseline = session.generate().tokens
    records = []
    for way in ways(len(prompts), session.plan.n_rows, flags.budgets):
        records.append(compared(session, way, baseline))
        append_or_put_off(flags.output.output, records[-1], session.put_off)
        say(f"{way.name}: {records[-1]['identical_sequences']} of {len(prompts)} rows identical")
    differing = sum(record["sequences"] - record["identical_sequences"] for record in records)
    summary = {"benchmark": "coupled_identity", "ways": len(records), "rows_that_differ": differing}
    publish(None, summary, markdown(records, COLUMNS), put_off=session.put_off)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
