"""What a load on a server comes to: rates, percentiles, and what rounds took. And the prompts that it is made of."""

import math
from collections.abc import Iterator, Sequence
from itertools import count

import numpy

import bench
from reproduce.paper.published import Record
from reproduce.serve_parts.clients import COUNTED, Phase


def spread(shortest: int, longest: int) -> Iterator[int]:
    """Lengths without end, of which any few in a row are spread evenly."""
    return (shortest + int((longest - shortest) * (index * (math.sqrt(5) - 1) / 2 % 1)) for index in count(1))


def summary(phases: Sequence[Phase]) -> Record:
    """Of all requests of phases of one kind. tpot: of tokens behind a request's first one. decode: while rounds run,
    by the server's own clock, if it has one."""
    answers = [answer for phase in phases for answer in phase.answers]
    good, seconds = [answer for answer in answers if answer.error is None], sum(phase.seconds for phase in phases)
    n_decoded, n_rounds, in_rounds, between = (sum(one.counters.get(name, 0) for one in phases) for name in COUNTED)
    said = [answer.said for answer in good if answer.said]
    timings = {name: sum(one["timings"][name] for one in said) for name in ("prompt_n", "cache_n", "predicted_n")}
    drafts = {name: sum(one["speculation"][name] for one in said) for name in ("rounds", "drafted", "accepted")}
    longer = [one for one in good if one.n_tokens > 1]
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens": sum(one.n_tokens for one in good),
        "output_tokens_per_second": sum(one.n_tokens for one in good) / seconds,
        "of_each_repeat": [sum(one.n_tokens for one in phase.answers) / phase.seconds for phase in phases],
        **percentiles("ttft_ms", [one.times[0] - one.asked for one in good]),
        **percentiles("tpot_ms", [(one.times[-1] - one.times[0]) / (one.n_tokens - 1) for one in longer]),
        "prompt_tokens": timings["prompt_n"] + timings["cache_n"] if said else None,
        "reused_prompt_tokens": timings["cache_n"] if said else None,
        "accepted_share": bench.ratio(drafts["accepted"], drafts["drafted"]),
        "tokens_per_round": bench.ratio(timings["predicted_n"] - len(said), drafts["rounds"]),
        "decode_tokens_per_second": bench.ratio(n_decoded - len(said), in_rounds),
        "round_ms": bench.ratio(1e3 * in_rounds, n_rounds),
        "between_share": bench.ratio(between, between + in_rounds),
    }


def percentiles(name: str, seconds: Sequence[float]) -> Record:
    """In ms; None of nothing."""
    return {f"{name}_p{n}": 1e3 * float(numpy.percentile(seconds, n)) if seconds else None for n in (50, 99)}


def beside(plain: Sequence[Phase], own: Sequence[Phase]) -> Record:
    """The same of phases of one kind, and over plain rounds. identical_answers: to those of the same request there."""
    before, row = summary(plain), summary(own)
    for name, rate in (("speedup", "output_tokens_per_second"), ("decode_speedup", "decode_tokens_per_second")):
        row[name] = bench.ratio(row[rate], before[rate])
    answers, plain_answers = ([one for phase in phases for one in phase.answers] for phases in (own, plain))
    same = (one.error is None and one.text == other.text for one, other in zip(answers, plain_answers, strict=True))
    return row | {"identical_answers": sum(same)}
