"""What a benchmark says of its passes to programs: the JSON record."""

import hashlib
import json
import resource
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import mean, median
from typing import Any

import torch

from bench.auto.costs import Costs
from bench.passes import Decoded, Passes
from bench.session import Session
from bench.settings import settings_record
from common.provenance import provenance
from engine.contention import contention
from engine.counts import Counts, acceptance_standard_error
from engine.decoding import GenerateOutput
from engine.pacing import Choice
from engine.stats import RoundStats

# What is counted of drafts: a record's key, and its name in `Counts`.
COUNTED = {"drafted": "drafted", "judged": "verified", "accepted": "accepted", "emitted": "emitted"}
COUNTED |= {name: name for name in ("acceptance_rate", "acceptance_per_position", "mean_accepted_length")}


def tokens_per_second(output: GenerateOutput | None) -> float | None:
    """Of the rounds in which every slot was busy."""
    return output.stats.tokens_per_second if output else None


def round_ms(output: GenerateOutput | None) -> float | None:
    """Median wall time in ms of the rounds in which every slot was busy."""
    return _median_ms([round_.seconds for round_ in output.stats.steady()] if output else [])


def _median_ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * median(seconds) if seconds else None


def _counted(counts: Counts | None) -> dict[str, Any]:
    return {key: getattr(counts, name, None) for key, name in COUNTED.items()}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def identical_rows(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> int:
    """How many rows are the same tokens."""
    return sum(x == y for x, y in zip(a, b, strict=True))


def tokens_sha256(rows: Sequence[Sequence[int]]) -> str:
    """A digest of every row's tokens in the order of the prompts: equal where two runs emitted the same."""
    return hashlib.sha256(json.dumps([list(row) for row in rows]).encode()).hexdigest()


def distinct_4gram_fraction(rows: Sequence[Sequence[int]]) -> float | None:
    """Mean over rows of distinct 4-grams among all 4-grams: near 0 where a row loops, 1 where it never repeats."""
    grams_of_rows = ([tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in rows)
    fractions = [len(set(grams)) / len(grams) for grams in grams_of_rows if grams]
    return mean(fractions) if fractions else None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes held so far: allocated on a GPU, the resident set of the process (its libraries too) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def rounded(value: Any) -> Any:
    """A record with its floats, also those in lists and records within it, rounded for reading."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def make_record(benchmark: str, session: Session, passes: Passes) -> dict[str, Any]:
    """Of a run, asked for by every rank. What was not measured is null; random weights measure no acceptance."""
    config, stats = session.config, passes.last.stats
    baseline, speculative, costs = passes.baseline, passes.speculative, passes.costs
    drafted = speculative if session.target.has_text else None
    levels = session.draft.levels if session.draft else ()
    peaks = session.processes.gathered(peak_memory_bytes(session.runner.device))
    record = {
        "run": session.run,
        "draft": session.draft.kind if session.draft else None,
        "load_format": config.target.load_format,
        "prompts": config.rows.prompts,
        "tensor_parallel": len(session.target_ranks.ranks),
        "data_parallel": config.n_replicas,
        "rank_group": session.target_ranks.ranks,
        "draft_ranks": session.draft_ranks.ranks if session.draft_ranks else None,
        "all_reduce": session.target_ranks.all_reduce.name,
        "check_ranks": session.ranks.check,
        "tokens_generated": sum(map(len, passes.last.tokens)),
        **_counted(drafted.stats.counts if drafted else None),
        "acceptance_standard_error": acceptance_standard_error(drafted.stats.rows) if drafted else None,
        "inner": _counted(drafted.inner) if drafted and drafted.inner else None,
        "mean_accepted_length_per_row": [row.mean_accepted_length for row in drafted.stats.rows] if drafted else None,
        "decode_tokens_per_second": tokens_per_second(drafted if speculative else baseline),
        "baseline_tokens_per_second": tokens_per_second(baseline),
        "speedup": ratio(tokens_per_second(drafted), tokens_per_second(baseline)),
        "wall_speedup": ratio(*(one.stats.decode_seconds if one else None for one in (baseline, drafted))),
        "identical_sequences": identical_rows(baseline.tokens, speculative.tokens)
        if baseline and speculative and session.sampling.reproducible
        else None,
        "sequences": len(passes.last.tokens),
        "tokens_sha256": tokens_sha256(passes.last.tokens),
        "prefill_seconds": passes.prefill_seconds,
        "draft_prefill_seconds": stats.draft_prefill_seconds if any(level.source for level in levels) else None,
        "baseline_step_ms": round_ms(baseline),
        "round_ms": round_ms(speculative),
        **_phase_times(passes.timed),
        "refresh_ms": _median_ms(passes.timed.phases.get("refresh", ()) if passes.timed else ()),
        "steady_rounds": len(stats.steady()),
        "choices": _choices(session, speculative) if speculative else None,
        "measured_costs": costs_record(session, costs.by_rows) if costs else None,
        "measured_costs_seconds": costs.seconds if costs else None,
        "measured_costs_kept": costs.kept if costs else None,
        "held_up_rounds": costs.held_up(speculative.stats.rounds) if costs and speculative else None,
        "contention": {name: contention(session.processes.gathered(one.usage)) for name, one in passes.by_name.items()},
        "peak_memory_bytes": max(peaks),
        "peak_memory_bytes_per_rank": peaks,
        "distinct_4gram_fraction": distinct_4gram_fraction(passes.last.tokens) if session.target.has_text else None,
    }
    return rounded(record_of(benchmark, session, record))


def record_of(
    benchmark: str, session: Session, measured: dict[str, Any], without: Collection[str] = ()
) -> dict[str, Any]:
    """Of one or several runs: model, text, sizes and settings, `without` each row's own, then what was measured."""
    shared = {
        "benchmark": benchmark,
        "model": session.name,
        "dataset": session.dataset,
        "B": session.n_rows,
        "prefix_len": session.prefix_len,
        "gen_len": session.gen_len,
        **settings_record(session),
    }
    return {**{name: shared[name] for name in shared if name not in without}, **measured, **provenance()}


def _phase_times(timed: Decoded | None) -> dict[str, float | None]:
    """Medians over the rounds of the timed pass, if any draft over those: a draft step, a verification, the rest."""
    phases: list[tuple[RoundStats, float, float]] = []
    if timed:
        draft_and_verify = (timed.phases.get(name, ()) for name in ("draft", "verify"))
        phases = list(zip(timed.stats.rounds, *draft_and_verify, strict=True))
    drafting = [phase for phase in phases if phase[0].choice.gamma]
    phases = drafting or phases
    return {
        "draft_step_ms": _median_ms([draft / round_.choice.gamma for round_, draft, _ in drafting]),
        "verify_step_ms": _median_ms([verify for _, _, verify in phases]),
        "other_ms_per_round": _median_ms([round_.seconds - draft - verify for round_, draft, verify in phases]),
    }


def _choices(session: Session, speculative: GenerateOutput) -> list[dict[str, Any]]:
    """How many rounds drafted how far, by which policy, and with how many KV entries a row."""
    counts = Counter(round_.choice for round_ in speculative.stats.rounds)
    return [
        {**cache_of(session, choice), "gamma": choice.gamma, "rounds": n}
        for choice, n in sorted(counts.items(), key=lambda item: (item[0].drafter or 0, item[0].gamma))
    ]


def costs_record(session: Session, costs: Mapping[int, Sequence[Costs]]) -> list[dict[str, Any]]:
    """What rounds cost and accepted while so many rows decode, the most first, and of each drafter."""
    return [
        {
            "rows": n_rows,
            **cache_of(session, Choice(index, one.at[-1])),
            "plain_ms": one.plain_ms,
            "gammas": one.at,
            **{name: getattr(one, name) for name in ("verify_ms", "draft_ms", "other_ms", "refresh_ms")},
            "accepted_share": one.acceptance.value if one.acceptance else None,
            "places_reached": one.acceptance.n if one.acceptance else None,
        }
        for n_rows, each in sorted(costs.items(), reverse=True)
        for index, one in enumerate(each)
    ]


def cache_of(session: Session, choice: Choice) -> dict[str, Any]:
    """Policy and KV entries a row of what a round drafted with; None if nothing did, or it has no cache."""
    if not session.draft or not session.draft.policies or choice.drafter is None or not choice.gamma:
        return {"draft_policy": None, "draft_budget": None}
    policy, budget = session.draft.policies[choice.drafter], session.draft.capacities[choice.drafter]
    return {"draft_policy": policy.name, "draft_budget": budget}
