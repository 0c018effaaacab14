"""Published and measured points of the same kind, as the series of a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kv_cache.policy import policies
from reproduce.paper.columns import TEXTS
from reproduce.paper.figures import CATEGORIES, MARKERS, Series, lines
from reproduce.paper.published import SELF, Fact, Record, draft_name, target_name

# In the order of their colours.
POLICIES = (*dict.fromkeys(("full", "streaming", "snapkv", *policies())),)


def by_rows(
    facts: Sequence[Fact],
    records: Sequence[Record],
    value: Callable[[Record], float | None],
    colours: Mapping[float, str],
    title: str,
) -> tuple[Series, ...]:
    """Over the rows decoded together: a line for each context, and for measured ones for each way to draft that the
    title (of `in_common`) does not say of all.
    """

    def name(record: Record) -> str:
        own = [part for part in _way(record) if part not in title]
        return ", ".join(["measured", f"{record['prefix_len']} tokens", *own])

    published = lines(
        facts,
        lambda fact: f"published, {fact.context} tokens",
        lambda fact: fact.B,
        lambda fact: fact.value,
        lambda fact: colours[fact.context],
        "o",
        is_published=True,
    )
    measured = lines(
        records,
        name,
        lambda record: record["B"],
        value,
        lambda record: colours[record["prefix_len"]],
        lambda record: "o" if draft_name(record) == SELF else "s",
    )
    return *published, *measured


def _way(record: Record) -> tuple[str, ...]:
    """The target, and how it is drafted for."""
    draft = f"{draft_name(record)} draft in {record.get('draft_weights') or record.get('draft_dtype')}"
    return target_name(record), draft, f"gamma {record['gamma']}", f"budget {record['draft_budget']}"


def in_common(records: Sequence[Record]) -> str:
    """What all of them share, for a title."""
    common = [values[0] for values in zip(*map(_way, records), strict=True) if len(set(values)) == 1]
    return f"measured: {', '.join(common)}" if common else ""


def acceptance_curves(rows: Sequence[Record], x: str) -> tuple[Series, ...]:
    """A line for each model, policy and text; a colour is a policy, a marker a text."""
    several = len({row["model"] for row in rows}) > 1
    return tuple(
        lines(
            rows,
            lambda row: f"measured, {row['model'] + ', ' if several else ''}{row['draft_policy']}, {row['text']}",
            lambda row: row[x],
            lambda row: row["acceptance_rate"],
            lambda row: CATEGORIES[POLICIES.index(row["draft_policy"])],
            lambda row: MARKERS[TEXTS.index(row["text"])],
        )
    )
