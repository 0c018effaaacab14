"""What `--gamma auto` and `--draft_budget auto` reach beside fixed gammas, from the records of gamma_cell.py.

Every automatic run is held against the run in the same repeat of plain decoding or of gamma 3 (or the gamma nearest to
it), whichever has the larger median speedup. That is a little too strict: what seems the better in these very repeats
is partly the luckier one, less so the more repeats there are.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from statistics import fmean, median

from common.tables import markdown
from reproduce.paper.columns import NONE, of
from reproduce.paper.published import Record

# What gamma_cell.py calls the modes that choose from round to round, and what they are called in Markdown. The first is
# compared with the fixed gammas of its own budget, the second with those of any.
AUTO, AUTO_BUDGET = "auto", "auto budget"
MODES = {
    AUTO: "`--gamma auto`, at the largest budget",
    AUTO_BUDGET: "`--gamma auto --draft_budget auto`, against the best of the measured budgets",
}
# The first new token is the prompt's, before any round.
LEAST_GEN_LEN = 2
# The aim: what an automatic mode keeps, at least, of the better of gamma 3 and plain decoding.
LEAST_RATIO = 0.95
USUAL_GAMMA = 3
SPEEDUP = itemgetter("speedup")


def runs_of(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["benchmark"] == "gamma_cell"]


def against_fixed(mode: str, records: Sequence[Record]) -> list[Record]:
    """Each run that has this mode, with the row of the mode (`auto`), and of the fixed choices that it is held against:
    gamma 3 (`usual`) and the `best`. `ratios`: to the better of gamma 3 and plain, by repeat."""
    found = []
    for run in runs_of(records):
        rows = {row["way"]: row for row in run["rows"]}
        if mode not in rows:
            continue
        auto, plain = rows[mode], rows["plain"]
        fixed = [row for row in rows.values() if isinstance(row["gamma"], int) and row["gamma"] > 0]
        if mode == AUTO:
            fixed = [row for row in fixed if row["draft_budget"] == auto["draft_budget"]]
        usual = min(fixed, key=lambda row: (abs(row["gamma"] - USUAL_GAMMA), -row["speedup"]))
        rates = auto["tokens_per_second"], max(plain, usual, key=SPEEDUP)["tokens_per_second"]
        ratios = [own / better for own, better in zip(*rates, strict=True)]
        held = {"auto": auto, "usual": usual, "best": max([plain, *fixed], key=SPEEDUP)}
        speedups = {f"{kind}_speedup": row["speedup"] for kind, row in held.items()}
        own = {"ratio": median(ratios), "lowest": min(ratios), "mean_gamma": fmean(chain(*auto["gammas"]))}
        found.append(run | held | speedups | own | {"ratios": ratios, "repeats": len(ratios)})
    return found


def summary(rows: Sequence[Record]) -> str:
    """How many runs fall short of the aim; of at least one."""
    ratios = [row["ratio"] for row in rows]
    n_below = sum(ratio < LEAST_RATIO for ratio in ratios)
    verdict = f"{n_below} of {len(rows)} medians below" if n_below else "no median lies below"
    return f"the aim is {LEAST_RATIO} or more at every size: {verdict}; the lowest median is {min(ratios):.4f}"


def section_of(mode: str, records: Sequence[Record], render: Callable[..., str] = markdown) -> str:
    compared, title = against_fixed(mode, records), MODES[mode]
    if not compared:
        return f"{title}: {NONE}."
    return f"{title}:\n\n{render(compared, of('automatic'))}\n\n{summary(compared).capitalize()}."
