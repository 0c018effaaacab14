"""foretoken.py latency: ms per generated token of several models, plain and speculative."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from tyro.conf import Positional, arg

from bench.config import DEFAULT_MODEL, BatchSize, ComparedSampling, Output, Rows, Sizes, Target, Text
from bench.draft_flags import DraftFlags
from bench.passes import decode_batches
from bench.plan import Plan
from bench.record import acceptance, nested, rounded, settings_record
from bench.session import Session
from bench.table import reads_text
from common.contention import contention, usage_so_far
from common.errors import require_at_least
from common.jsonl import publish
from common.provenance import provenance
from common.say import say
from common.tables import Column, console
from engine.generation import GenerateOutput
from engine.stats import acceptance_text, total
from models.names import Scheme
from terminal.models import ModelFlags, PositionalTarget, plan_in_turns

SEVERAL: Any = arg(metavar="[TARGET ...]", help_behavior_hint="(default: the built-in model)")
LENGTHS = {"short": 48, "long": 3000}
COLUMNS = [
    Column("model", "model", align="<"),
    Column(lambda row: row["quantize"] or row["dtype"], "weights", align="<"),
    Column(lambda row: row.get("draft_model") or row["draft"], "draft", missing="plain", align="<"),
    Column(reads_text, "a draft step reads", align="<"),
    Column("median_ms", "median ms", ".1f"),
    Column("p90_ms", "p90 ms", ".1f"),
    Column("spread_ms", "p90 - p10", ".1f"),
    Column("tokens_per_second", "tokens/s", ".1f"),
    Column("speedup", "speedup", ".2f"),
    Column(acceptance_text, "acceptance"),
]


@dataclass(frozen=True)
class Targets(PositionalTarget):
    """The target models, how they are stored, and what they run on."""

    model: Positional[Annotated[tuple[str, ...], SEVERAL]] = ()  # type: ignore[assignment]
    """converted checkpoints, one after another: each a model.pth, or its folder"""
    quantize: tuple[Scheme, ...] = ()  # type: ignore[assignment]
    """measure each model in these, too"""

    def each(self) -> Iterator[Target]:
        for model in self.model or (DEFAULT_MODEL,):
            for scheme in dict.fromkeys((None, *self.quantize)):
                yield PositionalTarget(**vars(self) | {"model": model, "quantize": scheme})


@dataclass(frozen=True, kw_only=True)
class Latency(ModelFlags):
    """ms per generated token of models and their quantised forms, plain and speculative. Unless --draft_budget is
    given, a draft's cache keeps half of a prompt"""

    FLAGS: ClassVar[dict[str, str]] = ModelFlags.FLAGS | {"prefix_len": "--length"}

    target: Targets = field(default_factory=Targets)
    draft: DraftFlags = field(default_factory=DraftFlags)  # type: ignore[assignment]
    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    text: Text = field(default_factory=Text)
    output: Output = field(default_factory=Output)
    length: Literal["short", "long"] | int = "short"
    """tokens of a prompt, which is a stretch of the data set; short: 48, long: 3000"""
    nb_prompts: int = 15  # batches of prompts that are measured, after a batch that warms up
    B: BatchSize = 1  # rows decoded together, each with a different prompt
    gen_len: int = 64  # new tokens per row

    def run(self) -> None:
        require_at_least("nb_prompts", self.nb_prompts, 1)
        require_at_least("gen_len", self.gen_len, 2)
        prefix_len = LENGTHS[self.length] if isinstance(self.length, str) else self.length
        sizes = Sizes(self.B, prefix_len, self.gen_len)
        config = self.config(sizes=sizes, rows=Rows(num_prompts=self.B * (self.nb_prompts + 1)))
        rows: list[dict[str, Any]] = []
        evicts = self.draft.draft_budget is None
        for plan in [plan_in_turns(replace(config, target=target), evicts=evicts) for target in self.target.each()]:
            if rows:  # printed now, as the next target may be interrupted
                say(console(rows, COLUMNS))
            rows += latencies(plan)
        record = {"benchmark": "latency", **vars(sizes), "nb_prompts": self.nb_prompts, "rows": rows, **provenance()}
        head = f"\n  ms per generated token, after {self.nb_prompts * self.B} prompts of {prefix_len} tokens\n"
        note = "  threads waited for processors: no time or speedup here is to be trusted\n"
        contended = any(row["contended"] for row in rows)
        publish(self.output.output, record, head, console(rows, COLUMNS), note if contended else "", for_people=True)


def latencies(plan: Plan) -> list[dict[str, Any]]:
    """Return two rows, plain decoding and speculation, over all batches but the first. Errors: UserError."""
    gc.unfreeze()
    gc.collect()  # the session before
    torch.cuda.empty_cache()
    session, before = Session.of_plan(plan), usage_so_far()
    _, *counted = decode_batches(session)
    contended, rows = contention([usage_so_far().since(before)])["contended"], list[dict[str, Any]]()
    for way, outputs in zip((session.variant(drafts=()), session), zip(*counted, strict=True), strict=True):
        named = {"model": way.name, "dataset": plan.dataset, "config": nested(way.plan.config)}
        rows.append({**named, **figures(outputs), "contended": contended, **settings_record(way)})
    return rounded([row | {"speedup": rows[0]["median_ms"] / row["median_ms"]} for row in rows])


def figures(outputs: Sequence[GenerateOutput]) -> dict[str, Any]:
    """Return percentiles over outputs of the ms that a row waits for a token, and tokens per second.

    The time of a round counts once for every row that it decoded; prefilling does not count.
    """
    ms = []
    for rounds in (output.stats.rounds for output in outputs):
        waited = sum(round_.seconds * round_.busy for round_ in rounds)
        ms.append(1e3 * waited / sum(round_.emitted for round_ in rounds))
    p10, p50, p90 = np.percentile(ms, (10, 50, 90)).tolist()
    rows = [row for output in outputs for row in output.stats.rows]
    rate = total(rows).emitted / sum(output.stats.decode_seconds for output in outputs)
    found = {"median_ms": p50, "p90_ms": p90, "spread_ms": p90 - p10, "ms_per_token": ms, "tokens_per_second": rate}
    return found | acceptance(rows)
