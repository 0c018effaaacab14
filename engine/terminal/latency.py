"""foretoken.py latency: ms per generated token of several models, plain and speculative."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from common.errors import require_at_least
from common.jsonl import publish
from common.say import say
from common.tables import Column, console
from engine.bench.config import DEFAULT_MODEL, Output, Rows, RunConfig, Sampling, Sizes, Target, Text
from engine.terminal.models import DRAFT_HELP, Draft
from models.names import Scheme

if TYPE_CHECKING:
    from engine.bench.plan import Plan
    from engine.bench.session import Session
    from engine.decoding import GenerateOutput

SEVERAL: Any = arg(metavar="[TARGET ...]", help_behavior_hint="(default: the built-in model)")
# Prompt tokens.
LENGTHS = {"short": 48, "long": 3000}
COLUMNS = [
    Column("model", "model", align="<"),
    Column(lambda row: row["quantize"] or row["dtype"], "weights", align="<"),
    Column("decoding", "decoding", align="<"),
    Column("median_ms", "median ms", ".1f"),
    Column("p90_ms", "p90 ms", ".1f"),
    Column("spread_ms", "p90 - p10", ".1f"),
    Column("tokens_per_second", "tokens/s", ".1f"),
    Column("speedup", "speedup", ".2f"),
    Column("acceptance_rate", "acceptance", ".3f"),
]


@dataclass(frozen=True)
class Targets(Target):
    """The target models, how they are stored, and what they run on."""

    model: Positional[Annotated[tuple[str, ...], SEVERAL]] = ()  # type: ignore[assignment]
    """converted checkpoints, one after another: each a model.pth, or its folder"""
    quantize: Annotated[tuple[Scheme, ...], arg(help_behavior_hint="(default: none)")] = ()  # type: ignore[assignment]
    """measure each model in these, too"""

    def each(self) -> Iterator[Target]:
        for model in self.model or (DEFAULT_MODEL,):
            for scheme in dict.fromkeys((None, *self.quantize)):
                yield Target(**vars(self) | {"model": model, "quantize": scheme})


@dataclass(frozen=True, kw_only=True)
class DraftByFlag(Draft):
    """What drafts, and how."""

    draft: Annotated[str, arg(metavar="DRAFT", help=DRAFT_HELP)] = "self"


@dataclass(frozen=True, kw_only=True)
class Latency:
    """ms per generated token of models and their quantised forms, plain and speculative"""

    FLAGS: ClassVar[dict[str, str]] = {
        **{"model": "TARGET", "draft_model": "--draft"},
        **{"prefix_len": "--length", "num_prompts": "--nb_prompts"},
    }

    target: Targets = field(default_factory=Targets)
    draft: DraftByFlag = field(default_factory=DraftByFlag)
    text: Text = field(default_factory=Text)
    sampling: Sampling = field(default_factory=Sampling)
    output: Output = field(default_factory=Output)
    length: Literal["short", "long"] | int = "short"
    """tokens of a prompt, which is a stretch of the data set; short: 48, long: 3000"""
    nb_prompts: int = 15
    """how many are measured, behind one that warms up"""
    B: int = 1
    """rows decoded together, each with a prompt of its own: so many times more prompts"""
    gen_len: int = 64
    """new tokens per row"""

    @property
    def prefix_len(self) -> int:
        return LENGTHS[self.length] if isinstance(self.length, str) else self.length

    def plans(self) -> list[Plan]:
        """One of every row of models, all checked before any is loaded."""
        require_at_least("nb_prompts", self.nb_prompts, 1)
        require_at_least("gen_len", self.gen_len, 2)
        from engine.terminal.in_turn import plan_of

        config = RunConfig(
            text=self.text,
            sizes=Sizes(self.B, self.prefix_len, self.gen_len),
            rows=Rows(num_prompts=self.B * (self.nb_prompts + 1)),
            sampling=self.sampling,
            output=self.output,
            draft=self.draft.config(),
        )
        return [plan_of(replace(config, target=target)) for target in self.target.each()]

    def run(self) -> None:
        import torch

        from common.provenance import provenance
        from engine.bench.record import rounded

        rows: list[dict[str, Any]] = []
        for plan in self.plans():
            if rows:  # what an interruption leaves
                say(console(rows, COLUMNS))
            rows += rounded(_measured(plan))
            gc.collect()  # before the next model is loaded
            torch.cuda.empty_cache()
        sizes = {name: getattr(self, name) for name in ("prefix_len", "nb_prompts", "B", "gen_len")}
        record = {"benchmark": "latency", **sizes, "rows": rows, **provenance()}
        said = f"ms per generated token, behind {self.nb_prompts} prompts of {self.prefix_len} tokens"
        publish(self.output.output, record, f"\n  {said}\n", "\n".join([console(rows, COLUMNS), *_notes(rows), ""]))


def _measured(plan: Plan) -> list[dict[str, Any]]:
    """A row of the table for each way of decoding."""
    from engine.bench.record import ratio
    from engine.bench.session import Session
    from engine.bench.settings import settings_record
    from engine.contention import contention, usage_so_far
    from engine.terminal.in_turn import decode_in_turn

    session, before = Session.of_plan(plan), usage_so_far()
    _, *counted = decode_in_turn(session)  # the first warms up
    contended = contention([usage_so_far().since(before)])["contended"]

    def row(own: Session, draft: str, outputs: Sequence[GenerateOutput]) -> dict[str, Any]:
        settings = settings_record(own)
        decoding = f"{draft}, gamma {settings['gamma']}" if own.draft else draft
        named = {
            "model": own.name,
            "dataset": plan.dataset,
            "decoding": decoding,
            "draft": own.draft and own.draft.kind,
        }
        return {**named, **figures(outputs), "contended": contended, **settings}

    assert session.draft is not None
    draft = session.draft_source.name if session.draft_source else session.draft.kind
    plain = row(session.variant(draft=None), "plain", [both.plain for both in counted])
    rows = [plain, row(session, draft, [both.speculative for both in counted])]
    return [one | {"speedup": ratio(plain["median_ms"], one["median_ms"])} for one in rows]


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    said = ["one value a prompt; p90 - p10 is their spread, and speedups are of medians"]
    if busy := dict.fromkeys(row["model"] for row in rows if row["contended"]):
        said.append(f"threads waited for processors ({', '.join(busy)}): no time or speedup here is to be trusted")
    return [f"  {note}" for note in said]


def figures(outputs: Sequence[GenerateOutput]) -> dict[str, Any]:
    """What a row waits for a token, in ms: one value an output, the time of each round counted once for every row that
    it decoded. Percentiles between two values are interpolated; tokens per second are of all rows. No prefill counts.
    """
    import torch

    from engine.stats import total

    rounds = [one.stats.rounds for one in outputs]
    ms = [1e3 * sum(one.seconds * one.busy for one in each) / sum(one.emitted for one in each) for each in rounds]
    p10, p50, p90 = torch.tensor(ms, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9]).double()).tolist()
    counts = total([row for one in outputs for row in one.stats.rows])
    return {
        "median_ms": p50,
        "p90_ms": p90,
        "spread_ms": p90 - p10,
        "tokens_per_second": counts.emitted / sum(one.stats.decode_seconds for one in outputs),
        "acceptance_rate": counts.acceptance_rate,
        "mean_accepted_length": counts.mean_accepted_length,
        "ms_per_token": ms,
    }
