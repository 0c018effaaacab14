"""Print how far predictions from data sheets are off published speedups, and every prediction.

python -m reproduce.roofline_error
"""

from dataclasses import dataclass
from statistics import median

from common import cli
from common.tables import Column, console
from reproduce.helpers.columns import TEXT, of
from reproduce.helpers.published import draft_name, is_acceptance_known, predict, published_speedups, target_name
from reproduce.helpers.records import Record

ERRORS = [
    Column("group", "published speedups", **TEXT),
    Column("speedups", "number"),
    Column("median_error", "median error", ".1%"),
    Column("largest_error", "largest", ".1%"),
]


@dataclass(frozen=True)
class Flags:
    pass


def predictions() -> list[Record]:
    """Return every published speedup with its prediction, and the error."""
    found = []
    for fact in published_speedups():
        group = "acceptance published" if is_acceptance_known(fact) else "acceptance assumed"
        predicted = predict(fact)
        found.append(fact | {"group": group, "predicted": predicted, "error": predicted / fact["value"] - 1})
    return found


def errors_by_group() -> list[Record]:
    """Return the errors of speedups whose acceptance was published, and of those whose acceptance is assumed."""
    groups: dict[str, list[float]] = {"acceptance published": [], "acceptance assumed": []}
    for row in predictions():
        groups[row["group"]].append(abs(row["error"]))
    return [
        {"group": name, "speedups": len(errors), "median_error": median(errors), "largest_error": max(errors)}
        for name, errors in groups.items()
    ]


def main(flags: Flags) -> None:
    models = [Column(target_name, "target", **TEXT), Column(draft_name, "draft", **TEXT)]
    numbers = [
        Column("value", "published", ".2f"),
        Column("predicted", "predicted", ".2f"),
        Column("error", "error", "+.0%"),
    ]
    columns = [Column("origin", "origin", **TEXT), *models, *of("prefix_len B"), *numbers]
    print(console(predictions(), columns), console(errors_by_group(), ERRORS), sep="\n\n")


if __name__ == "__main__":
    cli.run_alone(main, Flags)
