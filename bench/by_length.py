"""Acceptance, costs and speedup by the number of tokens that a row has generated."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from bench.passes import Decoded
from engine.stats import Counts, RowRound, counts_by_row


class Part(NamedTuple):
    """A row's part in a round. seconds: of the round, and of its draft and its verification where phases were timed;
    None unless as many rows decoded as ever did."""

    row: RowRound
    seconds: float | None = None
    draft: float | None = None
    verify: float | None = None


def by_length_rows(width: int, gen_len: int, passes: Mapping[str, Decoded]) -> list[dict[str, Any]]:
    """Return a row for each stretch of `width` generated tokens that speculation reached, None where nothing is known.

    A round of three rows counts three times in `rounds`. Times are means over steady rounds. passes: by name.
    """
    stretches = {name: _parts(width, output) for name, output in passes.items()}
    requests = sorted({part.row.request for parts in stretches["speculation"].values() for part in parts})
    rows = []
    for index, parts in sorted(stretches["speculation"].items()):
        plain, timed = (stretches.get(name, {}).get(index, []) for name in ("baseline", "phase times"))
        verified, emitted = (sum(getattr(part.row, name) for part in parts) for name in ("verified", "emitted"))
        speed, plain_speed = _tokens_per_second(parts), _tokens_per_second(plain)
        rows.append(
            {
                "generated": [index * width, min((index + 1) * width, gen_len)],
                "rounds": len(parts),
                "verified": verified,
                "by_row": _by_row(parts, requests),
                "acceptance_rate": sum(part.row.accepted for part in parts) / verified if verified else None,
                "mean_accepted_length": emitted / len(parts),
                "baseline_step_ms": _mean_ms(plain, "seconds"),
                "round_ms": _mean_ms(parts, "seconds"),
                "draft_ms": _mean_ms(timed, "draft"),
                "verify_ms": _mean_ms(timed, "verify"),
                "speedup": speed / plain_speed if speed and plain_speed else None,
            }
        )
    return rows


def _parts(width: int, output: Decoded) -> dict[int, list[Part]]:
    """Return the parts of all rounds of a pass by the stretch in which each row was."""
    found: dict[int, list[Part]] = {}
    steady = {*map(id, output.stats.steady())}
    for n, round_ in enumerate(output.stats.rounds):
        times = [round_.seconds, *(output.phases[name][n] for name in ("draft", "verify") if name in output.phases)]
        for row in round_.rows:
            found.setdefault(row.n_before // width, []).append(Part(row, *(times if id(round_) in steady else ())))
    return found


def _by_row(parts: Sequence[Part], requests: Sequence[int]) -> list[dict[str, int]]:
    """Return the counts of each request, also of those without a round in the stretch."""
    gamma = max(part.row.drafted for part in parts)
    found = {request: Counts.of_gamma(gamma) for request in requests}
    for row, *_ in parts:
        found[row.request].add_round(row.drafted, row.accepted, row.emitted)
    return counts_by_row(found.values())


def _mean_ms(parts: Sequence[Part], name: str) -> float | None:
    seconds = [time for part in parts if (time := getattr(part, name)) is not None]
    return 1e3 * fmean(seconds) if seconds else None


def _tokens_per_second(parts: Sequence[Part]) -> float | None:
    """Return the tokens per second of a row in steady rounds."""
    steady = [part for part in parts if part.seconds is not None]
    seconds = sum(part.seconds or 0.0 for part in steady)
    return sum(part.row.emitted for part in steady) / seconds if seconds else None
