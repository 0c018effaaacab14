"""The columns of all tables of runs, here and on the pages, and the rows that set published numbers beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from common.tables import Column
from reproduce.paper.published import SELF, Fact, Record, draft_name, published, speedup, target_name

NONE = "not measured"
SLOWER = "*"
PUBLISHED = "published"
TEXTS = ("greedy", "sampled", "book")
KINDS = {"verify": "verification / plain step", "draft": "draft step / plain step"}
# A column of what is measured: a row without it says so.
measured = partial(Column, missing=NONE)


def quotient(record: Mapping[str, Any], numerator: str, denominator: str = "baseline_step_ms") -> float | None:
    above, below = record.get(numerator), record.get(denominator)
    return None if above is None or not below else above / below


def formula_speedup(record: Record) -> float | None:
    """What the published formula makes of the record's own acceptance and step times."""
    draft, verify = quotient(record, "draft_step_ms"), quotient(record, "verify_step_ms")
    alpha = record.get("acceptance_rate")
    if draft is None or verify is None or alpha is None:
        return None
    return speedup(alpha, record["gamma"], draft, verify)


def ms_per_token(record: Record) -> float | None:
    """A round over the tokens that a row gets of it; None with random weights, which accept what they do by chance."""
    return quotient(record, "round_ms", "mean_accepted_length")


def identical_rows(record: Record) -> str | None:
    same = record.get("identical_sequences")
    return None if same is None else f"{same:.0f} of {record['sequences']}"


def draft_weights(record: Record) -> str:
    return record.get("draft_weights") or str(record.get("draft_dtype"))


def speedup_text(value: float) -> str:
    """Marked where speculation is slower than plain decoding."""
    return f"{value:.2f}" + (SLOWER if value < 1 else "")


def published_text(value: float) -> str:
    """With every digit that it was published with, at least two."""
    return f"{value:.2f}" if round(value, 2) == value else f"{value:g}"


def published_speedup_text(value: float) -> str:
    return published_text(value) + (SLOWER if value < 1 else "")


def over_plain_step(kind: str) -> Callable[[Record], float | None]:
    return lambda record: quotient(record, f"{kind}_step_ms")


def _rates(by_position: Sequence[float | None]) -> str:
    return ", ".join(NONE if rate is None else f"{rate:.2f}" for rate in by_position) or "-"


def _pointwise(record: Record) -> str:
    """How what lies between matrix products and attention ran; older records only say whether it was compiled."""
    return record.get("pointwise") or ("compiled" if record.get("compile") else "eager")


# Every column by the name that tables list it under: a record's field, unless it is made of several.
COLUMNS = {
    "target": Column(target_name, "target", align="<"),
    "draft": Column(draft_name, "draft", align="<"),
    "draft_weights": Column(draft_weights, "draft weights", align="<"),
    "pointwise": Column(_pointwise, "pointwise", align="<"),
    "budget or all": Column(lambda row: "all" if row["draft_policy"] == "full" else row["draft_budget"], "budget"),
    "identical": Column(identical_rows, "identical rows"),
    "verify / plain": measured(over_plain_step("verify"), KINDS["verify"], ".2f"),
    "draft / plain": measured(over_plain_step("draft"), KINDS["draft"], ".2f"),
    "formula": measured(formula_speedup, "by the formula", speedup_text),
    "plain_ms_per_token": measured("baseline_step_ms", "plain, ms a token", ".1f"),
    "ms_per_token": measured(ms_per_token, "speculation, ms a token", ".1f"),
    **{
        column.key: column
        for column in (
            Column("prefix_len", "context"),
            Column("B", "rows"),
            Column("gamma", "gamma"),
            Column("draft_budget", "budget"),
            Column("draft_policy", "policy", align="<"),
            Column("text", "text", align="<"),
            Column("judged", "verified positions"),
            Column("acceptance_per_position", "by draft position", _rates),
            measured("model", "model", align="<"),
            measured("verification", "verification", align="<"),
            measured("temperature", "temperature"),
            measured("dtype", "dtype", align="<"),
            measured("kv_dtype", "entries", align="<"),
            measured("pairs", "pairs"),
            measured("speedup", "speedup", speedup_text),
            measured("wall_speedup", "to the last row", speedup_text),
            measured("acceptance_rate", "acceptance", ".3f"),
            measured("mean_accepted_length", "mean accepted length", ".2f"),
            measured("distinct_4gram_fraction", "distinct 4-grams", ".2f"),
            measured("baseline_step_ms", "plain step, ms", ".2f"),
            measured("draft_step_ms", "draft step, ms", ".2f"),
            measured("verify_step_ms", "verification, ms", ".2f"),
            measured("round_ms", "round, ms", ".2f"),
            measured("baseline_tokens_per_second", "plain, tokens/s", ".1f"),
            measured("decode_tokens_per_second", "speculation, tokens/s", ".1f"),
            measured("baseline_share_of_copy", "its share of the copy's bandwidth", ".0%"),
            measured("prompt_overlap", "overlap of prompts", ".0%"),
            measured("kernel_ms_per_round", "in kernels, ms", ".2f"),
            measured("gap_percent", "gaps", lambda percent: f"{percent:.1f}%"),
        )
    },
}


def of(*names: str | Column) -> list[Column]:
    """Columns by their names, and any others as they are."""
    return [COLUMNS[name] if isinstance(name, str) else name for name in names]


SETTING = of("target", "draft", "prefix_len", "B", "gamma", "draft_budget")
ACCEPTANCE = of("target", "draft", "prefix_len", "B", "gamma", "budget or all", "draft_policy", "text")
DRAFT = of("gamma", "draft_budget", "draft_weights")
STEPS = of("baseline_step_ms", "draft_step_ms", "verify_step_ms", "round_ms")
SPECULATION = of("speedup", "wall_speedup", *STEPS, "acceptance_rate", "mean_accepted_length")
FLOW = of("plain_ms_per_token", "baseline_tokens_per_second", "ms_per_token", "decode_tokens_per_second")


def by_size(record: Record) -> tuple:
    """For `sorted`: self-speculation first, then from small to large."""
    who = target_name(record), draft_name(record) != SELF, draft_name(record)
    return *who, *(record.get(key) or 0 for key in ("prefix_len", "B", "gamma", "draft_budget"))


def beside(records: Iterable[Record], facts: Sequence[Fact], any_target: bool = False) -> list[Record]:
    """Each record with the published facts of its setting, then each setting without a record, as one that measured
    nothing; by size. any_target: also facts of another target than the record's.
    """
    rows = [
        record | {PUBLISHED: [f for f in facts if (f.is_setting_of if any_target else f.is_of)(record)]}
        for record in records
    ]
    measured_facts = [fact for row in rows for fact in row[PUBLISHED]]
    missing: dict[tuple, Record] = {}
    for fact in facts:
        if fact not in measured_facts:
            missing.setdefault(tuple(fact.record.values()), fact.record | {PUBLISHED: []})[PUBLISHED].append(fact)
    return sorted([*rows, *missing.values()], key=by_size)


def published_column(origin: str | None = None, show: Any = published_text) -> Column:
    """The number that was published for a row of `beside`; `origin`: in this table or figure."""

    def value(row: Record) -> float | None:
        return next((fact.value for fact in row[PUBLISHED] if origin in (None, fact.origin)), None)

    return Column(value, origin or PUBLISHED, show)


def rows_of(records: Iterable[Record]) -> list[Record]:
    """Of acceptance: a record for each text, policy and budget, with the settings of the run that it comes from."""
    return [record | row for record in records for row in record["rows"]]


def machine_name(record: Mapping[str, Any]) -> str:
    return str(record.get("gpu") or record.get("machine"))


def differences(records: Sequence[Record]) -> str:
    """Said once above a table: what was published, what was measured, and that one is not the other."""
    lines = [f"  published: {published().setting}"]
    if not records:
        return "\n".join([*lines, f"  measured:  nothing; every measured figure is {NONE!r}"])
    described = dict.fromkeys(
        f"{target_name(record)}, {_text_of(record)}, {machine_name(record)}, {record.get('dtype') or 'dtype unknown'}"
        for record in records
    )
    lines += [f"  measured:  {text}" for text in described]
    if not {target_name(record) for record in records} & published().checkpoint_names.keys():
        lines.append("  Another model on another machine: compare where the columns rise and fall, not their values.")
    return "\n".join(lines)


def _text_of(record: Record) -> str:
    if record.get("load_format") == "dummy":
        return "random weights"
    return "the built-in book" if record.get("dataset") in (None, "default") else str(record["dataset"])
