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
from typing import Any

from reproduce.gamma_cell import AUTO, AUTO_BUDGET
from reproduce.paper.figures import CATEGORIES, MARKERS, Panel, Series
from reproduce.paper.reproduction import NONE, Record, side_by_side

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
    """One run. Speedups are medians over plain decoding; `ratios`: to the better of gamma 3 and plain, by repeat.

    index: the run's place among all runs, the same for every way of it. share_by_budget: of all rounds; None is plain.
    """

    index: int
    B: int
    prefix_len: int
    gen_len: int
    auto: float
    usual: float
    usual_gamma: int
    usual_budget: int
    best: float
    best_gamma: int
    best_budget: int | None
    mean_gamma: float
    share_by_budget: dict[int | None, float]
    ratios: tuple[float, ...]

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
    return Against(
        index=index,
        B=record["B"],
        prefix_len=record["prefix_len"],
        gen_len=record["gen_len"],
        auto=auto["speedup"],
        usual=usual["speedup"],
        usual_gamma=usual["gamma"],
        usual_budget=usual["draft_budget"],
        best=best["speedup"],
        best_gamma=best["gamma"],
        best_budget=best["draft_budget"],
        mean_gamma=fmean(gamma for run in auto["gammas"] for gamma in run),
        share_by_budget=_shares(auto["budgets"]),
        ratios=tuple(own / other for own, other in rates),
    )


def _shares(budgets: Sequence[Sequence[int | None]] | None) -> dict[int | None, float]:
    """Which share of the rounds of all repeats drafted with which budget; none where it is not chosen."""
    counts = Counter(budget for run in budgets or () for budget in run)
    return {budget: n / counts.total() for budget, n in counts.items()}


def _speedup(row: dict[str, Any]) -> float:
    return row["speedup"]


BEST = "best gamma, budget"
USUAL = f"gamma {USUAL_GAMMA} or nearest"
HEAD = ["rows", "context", "new tokens", USUAL, "gamma, budget", "best fixed", BEST, "auto", "mean gamma"]
HEAD += ["% of rounds by budget", "repeats", "auto / better", "90% interval", "lowest"]


def lines(choosing: Choosing, records: Sequence[Record]) -> list[list[str]]:
    """The fields under HEAD, for each run that has this way."""
    return [
        [
            str(row.B),
            str(row.prefix_len),
            str(row.gen_len),
            f"{row.usual:.2f}",
            f"{row.usual_gamma}, {row.usual_budget}",
            f"{row.best:.2f}",
            "plain" if row.best_gamma == 0 else f"{row.best_gamma}, {row.best_budget}",
            f"{row.auto:.2f}",
            f"{row.mean_gamma:.1f}",
            _budgets(row.share_by_budget),
            str(len(row.ratios)),
            f"{row.ratio:.3f}",
            "-" if row.interval is None else "{:.2f} to {:.2f}".format(*row.interval),
            f"{min(row.ratios):.3f}",
        ]
        for row in against_fixed(choosing, records)
    ]


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
    compared = lines(choosing, records)
    if not compared:
        return f"\n  {choosing.plain_title}: {NONE}"
    return f"\n  {choosing.plain_title}\n\n{side_by_side(HEAD, compared)}\n  {summary(choosing, records)}"


def panel(records: Sequence[Record]) -> Panel:
    """Speedups of the runs, in the order of the table; what is fixed has the best of the measured budgets."""
    auto, both = (against_fixed(choosing, records) for choosing in WAYS)
    shown = [
        ("best fixed", both, [row.best for row in both]),
        (USUAL, both, [row.usual for row in both]),
        ("gamma auto, largest budget", auto, [row.auto for row in auto]),
        ("gamma and budget auto", both, [row.auto for row in both]),
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
