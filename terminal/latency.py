"""foretoken.py latency: ms per generated token of several models, plain and speculative."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from bench.config import DEFAULT_MODEL, BatchSize, ComparedSampling, Output, Rows, Sizes, Target, Text
from bench.named_draft import NamedDraft
from common.errors import require_at_least
from common.flags import Common
from common.jsonl import publish
from common.provenance import provenance
from common.say import say
from common.tables import Column, console
from engine.counts import acceptance_text
from models.names import Scheme
from terminal.in_turn import latencies, plan_of
from terminal.models import ModelFlags, PositionalTarget

SEVERAL: Any = arg(metavar="[TARGET ...]", help_behavior_hint="(default: the built-in model)")
LENGTHS = {"short": 48, "long": 3000}
COLUMNS = [
    Column("model", "model", align="<"),
    Column(lambda row: row["quantize"] or row["dtype"], "weights", align="<"),
    Column(lambda row: row["draft_model"] or row["draft"], "draft", missing="plain", align="<"),
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

    model: Common[Positional[Annotated[tuple[str, ...], SEVERAL]]] = ()  # type: ignore[assignment]
    """converted checkpoints, one after another: each a model.pth, or its folder"""
    quantize: Annotated[tuple[Scheme, ...], arg(help_behavior_hint="(default: none)")] = ()  # type: ignore[assignment]
    """measure each model in these, too"""

    def each(self) -> Iterator[Target]:
        for model in self.model or (DEFAULT_MODEL,):
            for scheme in dict.fromkeys((None, *self.quantize)):
                yield Target(**vars(self) | {"model": model, "quantize": scheme})


@dataclass(frozen=True, kw_only=True)
class Latency(ModelFlags):
    """ms per generated token of models and their quantised forms, plain and speculative. Unless --draft_budget is
    given, a draft's cache keeps half of a prompt"""

    FLAGS: ClassVar[dict[str, str]] = ModelFlags.FLAGS | {"prefix_len": "--length"}

    target: Targets = field(default_factory=Targets)
    draft: NamedDraft = field(default_factory=NamedDraft)
    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    text: Text = field(default_factory=Text)
    output: Output = field(default_factory=Output)
    length: Literal["short", "long"] | int = "short"
    """tokens of a prompt, which is a stretch of the data set; short: 48, long: 3000"""
    nb_prompts: int = 15
    """how many are measured, behind one that warms up"""
    B: BatchSize = 1
    """rows decoded together, each with a prompt of its own: so many times more prompts"""
    gen_len: int = 64
    """new tokens per row"""

    def run(self) -> None:
        require_at_least("nb_prompts", self.nb_prompts, 1)
        require_at_least("gen_len", self.gen_len, 2)
        prefix_len = LENGTHS[self.length] if isinstance(self.length, str) else self.length
        sizes = Sizes(self.B, prefix_len, self.gen_len)
        config = self.config(sizes=sizes, rows=Rows(num_prompts=self.B * (self.nb_prompts + 1)))
        rows: list[dict[str, Any]] = []
        evicts = self.draft.draft_budget is None
        for plan in [plan_of(replace(config, target=target), evicts=evicts) for target in self.target.each()]:
            if rows:  # what an interruption leaves
                say(console(rows, COLUMNS))
            rows += latencies(plan)
        record = {"benchmark": "latency", **vars(sizes), "nb_prompts": self.nb_prompts, "rows": rows, **provenance()}
        said = f"\n  ms per generated token, behind {self.nb_prompts} prompts of {prefix_len} tokens\n"
        busy = "  threads waited for processors: no time or speedup here is to be trusted\n"
        contended = any(row["contended"] for row in rows)
        publish(self.output.output, record, said, console(rows, COLUMNS), busy if contended else "", for_people=True)
