"""Writes docs/performance.md from pages/performance.md and the records in reproduce/results/.

    python reproduce/performance_page.py

No number on the page comes from anywhere but a record; what has no record is "not measured".
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from common import cli
from common.checkout import ROOT
from common.tables import Column
from reproduce.pages.generated_page import PAGES, RESULTS, NoFlags, filled, read, table, write
from reproduce.paper.columns import NONE, linears_of, newest_of_policies, of, phases_of, rows_of
from reproduce.paper.published import Record
from reproduce.spec_bench import table_rows

PAGE = ROOT / "docs" / "performance.md"
PLACES = tomllib.loads((PAGES / "performance.toml").read_text())


def pairs(records: Sequence[Record]) -> list[Record]:
    found = [record | record["median"] for record in records if "median" in record]
    rows = rows_of(record | {"pairs": record["repeats"]} for record in records if "rows" in record)
    return found + [row for row in rows if row["way"] != "plain"]


# What a table has rows of, where these are not its records.
ROWS = {"cpu_pairs": pairs, "policies_acceptance": newest_of_policies, "prompt_sets": table_rows}
ROWS |= dict.fromkeys(("cpu_storages", "drafters", "policy_pairs", "serving"), rows_of) | {"cpu_phases": phases_of}
ROWS |= {"cpu_linears": linears_of, "round_costs": lambda records: [row for one in records for row in one["rounds"]]}


def tables(folder: Path) -> dict[str, str]:
    """What stands at each place of the template."""
    shown = dict[str, str]()
    for place, said in PLACES.items():
        records = read(folder, said["file"], *said["benchmarks"])[-1 if said.get("newest") else 0 :]
        if not said.get("broken"):  # an error is no measurement
            records = [record for record in records if record.get("status") != "error"]
        peers = dict.fromkeys(key for record in records for key in record if key.startswith("step_ms: "))
        times = [Column(key, f"{key.removeprefix('step_ms: ')}, ms", ".1f", NONE) for key in peers]
        columns = of("prefix_len B", *times, "dtype") if times else of(place)
        shown[place] = table(said["what"], records, columns, said["file"], ROWS.get(place, list)(records))
    return shown


def page(folder: Path = RESULTS) -> str:
    text = filled("performance.md", tables(folder))
    # What these call results/ lies elsewhere, as seen from this page.
    return text.replace("](results/", "](../reproduce/results/").replace("`results/", "`reproduce/results/")


if __name__ == "__main__":
    cli.run_alone(lambda flags: write(PAGE, page()), NoFlags)
