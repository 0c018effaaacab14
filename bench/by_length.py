"""Acceptance, costs and speedup by the number of tokens that a row has generated."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bench.passes import Decoded
from engine.stats import Counts, counts_by_row, total


@dataclass
class Stretch:
    """A pass while its rows generated the tokens of one stretch.

    rows: the counts of every request, also of those without a round here. seconds: by name, the duration of a steady
    round and of its draft and its verification where phases were timed, once for each row. emitted: tokens of these
    rounds, in which as many rows decoded as ever did.
    """

    rows: dict[int, Counts]
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    emitted: int = 0

    def mean_ms(self, name: str) -> float | None:
        return 1e3 * fmean(self.seconds[name]) if self.seconds[name] else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of a row."""
        return self.emitted / sum(self.seconds["round"]) if self.seconds["round"] else None


def by_length_rows(width: int, gen_len: int, passes: Mapping[str, Decoded]) -> list[dict[str, Any]]:
    """Return a row for each stretch of `width` generated tokens that speculation reached, None where nothing is known.

    A round of three rows counts three times in `rounds`. Times are means over steady rounds. passes: by name.
    """
    stretches = {name: _stretches(width, output) for name, output in passes.items()}
    rows = []
    for index, drafted in sorted(stretches["speculation"].items()):
        plain, timed = (stretches.get(name, {}).get(index, Stretch({})) for name in ("baseline", "phase times"))
        counts, speed, plain_speed = total([*drafted.rows.values()]), drafted.tokens_per_second, plain.tokens_per_second
        rows.append(
            {
                "generated": [index * width, min((index + 1) * width, gen_len)],
                "rounds": counts.rounds,
                "verified": counts.verified,
                "by_row": counts_by_row(drafted.rows.values()),
                "acceptance_rate": counts.acceptance_rate,
                "mean_accepted_length": counts.mean_accepted_length,
                "baseline_step_ms": plain.mean_ms("round"),
                "round_ms": drafted.mean_ms("round"),
                "draft_ms": timed.mean_ms("draft"),
                "verify_ms": timed.mean_ms("verify"),
                "speedup": speed / plain_speed if speed and plain_speed else None,
            }
        )
    return rows


def _stretches(width: int, output: Decoded) -> dict[int, Stretch]:
    """Return the stretches of a pass by their index."""
    rounds, steady = output.stats.rounds, {*map(id, output.stats.steady())}
    requests = sorted({row.request for round_ in rounds for row in round_.rows})
    gamma = max((row.drafted for round_ in rounds for row in round_.rows), default=0)
    found = defaultdict[int, Stretch](lambda: Stretch({request: Counts.of_gamma(gamma) for request in requests}))
    for n, round_ in enumerate(rounds):
        phases = {name: output.phases[name][n] for name in ("draft", "verify") if name in output.phases}
        for row in round_.rows:
            stretch = found[row.n_before // width]
            stretch.rows[row.request].add_round(row.drafted, row.accepted, row.emitted)
            if id(round_) in steady:
                stretch.emitted += row.emitted
                for name, seconds in ({"round": round_.seconds} | phases).items():
                    stretch.seconds[name].append(seconds)
    return found
