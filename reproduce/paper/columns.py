"""The columns of all tables of runs, here and on the pages, and the rows that set published numbers beside them."""

import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from common.tables import Column
from reproduce.paper.published import SELF, Record, draft_name, speedup, target_name

NONE = "not measured"
SLOWER = "*"
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


def rows_a_round(row: Record) -> float | None:
    """Of a load on a server: those that decode together."""
    rate, ms, tokens = (row[name] for name in ("decode_tokens_per_second", "round_ms", "tokens_per_round"))
    return rate * ms / 1e3 / tokens if tokens and rate else None


# What tables list, by name: a record's field, unless it is made of several.
FIELDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COLUMNS = {
    **{name: Column(**{"key": name, **said}) for name, said in FIELDS["known"].items()},
    **{name: measured(name, **said) for name, said in FIELDS["measured"].items()},
    "speedup": measured("speedup", "speedup", speedup_text),
    "wall_speedup": measured("wall_speedup", "to the last row", speedup_text),
    "acceptance_per_position": Column(
        "acceptance_per_position",
        "by draft position",
        lambda rates: ", ".join(NONE if rate is None else f"{rate:.2f}" for rate in rates) or "-",
    ),
    "gap_percent": measured("gap_percent", "gaps", "{:.1f}%".format),
    "target": Column(target_name, "target", align="<"),
    "draft": Column(draft_name, "draft", align="<"),
    "draft_weights": Column(lambda row: row.get("draft_weights") or row.get("draft_dtype"), "draft weights", align="<"),
    # Older records only say whether it was compiled.
    "pointwise": Column(
        lambda row: row.get("pointwise") or ("compiled" if row.get("compile") else "eager"), "pointwise", align="<"
    ),
    "budget_or_all": Column(lambda row: "all" if row["draft_policy"] == "full" else row["draft_budget"], "budget"),
    "identical": Column(_identical, "identical rows"),
    "verify_over_plain": measured(over("verify_step_ms"), KINDS["verify"], ".2f"),
    "draft_over_plain": measured(over("draft_step_ms"), KINDS["draft"], ".2f"),
    "drafting_over_plain": measured(over("drafting_ms"), "drafting / plain step", ".2f"),
    "formula": measured(_formula_speedup, "by the formula", speedup_text),
    "plain_ms_per_token": measured("baseline_step_ms", "plain, ms a token", ".1f"),
    "ms_per_token": measured(over("round_ms", "mean_accepted_length"), "speculation, ms a token", ".1f"),
    "prompt_tokens": Column(lambda row: f"{row['shortest']} to {row['longest']}", "prompt tokens"),
    "inner_rate": Column(lambda row: (row.get("inner") or {}).get("acceptance_rate"), "its acceptance", ".3f"),
    "outcome": Column("status", "outcome", lambda status: "passed" if status == "done" else "FAILED", align="<"),
    "kv_megabytes": Column(lambda row: f"{row['kv_bytes'] * 1e-6:.0f}{' *' if row['is_large'] else ''}", "MB of KV"),
    "largest_kernel": Column(lambda row: f"`{row['largest'][0]['kernel'][:60]}`", "largest kernel", align="<"),
    "ms_of_largest": Column(lambda row: row["largest"][0]["ms_per_round"], "of it, ms", ".2f"),
    "shared_bytes": Column(
        lambda row: " and ".join(f"{n} on {gpu}" for gpu, n in row["max_shared_bytes"].items()),
        "bytes of shared memory of a block, at most",
    ),
    "n_problems": Column(lambda record: len(record["problems"]), "that spill or do not fit"),
}
# What other tables have beside fields.
COMPUTED = {"rows_a_round": rows_a_round, "spills": lambda row: row["spill_stores"] + row["spill_loads"]}


def of(*names: str | Column, **computed: Callable[[Any], object]) -> list[Column]:
    """Columns by their names, several with spaces between; those of a table by its name; and any others as they are.

    computed: of a table's columns those that are functions of the row.
    """
    found: list[Column] = []
    for name in chain.from_iterable(one.split() if isinstance(one, str) else [one] for one in names):
        if isinstance(name, Column):
            found.append(name)
        elif name in FIELDS["tables"]:
            found += of(FIELDS["tables"][name])
        elif name in FIELDS["own"]:
            found += [Column((COMPUTED | computed).get(key, key), **said) for key, said in FIELDS["own"][name].items()]
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


def machine_name(record: Record) -> str:
    return str(record.get("gpu") or record.get("machine"))
