"""What `--gamma auto` and `--draft_budget auto` reach beside fixed gammas, from the records of gamma_cell.py.

Every automatic run is held against the run in the same repeat of plain decoding or of gamma 3 (or the gamma nearest to
it), whichever has the larger median speedup. That is a little too strict: what seems the better in these very repeats
is partly the luckier one, less so the more repeats there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from statistics import fmean, median

from common.tables import Column, console
from reproduce.paper.columns import NONE
from reproduce.paper.figures import Panel, lines
from reproduce.paper.published import Record

# What gamma_cell.py calls the modes that choose from round to round.
AUTO, AUTO_BUDGET = "auto", "auto budget"
# The first new token is the prompt's, before any round.
LEAST_GEN_LEN = 2
# The aim: what an automatic mode keeps, at least, of the better of gamma 3 and plain decoding.
LEAST_RATIO = 0.95
USUAL_GAMMA = 3
# How sure the interval of a median is, at least.
CONFIDENCE = 0.9
SPEEDUP = itemgetter("speedup")


@dataclass(frozen=True)
class Mode:
    """An automatic mode, by its name in records; `own_budget`: it is compared with the fixed gammas of its own budget,
    not of any. title: in Markdown.
    """

    name: str
    own_budget: bool
    title: str


GAMMA = Mode(AUTO, True, "`--gamma auto`, at the largest budget")
GAMMA_AND_BUDGET = Mode(
    AUTO_BUDGET, False, "`--gamma auto --draft_budget auto`, against the best of the measured budgets"
)
MODES = (GAMMA, GAMMA_AND_BUDGET)


@dataclass(frozen=True)
class Against:
    """One run: the row of an automatic mode, and of the fixed choices that it is held against. Speedups are medians
    over plain decoding; `ratios`: to the better of gamma 3 and plain, by repeat. index: the place among all runs.
    """

    index: int
    record: Record
    auto: Record
    usual: Record
    best: Record
    ratios: tuple[float, ...]

    @property
    def mean_gamma(self) -> float:
        return fmean(gamma for run in self.auto["gammas"] for gamma in run)

    @property
    def share_by_budget(self) -> dict[int, float]:
        """Which share of the rounds of all repeats drafted with which budget, 0 being plain; none if not chosen."""
        counts = Counter(budget or 0 for run in self.auto["budgets"] or () for budget in run)
        return {budget: n / counts.total() for budget, n in sorted(counts.items())}

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Two of the repeats' ratios between which the median of such repeats lies with CONFIDENCE, if they are
        independent: the n-th lowest and highest, n by the binomial distribution (e.g. Conover 1999, section 3.2). None
        of so few repeats that even the lowest and the highest are not enough. Text and prompts are the same in all
        repeats: this is about the machine.
        """
        ratios, n_repeats = sorted(self.ratios), len(self.ratios)
        below = list(accumulate(math.comb(n_repeats, n) / 2**n_repeats for n in range(n_repeats)))
        outside = sum(1 - 2 * share >= CONFIDENCE for share in below)
        return (ratios[outside - 1], ratios[-outside]) if outside else None


def against_fixed(mode: Mode, records: Sequence[Record]) -> list[Against]:
    """One for each run that has this mode."""
    named = [(index, run, {row["way"]: row for row in run["rows"]}) for index, run in enumerate(_runs(records))]
    return [_against(mode, index, run, rows) for index, run, rows in named if mode.name in rows]


def _runs(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["benchmark"] == "gamma_cell"]


def _against(mode: Mode, index: int, record: Record, rows: dict[str, Record]) -> Against:
    auto, plain = rows[mode.name], rows["plain"]
    fixed = [row for row in rows.values() if isinstance(row["gamma"], int) and row["gamma"] > 0]
    if mode.own_budget:
        fixed = [row for row in fixed if row["draft_budget"] == auto["draft_budget"]]
    usual = min(fixed, key=lambda row: (abs(row["gamma"] - USUAL_GAMMA), -row["speedup"]))
    better = max(plain, usual, key=SPEEDUP)
    rates = zip(auto["tokens_per_second"], better["tokens_per_second"], strict=True)
    return Against(index, record, auto, usual, max([plain, *fixed], key=SPEEDUP), tuple(a / b for a, b in rates))


BEST = "best gamma, budget"
USUAL = f"gamma {USUAL_GAMMA} or nearest"
COLUMNS = (
    Column(lambda found: found.record["B"], "rows"),
    Column(lambda found: found.record["prefix_len"], "context"),
    Column(lambda found: found.record["gen_len"], "new tokens"),
    Column(lambda found: found.usual["speedup"], USUAL, ".2f"),
    Column(lambda found: _fixed(found.usual), "gamma, budget"),
    Column(lambda found: found.best["speedup"], "best fixed", ".2f"),
    Column(lambda found: _fixed(found.best), BEST),
    Column(lambda found: found.auto["speedup"], "auto", ".2f"),
    Column(lambda found: found.mean_gamma, "mean gamma", ".1f"),
    Column(lambda found: _shares(found.share_by_budget) or None, "% of rounds by budget"),
    Column(lambda found: len(found.ratios), "repeats"),
    Column(lambda found: found.ratio, "auto / better", ".3f"),
    Column(lambda found: found.interval, "90% interval", lambda ends: "{:.2f} to {:.2f}".format(*ends)),
    Column(lambda found: min(found.ratios), "lowest", ".3f"),
)


def _fixed(row: Record) -> str:
    return f"{row['gamma']}, {row['draft_budget']}" if row["gamma"] else "plain"


def _shares(by_budget: dict[int, float]) -> str:
    return " ".join(f"{budget or 'plain'}: {100 * share:.0f}" for budget, share in by_budget.items())


def summary(rows: Sequence[Against]) -> str:
    """How many runs fall short of the aim, and how many surely do or do not; of at least one."""
    n_below = sum(row.ratio < LEAST_RATIO for row in rows)
    verdict = "no median lies below" if not n_below else f"{n_below} of {len(rows)} medians below"
    intervals = [row.interval for row in rows if row.interval is not None]
    if intervals:
        above, below = sum(low >= LEAST_RATIO for low, _ in intervals), sum(high < LEAST_RATIO for _, high in intervals)
        verdict += f"; of {len(intervals)} intervals, {above} as a whole above and {below} below"
    lowest = min(row.ratio for row in rows)
    return f"the aim is {LEAST_RATIO} or more at every size: {verdict}; the lowest median is {lowest:.4f}"


def table(mode: Mode, records: Sequence[Record]) -> str:
    compared, title = against_fixed(mode, records), mode.title.replace("`", "")
    if not compared:
        return f"\n  {title}: {NONE}"
    return f"\n  {title}\n\n{console(compared, COLUMNS)}\n  {summary(compared)}"


def panel(records: Sequence[Record]) -> Panel:
    """Speedups of the runs, in the order of the table; what is fixed has the best of the measured budgets."""
    auto, both = (against_fixed(mode, records) for mode in MODES)
    points = [("best fixed", run.index, run.best) for run in both] + [(USUAL, run.index, run.usual) for run in both]
    points += [("gamma auto, largest budget", run.index, run.auto) for run in auto]
    points += [("gamma and budget auto", run.index, run.auto) for run in both]
    return Panel(
        "choosing from round to round",
        "rows x context (tokens)",
        "speedup",
        tuple(lines(points, itemgetter(0), itemgetter(1), lambda point: point[2]["speedup"], has_line=False)),
        is_log_x=False,
        reference=(1.0, "plain decoding"),
        x_names=tuple(f"{run['B']} x {run['prefix_len']}" for run in _runs(records)),
    )
