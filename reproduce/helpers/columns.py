"""Columns of tables by name, what they show of a record, and tables with a column for each value of a field."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import bench
from common.tables import Column
from engine.counts import acceptance_text
from reproduce.helpers import published
from reproduce.helpers.records import Record, grouped

NONE = "not measured"
PIVOT = "*"  # stands for the columns of a pivot among the names of columns


def over(numerator: str, denominator: str) -> Callable[[Record], float | None]:
    """Return a function that divides two fields of a record; it returns None where a field was not measured."""
    return lambda record: bench.ratio(record.get(numerator), record.get(denominator))


def speedup_text(value: float) -> str:
    """Mark with * what is slower than plain decoding."""
    return f"{value:.2f}" + ("*" if value < 1 else "")


def identical_text(record: Record) -> str | None:
    same = record.get("identical_sequences")
    return None if same is None else f"{same:.0f} of {record['sequences']:.0f}"


def gain_text(record: Record, speedup: str = "speedup", more: str = "mean_accepted_length") -> str:
    """Return a speedup, and what stands behind it."""
    return f"{speedup_text(record[speedup])} ({record[more]:.2f})"


def prediction_text(fact: Record) -> str:
    """Return the published and the predicted number. ?: the acceptance is assumed. *: plain decoding is faster."""
    value, is_ratio = published.predict(fact), "kind" in fact
    texts = [f"{x:.2f}" if is_ratio else speedup_text(x) for x in (fact["value"], value)]
    return " / ".join(texts) + ("" if is_ratio or published.is_acceptance_known(fact) else "?")


def published_text(kind: str, record: Record) -> str | None:
    """Return the published speedup or acceptance of the same models and setting as a record's."""
    facts = published.published_speedups() if kind == "speedup" else published.published()[kind]
    fact = published.find_fact(facts, record)
    return None if fact is None else f"{fact['value']:.2f}"


def ratio_name(fact: Record) -> str:
    return f"verification, gamma {fact['gamma']}" if fact["gamma"] else f"draft step, budget {fact['draft_budget']}"


class Head(NamedTuple):
    """The head of a column, how its values are written, what stands for None, and how a value is derived from a record
    if it is not a field."""

    name: str
    text: str | Callable[[Any], str] = ""
    value: Callable[[Record], object] | None = None
    missing: str = "-"
    align: str = ">"


def text(name: str, value: Callable[[Record], object] | None = None, missing: str = "-") -> Head:
    return Head(name, "", value, missing, "<")


HEADS = {
    **{name: text(name) for name in ("drafter", "category", "text", "sampling", "model", "machine", "field")},
    **{name: text(name, missing="") for name in ("completions", "chats", "text-generation-inference")},
    "target": text("target", published.target_name),
    "draft": text("draft", published.draft_name),
    "draft_policy": text("policy"),
    "draft_weights": text("draft weights", lambda record: record.get("draft_weights") or record.get("draft_dtype")),
    "storage": text("weights and entries"),
    "origin": text("GPUs"),
    "ratio": text("over a plain step", ratio_name),
    "chosen": text("auto chooses"),
    "rope_scaling": text("context extended", lambda record: record["config"]["target"].get("rope_scaling")),
    "generated": text("generated tokens", lambda record: "{} to {}".format(*record["generated"])),
    "mode": text("server"),
    "what": text("attention of a layer"),
    "group": text("published speedups"),
    "about": text(""),
    "prefix_len": Head("context"),
    "B": Head("rows"),
    "draft_budget": Head("budget", missing="all"),
    "n": Head("tokens"),
    "sequences": Head("prompts"),
    "verified": Head("verified positions"),
    "mean_accepted_length": Head("mean accepted length", ".2f"),
    "distinct_4gram_fraction": Head("distinct 4-grams", ".2f"),
    "speedup": Head("speedup", speedup_text),
    "wall_speedup": Head("to the last row", speedup_text),
    "speedup_sampled": Head("speedup, sampled", speedup_text, lambda record: record["rows"][-1].get("speedup")),
    "baseline_step_ms": Head("plain step, ms", ".1f"),
    "verify_ratio": Head("verification / plain", ".2f", over("verify_step_ms", "baseline_step_ms")),
    "draft_ratio": Head("draft step / plain", ".2f", over("draft_step_ms", "baseline_step_ms")),
    "drafting_ratio": Head("drafting / plain step", ".2f", over("drafting_ms", "baseline_step_ms")),
    "baseline_tokens_per_second": Head("plain, tokens/s", ".1f"),
    "decode_tokens_per_second": Head("speculation, tokens/s", ".1f"),
    "acceptance": Head("acceptance", "", acceptance_text),
    "acceptance_rate": Head("acceptance", ".3f"),
    "identical": Head("identical rows", "", identical_text),
    "gain": Head("", "", gain_text),
    "gain_by_acceptance": Head("", "", partial(gain_text, speedup="wall_speedup", more="acceptance_rate")),
    "prediction": Head("", "", prediction_text),
    "published_speedup": Head("published", "", partial(published_text, "speedup"), missing=NONE),
    "published_acceptance": Head("published", "", partial(published_text, "acceptance"), missing=NONE),
    "median_error": Head("median error", ".1%"),
    "largest_error": Head("largest", ".1%"),
    "number": Head("number"),
    "usual": Head("gamma 3", speedup_text),
    "best": Head("best fixed", speedup_text),
    "auto": Head("auto", speedup_text),
    "mean_gamma": Head("mean gamma", ".1f"),
    "ratio_to_better": Head("auto / better", ".3f"),
    "lowest": Head("lowest repeat", ".3f"),
    "assumed": Head("acceptance assumed", ".2f"),
    "plain": Head("plain step, ms", ".1f"),
    "verify": Head("verification, ms", ".1f"),
    "draft_step": Head("draft step, ms", ".1f"),
    "predicted_speedup": Head("speedup", ".2f"),
    "round_ms": Head("round, ms", ".1f"),
    "draft_ms": Head("drafts, ms", ".1f"),
    "verify_ms": Head("verification, ms", ".1f"),
    "prompt_tokens_range": Head("prompt tokens", "", "{shortest} to {longest}".format_map),
    "output_tokens_per_second": Head("tok/s", ".1f"),
    "over_plain": Head("over plain", speedup_text, lambda record: record["speedup"]),
    "decode_speedup": Head("rounds alone", speedup_text),
    "accepted_share": Head("accepted", ".2f"),
    "ttft_ms_p50": Head("first token, ms", ".0f"),
    "plain_ttft": Head("plain", ".0f"),
    "tpot_ms_p50": Head("per token, ms", ".0f"),
    "plain_tpot": Head("plain", ".0f"),
    "nodes_to_choose": Head("nodes a layer to choose"),
    "nodes_a_layer": Head("nodes a layer"),
    "weights_gb": Head("weights, GB", ".1f"),
    "attention_gb": Head("attention, GB", ".1f"),
    "layers_gb": Head("else in layers, GB", ".1f"),
    "outside_gb": Head("outside, GB", ".1f"),
    "rate": Head("TB/s", ".2f"),
    "plain_ms": Head("bfloat16, ms", ".2f"),
    "int8_ms": Head("int8, ms", ".2f"),
    "int4_ms": Head("int4, ms", ".2f"),
}


def column(name: str) -> Column:
    """Return the column of a name: of HEADS, or else the field of that name."""
    head = HEADS.get(name, Head(name))
    return Column(head.value or name, head.name, head.text, head.missing, head.align)


def of(names: str) -> list[Column]:
    """Return the columns of names that spaces separate."""
    return [column(name) for name in names.split()]


def shown(columns: Sequence[Column], rows: Sequence[Record]) -> list[Column]:
    """Return the columns in which something stands."""
    return [column for column in columns if {column.cell(row) for row in rows} != {column.missing}]


def pivot(rows: Sequence[Record], names: str, key: str, cell: str) -> tuple[list[Record], list[Column]]:
    """Return a table with a column for each value of `key`, in order, in the place of PIVOT among the names of columns,
    which shows `cell` of the last such row; and a line for each combination of what the columns before it show."""
    index, _, after = names.partition(PIVOT)
    before, inner = of(index), column(cell)

    def show(value: object) -> Callable[[Record], str | None]:
        return lambda line: line["cells"].get(value)

    lines = [
        group[0] | {"cells": {row[key]: inner.cell(row) for row in group}}
        for group in grouped(rows, lambda row: tuple(column.cell(row) for column in before)).values()
    ]
    values = sorted({row[key] for row in rows})
    heads = [value if isinstance(value, str) else f"{column(key).head} {value}" for value in values]
    return lines, [*before, *(Column(show(value), head) for value, head in zip(values, heads, strict=True)), *of(after)]
