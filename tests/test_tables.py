"""One description of a table's columns, drawn for the console and in Markdown."""

from common.tables import Column, console, markdown

COLUMNS = [
    Column("model", "model", align="<"),
    Column("speedup", "speedup", ".2f"),
    Column(lambda row: row["B"] * 2, "twice", lambda value: f"{value} rows", missing="none"),
    Column("alpha", "a|b", ".0%", missing="not measured"),
]
ROWS = [{"model": "M", "speedup": 1.256, "B": 4, "alpha": 0.5}, {"model": "longer", "speedup": None, "B": 16}]


def test_on_the_console_columns_are_as_wide_as_what_is_in_them():
    assert console(ROWS, COLUMNS).splitlines() == [
        "  model   speedup    twice           a|b",
        "  M          1.26   8 rows           50%",
        "  longer        -  32 rows  not measured",
    ]


def test_in_markdown_a_bar_ends_no_cell():
    assert markdown(ROWS, COLUMNS).splitlines() == [
        r"| model | speedup | twice | a\|b |",
        "| --- | ---: | ---: | ---: |",
        "| M | 1.26 | 8 rows | 50% |",
        "| longer | - | 32 rows | not measured |",
    ]


def test_without_rows_there_are_heads():
    assert console([], COLUMNS) == "  model  speedup  twice  a|b"
    assert markdown([], COLUMNS).count("\n") == 1
