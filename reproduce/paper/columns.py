"""The columns of all tables of runs, here and on the pages, and the rows that set published numbers beside them."""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.tables import Column
from reproduce.paper.published import SELF, Record, draft_name, speedup, target_name

NONE = "not measured"
SLOWER = "*"
PUBLISHED = "published"
TEXTS = ("greedy", "sampled", "book")
KINDS = {"verify": "verification / plain step", "draft": "draft step / plain step"}
# A column of what is measured: a row without it says so.
measured = partial(Column, missing=NONE)


def over(numerator: str, denominator: str = "baseline_step_ms") -> Callable[[Record], float | None]:
    """The quotient of two of a record's figures; None where one was not measured, such as the tokens of a round with
    random weights, which accept what they do by chance.
    """

    def quotient(record: Record) -> float | None:
        above, below = record.get(numerator), record.get(denominator)
        return None if above is None or not below else above / below

    return quotient


def _formula_speedup(record: Record) -> float | None:
    """What the published formula makes of the record's own acceptance and step times."""
    alpha, *costs = record.get("acceptance_rate"), *(over(f"{kind}_step_ms")(record) for kind in ("draft", "verify"))
    return None if None in (alpha, *costs) else speedup(alpha, record["gamma"], *costs)


def published_text(value: float) -> str:
    """With every digit that it was published with, at least two."""
    return f"{value:.2f}" if round(value, 2) == value else f"{value:g}"


def speedup_text(value: float, show: Callable[[float], str] = "{:.2f}".format) -> str:
    """Marked where speculation is slower than plain decoding."""
    return show(value) + (SLOWER if value < 1 else "")


published_speedup_text = partial(speedup_text, show=published_text)


def _identical(record: Record) -> str | None:
    same = record.get("identical_sequences")
    return None if same is None else f"{same:.0f} of {record['sequences']:.0f}"


def _rates(by_position: Sequence[float | None]) -> str:
    return ", ".join(NONE if rate is None else f"{rate:.2f}" for rate in by_position) or "-"


def _pointwise(record: Record) -> str:
    """How what lies between matrix products and attention ran; older records only say whether it was compiled."""
    return record.get("pointwise") or ("compiled" if record.get("compile") else "eager")


# Every column by the name that tables list it under: a record's field, unless it is made of several.
FIELDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COLUMNS = {
    **{name: Column(name, **said) for name, said in FIELDS["known"].items()},
    **{name: measured(name, **said) for name, said in FIELDS["measured"].items()},
    PUBLISHED: Column(PUBLISHED, "published", published_text),
    "speedup": measured("speedup", "speedup", speedup_text),
    "wall_speedup": measured("wall_speedup", "to the last row", speedup_text),
    "acceptance_per_position": Column("acceptance_per_position", "by draft position", _rates),
    "gap_percent": measured("gap_percent", "gaps", "{:.1f}%".format),
    "target": Column(target_name, "target", align="<"),
    "draft": Column(draft_name, "draft", align="<"),
    "draft_weights": Column(lambda row: row.get("draft_weights") or row.get("draft_dtype"), "draft weights", align="<"),
    "pointwise": Column(_pointwise, "pointwise", align="<"),
    "budget or all": Column(lambda row: "all" if row["draft_policy"] == "full" else row["draft_budget"], "budget"),
    "identical": Column(_identical, "identical rows"),
    "verify / plain": measured(over("verify_step_ms"), KINDS["verify"], ".2f"),
    "draft / plain": measured(over("draft_step_ms"), KINDS["draft"], ".2f"),
    "formula": measured(_formula_speedup, "by the formula", speedup_text),
    "plain ms per token": measured("baseline_step_ms", "plain, ms a token", ".1f"),
    "ms per token": measured(over("round_ms", "mean_accepted_length"), "speculation, ms a token", ".1f"),
}


def section(name: str, **computed: Callable[[Any], object]) -> list[Column]:
    """The columns of one table, from the section of that name; `computed` of the row where they are not its fields."""
    return [Column(computed.get(key, key), **said) for key, said in FIELDS[name].items()]


def of(*names: str | Column) -> list[Column]:
    """Columns by their names, and any others as they are."""
    return [COLUMNS[name] if isinstance(name, str) else name for name in names]


DRAFT = of("gamma", "draft_budget", "draft_weights")
STEPS = of("baseline_step_ms", "draft_step_ms", "verify_step_ms", "round_ms")
SPECULATION = of("speedup", "wall_speedup", *STEPS, "acceptance_rate", "mean_accepted_length")


def by_size(record: Record) -> tuple:
    """For `sorted`: self-speculation first, then from small to large."""
    who = target_name(record), draft_name(record) != SELF, draft_name(record)
    return *who, *(record.get(key) or 0 for key in ("prefix_len", "B", "gamma", "draft_budget"))


def rows_of(records: Iterable[Record]) -> list[Record]:
    """Of acceptance: a record for each text, policy and budget, with the settings of the run that it comes from."""
    return [record | row for record in records for row in record["rows"]]


def machine_name(record: Record) -> str:
    return str(record.get("gpu") or record.get("machine"))
