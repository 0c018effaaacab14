"""What `--gamma auto` and `--draft_budget auto` reach beside fixed gammas, from the records of gamma_cell.py.

Every run of a way that chooses is held against the run in the same repeat of plain decoding or of gamma 3 (or the gamma
nearest to it), whichever has the larger median speedup. That is a little too strict: the way that seems the better in
these very repeats is partly the luckier one, less so the more repeats there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from common.tables import Column, console
from reproduce.paper.columns import NONE
from reproduce.paper.figures import CATEGORIES, MARKERS, Panel, Series
from reproduce.paper.published import Record

# The ways of gamma_cell.py that choose from round to round.
AUTO, AUTO_BUDGET = "auto", "auto budget"
# The aim: what a way that chooses keeps, at least, of the better of gamma 3 and plain decoding.
LEAST_RATIO = 0.95
USUAL_GAMMA = 3
# How sure the interval of a median is, at least.
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Choosing:
    """A way that chooses; `own_budget`: it is compared with the fixed gammas of its own budget, not of any.

    title: in Markdown.
    """

    way: str
    own_budget: bool
    title: str

    @property
    def plain_title(self) -> str:
        return self.title.replace("`", "")


GAMMA = Choosing(AUTO, True, "`--gamma auto`, at the largest budget")
GAMMA_AND_BUDGET = Choosing(
    AUTO_BUDGET, False, "`--gamma auto --draft_budget auto`, against the best of the measured budgets"
)
WAYS = (GAMMA, GAMMA_AND_BUDGET)


@dataclass(frozen=True)
class Against:
    """One run: the row of what chooses, and of the fixed choices that it is held against. Speedups are medians over
    plain decoding; `ratios`: to the better of gamma 3 and plain, by repeat.

    index: the run's place among all runs, the same for every way of it.
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
    def share_by_budget(self) -> dict[int | None, float]:
        """Which share of the rounds of all repeats drafted with which budget, None being plain; none if not chosen."""
        counts = Counter(budget for run in self.auto["budgets"] or () for budget in run)
        return {budget: n / counts.total() for budget, n in counts.items()}

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Two of the repeats' ratios between which the median of such repeats lies with CONFIDENCE, if they are
        independent: the n-th lowest and highest, n by the binomial law (e.g. Conover 1999, section 3.2). None of so few
        repeats that even the lowest and the highest are not enough. Text and prompts are the same in all repeats:
        this is about the machine.
        """
        ratios, n_repeats = sorted(self.ratios), len(self.ratios)
        below = list(accumulate(math.comb(n_repeats, n) / 2**n_repeats for n in range(n_repeats)))
        outside = sum(1 - 2 * share >= CONFIDENCE for share in below)
        return (ratios[outside - 1], ratios[-outside]) if outside else None


def against_fixed(choosing: Choosing, records: Sequence[Record]) -> list[Against]:
    """One for each run that has this way."""
    return [
        _against(choosing, index, run)
        for index, run in enumerate(_runs(records))
        if any(row["way"] == choosing.way for row in run["rows"])
    ]


def _runs(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["benchmark"] == "gamma_cell"]


def _against(choosing: Choosing, index: int, record: Record) -> Against:
    rows = {row["way"]: row for row in record["rows"]}
    auto, plain = rows[choosing.way], rows["plain"]
    fixed = [row for row in record["rows"] if isinstance(row["gamma"], int) and row["gamma"] > 0]
    if choosing.own_budget:
        fixed = [row for row in fixed if row["draft_budget"] == auto["draft_budget"]]
    nearest = min(abs(row["gamma"] - USUAL_GAMMA) for row in fixed)
    usual = max((row for row in fixed if abs(row["gamma"] - USUAL_GAMMA) == nearest), key=_speedup)
    best = max([plain, *fixed], key=_speedup)
    better = max([plain, usual], key=_speedup)
    rates = zip(auto["tokens_per_second"], better["tokens_per_second"], strict=True)
    ratios = tuple(own / other for own, other in rates)
    return Against(index, record, auto, usual, best, ratios)


def _speedup(row: Record) -> float:
    return row["speedup"]


BEST = "best gamma, budget"
USUAL = f"gamma {USUAL_GAMMA} or nearest"
COLUMNS = (
    Column(lambda found: found.record["B"], "rows"),
    Column(lambda found: found.record["prefix_len"], "context"),
    Column(lambda found: found.record["gen_len"], "new tokens"),
    Column(lambda found: _speedup(found.usual), USUAL, ".2f"),
    Column(lambda found: _fixed(found.usual), "gamma, budget"),
    Column(lambda found: _speedup(found.best), "best fixed", ".2f"),
    Column(lambda found: _fixed(found.best), BEST),
    Column(lambda found: _speedup(found.auto), "auto", ".2f"),
    Column(lambda found: found.mean_gamma, "mean gamma", ".1f"),
    Column(lambda found: _budgets(found.share_by_budget), "% of rounds by budget"),
    Column(lambda found: len(found.ratios), "repeats"),
    Column(lambda found: found.ratio, "auto / better", ".3f"),
    Column(lambda found: found.interval, "90% interval", lambda ends: "{:.2f} to {:.2f}".format(*ends)),
    Column(lambda found: min(found.ratios), "lowest", ".3f"),
)


def _fixed(row: Record) -> str:
    return f"{row['gamma']}, {row['draft_budget']}" if row["gamma"] else "plain"


def _budgets(shares: dict[int | None, float]) -> str:
    named = sorted((budget or 0, share) for budget, share in shares.items())
    return " ".join(f"{budget or 'plain'}: {100 * share:.0f}" for budget, share in named) or "-"


def summary(choosing: Choosing, records: Sequence[Record]) -> str:
    """How many runs fall short of the aim, and how many surely do or do not; at least one has this way."""
    rows = against_fixed(choosing, records)
    n_below = sum(row.ratio < LEAST_RATIO for row in rows)
    verdict = "no median lies below" if not n_below else f"{n_below} of {len(rows)} medians below"
    intervals = [row.interval for row in rows if row.interval is not None]
    if intervals:
        above, below = (
            sum(low >= LEAST_RATIO for low, _ in intervals),
            sum(high < LEAST_RATIO for _, high in intervals),
        )
        verdict += f"; of {len(intervals)} intervals, {above} as a whole above and {below} below"
    lowest = min(row.ratio for row in rows)
    return f"the aim is {LEAST_RATIO} or more at every size: {verdict}; the lowest median is {lowest:.4f}"


def table(choosing: Choosing, records: Sequence[Record]) -> str:
    compared = against_fixed(choosing, records)
    if not compared:
        return f"\n  {choosing.plain_title}: {NONE}"
    return f"\n  {choosing.plain_title}\n\n{console(compared, COLUMNS)}\n  {summary(choosing, records)}"


def panel(records: Sequence[Record]) -> Panel:
    """Speedups of the runs, in the order of the table; what is fixed has the best of the measured budgets."""
    auto, both = (against_fixed(choosing, records) for choosing in WAYS)
    shown = [
        ("best fixed", both, [_speedup(row.best) for row in both]),
        (USUAL, both, [_speedup(row.usual) for row in both]),
        ("gamma auto, largest budget", auto, [_speedup(row.auto) for row in auto]),
        ("gamma and budget auto", both, [_speedup(row.auto) for row in both]),
    ]
    series = [
        Series(name, [row.index for row in rows], speedups, colour, marker=marker, has_line=False)
        for (name, rows, speedups), colour, marker in zip(shown, CATEGORIES, MARKERS, strict=False)
        if rows
    ]
    return Panel(
        "choosing from round to round",
        "rows x context (tokens)",
        "speedup",
        tuple(series),
        is_log_x=False,
        reference=(1.0, "plain decoding"),
        x_names=tuple(f"{run['B']} x {run['prefix_len']}" for run in _runs(records)),
    )
