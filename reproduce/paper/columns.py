"""The columns of all tables of runs, here and on the pages, and the rows that set published numbers beside them."""

import tomllib
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import bench
from common.tables import Column
from engine.counts import acceptance_text
from reproduce.paper.published import SELF, Record, draft_name, speedup, target_name

NONE = "not measured"
SLOWER = "*"
TEXTS = ("greedy", "sampled", "book")


def over(numerator: str, denominator: str = "baseline_step_ms") -> Callable[[Record], float | None]:
    """The quotient of two of a record's figures; None where one was not measured."""
    return lambda record: bench.ratio(record.get(numerator), record.get(denominator))


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


def rows_a_round(row: Record) -> float | None:
    """Of a load on a server: those that decode together."""
    rate, ms, tokens = (row[name] for name in ("decode_tokens_per_second", "round_ms", "tokens_per_round"))
    return rate * ms / 1e3 / tokens if tokens and rate else None


def _identical(record: Record) -> str | None:
    same = record.get("identical_sequences")
    return None if same is None else f"{same:.0f} of {record['sequences']:.0f}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _choice(row: Record) -> str:
    return f"{row['gamma']}, {row['draft_budget']}" if row["gamma"] else "plain"


# Of a row, by the column's name, what is neither a field nor a quotient nor a text of fields.
COMPUTED = {
    "target": target_name,
    "draft": draft_name,
    "formula": _formula_speedup,
    "acceptance_rate": acceptance_text,
    "identical": _identical,
    "rows_a_round": rows_a_round,
    "draft_weights": lambda row: row.get("draft_weights") or row.get("draft_dtype"),
    # Older records only say whether it was compiled.
    "pointwise": lambda row: row.get("pointwise") or ("compiled" if row.get("compile") else "eager"),
    "budget_or_all": lambda row: "all" if row["draft_policy"] == "full" else row["draft_budget"],
    "inner_rate": lambda row: (row.get("inner") or {}).get("acceptance_rate"),
    "numbers": lambda row: ", ".join(f"{key} {_short(value)}" for key, value in row["numbers"].items()),
    "shared_bytes": lambda row: " and ".join(f"{n} on {gpu}" for gpu, n in row["max_shared_bytes"].items()),
    "gigabytes": lambda row: row["bytes"] and row["bytes"] * 1e-9,
    "gigaops": lambda row: row["ops"] * 1e-9,
    "n_problems": lambda row: len(row["problems"]),
    "usual": lambda row: _choice(row["usual"]),
    "best": lambda row: _choice(row["best"]),
    "spills": lambda row: row["spill_stores"] + row["spill_loads"],
}
FORMATS = {
    "speedup": speedup_text,
    "rates": lambda rates: ", ".join(NONE if rate is None else f"{rate:.2f}" for rate in rates) or "-",
}
FIELDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _column(name: str, said: dict[str, str]) -> Column:
    """As the file describes it: a field, or a function of the row, a quotient of two fields, or a text with fields."""
    key: Any = COMPUTED.get(name) or said.get("key", name)
    if isinstance(key, str) and "{" in key:
        key = key.format_map
    elif isinstance(key, str) and " / " in key:
        key = over(*key.split(" / "))
    shown = said.get("format", "")
    return Column(**{**said, "key": key, "format": FORMATS.get(shown, shown)})


COLUMNS = {name: _column(name, said) for name, said in FIELDS["known"].items()}
COLUMNS |= {name: _column(name, said | {"missing": NONE}) for name, said in FIELDS["measured"].items()}
KINDS = {kind: COLUMNS[f"{kind}_over_plain"].head for kind in ("verify", "draft")}


def of(*names: str | Column) -> list[Column]:
    """Columns by their names, several with spaces between; those of a table by its name; and any others as they are."""
    found: list[Column] = []
    for name in chain.from_iterable(one.split() if isinstance(one, str) else [one] for one in names):
        if isinstance(name, Column):
            found.append(name)
        elif name in FIELDS["tables"]:
            found += of(FIELDS["tables"][name])
        elif name in FIELDS["own"]:
            found += [_column(key, said) for key, said in FIELDS["own"][name].items()]
        else:
            found.append(COLUMNS[name])
    return found


def by_size(record: Record) -> tuple:
    """For `sorted`: self-speculation first, then from small to large."""
    who = target_name(record), draft_name(record) != SELF, draft_name(record)
    return *who, *(record.get(key) or 0 for key in ("prefix_len", "B", "gamma", "draft_budget"))


def rows_of(records: Iterable[Record]) -> list[Record]:
    """Of acceptance: a record for each text, policy and budget, with the settings of the run that it comes from."""
    return [record | row for record in records for row in record["rows"]]


def phases_of(records: Iterable[Record]) -> list[Record]:
    """A row for each phase of storages, with what it takes in units for people, and its share of the limit."""
    each = [record | phase for record in records for phase in record.get("phases", ())]
    return [row | {"share": row["limit_ms"] / row["ms"]} for row in each]


def linears_of(records: Iterable[Record]) -> list[Record]:
    """A row for each kernel of a model's linear layers, with its ms at each number of rows."""
    kernels: dict[str, Record] = {}
    for record in records:
        for one in record["kernels"]:
            if one["part"] == "layers":
                kernels.setdefault(one["kernel"], record | {"kernel": one["kernel"]})[f"ms_{one['rows']}"] = one["ms"]
    return [*kernels.values()]


def newest_of_policies(records: Iterable[Record]) -> list[Record]:
    """The latest of each policy on each text, whatever its refresh."""
    of_run = "model", "text", "prefix_len", "B", "gamma"
    what = *of_run, "draft_policy", "draft_budget", "snapkv_window", "draft_of_draft"
    return list({tuple(row.get(key) for key in what): row for row in rows_of(records)}.values())


def machine_name(record: Record) -> str:
    return str(record.get("gpu") or record.get("machine"))
