"""Makes the JSON record of a run from its resolved configuration and its results."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from operator import eq
from statistics import mean, median
from typing import Any

from bench.auto.costs import MS_OF_ROUNDS, Costs
from bench.by_length import by_length_rows
from bench.draft_flags import option_names
from bench.memory import peak_memory_bytes
from bench.passes import Decoded, PassResults
from bench.plan import Plan
from bench.session import Session
from common.checkout import ROOT
from common.contention import contention
from common.provenance import provenance
from common.say import dtype_name
from engine.controller import RoundChoice
from engine.drafters.config import AUTO, DrafterConfig
from engine.generation import GenerateOutput
from engine.stats import Counts, RoundStats, acceptance_standard_error, counts_by_row, ratio_standard_error, total
from models.kernels.build import choose

# Fields of `Counts` in a record.
COUNTED = (
    *("drafted", "verified", "accepted", "emitted"),
    *("acceptance_rate", "acceptance_per_position", "mean_accepted_length"),
)

# Entries of a draft's configuration that records have next to it.
NO_OPTIONS = ("draft", "gamma", "draft_model", "draft_ranks")


def tokens_per_second(output: GenerateOutput | None) -> float | None:
    """Return the tokens per second of the rounds in which every slot was busy."""
    return output.stats.tokens_per_second if output else None


def round_ms(output: GenerateOutput | None) -> float | None:
    """Return the median ms of the rounds in which every slot was busy."""
    return _median_ms([round_.seconds for round_ in output.stats.steady()] if output else [])


def _median_ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * median(seconds) if seconds else None


def acceptance(rows: Sequence[Counts] | None) -> dict[str, Any]:
    """Return the sums of counts and their rates, with the standard error of the acceptance rate; all None without
    rows."""
    counts = total(rows) if rows else None
    found = {name: getattr(counts, name, None) for name in COUNTED}
    return found | {"acceptance_standard_error": acceptance_standard_error(rows) if rows else None}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def tokens_sha256(rows: Sequence[Sequence[int]]) -> str:
    """Return a digest of all rows' tokens, in the order of the prompts."""
    return hashlib.sha256(json.dumps([list(row) for row in rows]).encode()).hexdigest()


def distinct_4gram_fraction(rows: Sequence[Sequence[int]]) -> float | None:
    """Return the share of distinct 4-grams among a row's 4-grams, near 0 if the row loops; the mean over rows."""
    grams_by_row = ([tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in rows)
    fractions = [len(set(grams)) / len(grams) for grams in grams_by_row if grams]
    return mean(fractions) if fractions else None


def speedup_standard_error(plain: GenerateOutput, drafted: GenerateOutput) -> float | None:
    """Return the standard error of the speedup in rounds with all rows busy; None for few rows or rounds.

    It combines the relative errors of tokens per round, of which rows are the sample, and of a round's and a plain
    step's time, of which these rounds are."""
    rate = ratio(tokens_per_second(drafted), tokens_per_second(plain))
    samples = [[(float(row.emitted), float(row.rounds)) for row in drafted.stats.rows if row.rounds]]
    samples += [[(round_.seconds, 1.0) for round_ in output.stats.steady()] for output in (plain, drafted)]
    errors = [(ratio_standard_error(pairs), pairs) for pairs in samples]
    if rate is None or any(error is None for error, _ in errors):
        return None
    relative = [(error or 0.0) * sum(y for _, y in pairs) / sum(x for x, _ in pairs) for error, pairs in errors]
    return rate * math.hypot(*relative)


def gains(plan: Plan, plain: GenerateOutput | None, output: GenerateOutput | None) -> dict[str, Any]:
    """Return what a pass accepted and gained over plain decoding; None for what was not measured, and for acceptance of
    random weights, which means nothing."""
    drafted = output if plan.target.source.has_text else None
    same = None
    if plain and output and plan.reproducible:
        same = sum(map(eq, plain.tokens, output.tokens))
    return {
        **acceptance(drafted.stats.rows if drafted else None),
        "by_row": counts_by_row(drafted.stats.rows) if drafted else None,
        "speedup": ratio(tokens_per_second(drafted), tokens_per_second(plain)),
        "speedup_standard_error": speedup_standard_error(plain, drafted) if plain and drafted else None,
        "identical_sequences": same,
    }


def rounded(value: Any) -> Any:
    """Return a record with all its floats rounded to four decimals, or four digits if they are below 0.1."""
    if isinstance(value, float):
        return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(nested) for key, nested in value.items()}
    return [rounded(nested) for nested in value] if isinstance(value, (list, tuple)) else value


def nested(config: Any) -> Any:
    """Return a configuration as JSON values, without fields that are not set or have no effect; a draft is its options
    by flag, and paths begin at the checkout if they lie in it."""
    if isinstance(config, str):
        return config.removeprefix(f"{ROOT}/")
    if isinstance(config, tuple | list):
        return [nested(value) for value in config]
    if not is_dataclass(config):
        return config
    values = config.options() if isinstance(config, DrafterConfig) else vars(config)
    return {name: nested(value) for name, value in values.items() if value not in (None, (), [])}


def options_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a record's draft, by flag; older records have them next to their results."""
    config = record.get("config", {})
    options = {name: value for name, value in config.get("draft", {}).items() if name not in NO_OPTIONS}
    if others := config.get("auto_drafts"):
        options["auto_drafts"] = [draft["draft"] for draft in others]
    return options | {name: record[name] for name in option_names() if name in record}


def settings_record(session: Session) -> dict[str, Any]:
    """Return how a session decodes and drafts, and how its models are stored, with every `auto` resolved."""
    plan, runner = session.plan, session.runner
    return {
        **draft_settings(plan),
        "verification": plan.verification,
        **asdict(plan.sampling),
        "seed": None if plan.sampling.greedy else plan.sampling.seed,
        "device": str(runner.device),
        "dtype": dtype_name(plan.target.weights.dtype),
        "attention": runner.model.backend.name,
        "attention_build": choose("attention").build if runner.model.backend.name == "cpp" else None,
        "compile": plan.config.target.compile,
        "cuda_graphs": runner.graphs is not None,
        "quantize": plan.config.target.quantize,
        "kv_dtype": dtype_name(runner.cache.keys.dtype),
        "pointwise": runner.model.pointwise.name,
    }


def draft_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan's drafts: those of the first, with `auto` for what is chosen before every round."""
    if not plan.candidates:
        return {"draft": None, "gamma": 0, "draft_policy": None, "draft_budget": None}
    first = plan.candidates[0]
    settings = first.record() | first.reads(plan.target) | dict.fromkeys(plan.automatic, AUTO)
    others = dict.fromkeys(draft.kind for draft in plan.config.drafts if draft.kind != settings["draft"])
    return settings | ({"auto_drafts": [*others]} if others else {})


def record_of(
    benchmark: str, session: Session, measured: dict[str, Any], without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the record of a session's runs.

    without: settings that differ between the runs; the draft's options are then left out, too.
    """
    plan = session.plan
    config = nested(plan.config)
    if without:
        config.pop("draft", None)
    settings = {"model": session.name, "dataset": plan.dataset, "B": plan.target.n_rows}
    settings |= {"prefix_len": plan.target.prefix_len, "gen_len": plan.target.gen_len, **settings_record(session)}
    settings = {name: value for name, value in settings.items() if name not in without}
    return {"benchmark": benchmark, "config": config, **settings, **measured, **provenance()}


def make_record(benchmark: str, session: Session, passes: PassResults) -> dict[str, Any]:
    """Return the record of a benchmark; every rank has to call this. A figure that was not measured is null."""
    plan, stats = session.plan, passes.last.stats
    baseline, speculative, costs = passes.baseline, passes.speculative, passes.costs
    drafted = speculative if plan.target.source.has_text else None  # the acceptance of random weights means nothing
    gathered = session.processes.all_gather_object
    peaks = gathered(peak_memory_bytes(session.runner.device))
    record = {
        "run": session.run,
        "load_format": plan.config.target.load_format,
        "tensor_parallel": len(session.models.target_ranks.ranks),
        "data_parallel": plan.config.n_replicas,
        "rank_group": session.models.target_ranks.ranks,
        "draft_ranks": next((draft.group for draft in plan.candidates if draft.source), None),
        "all_reduce": session.models.target_ranks.backend,
        "prefill_taken_over": session.runner.prefixes.n_taken_over if session.runner.prefixes else 0,
        "tokens_generated": sum(map(len, passes.last.tokens)),
        **gains(plan, baseline, speculative),
        "decode_tokens_per_second": tokens_per_second(drafted if speculative else baseline),
        "baseline_tokens_per_second": tokens_per_second(baseline),
        "wall_speedup": ratio(*(_tokens_per_wall_second(output) for output in (drafted, baseline))),
        "sequences": len(passes.last.tokens),
        "tokens_sha256": tokens_sha256(passes.last.tokens),
        "prefill_seconds": passes.prefill_seconds,
        "baseline_step_ms": round_ms(baseline),
        "round_ms": round_ms(speculative),
        **_phase_times(passes.outputs.get("phase times")),
        "steady_rounds": len(stats.steady()),
        "contention": {name: contention(gathered(output.usage)) for name, output in passes.outputs.items()},
        "peak_memory_bytes": max(peaks),
        "peak_memory_bytes_per_rank": peaks,
        "distinct_4gram_fraction": distinct_4gram_fraction(passes.last.tokens) if plan.target.source.has_text else None,
    }
    if speculative and (width := plan.config.passes.by_length):
        record["by_length"] = by_length_rows(width, plan.target.gen_len, passes.outputs)
    if speculative and plan.config.passes.ablate:
        outputs = [speculative, *(output for name, output in passes.outputs.items() if name.startswith("ablation"))]
        record["rows"] = [
            each.record()
            | each.reads(plan.target)
            | gains(plan, baseline, output)
            | {"steady_rounds": len(output.stats.steady())}
            for each, output in zip(plan.candidates, outputs, strict=True)
        ]
    if drafted and drafted.inner:
        record["inner"] = {name: getattr(drafted.inner, name) for name in COUNTED}
    if any(draft.source for draft in plan.candidates):
        record["draft_prefill_seconds"] = stats.draft_prefill_seconds
    if speculative:
        record["choices"] = _choices(session, speculative)
    if costs and speculative:
        record |= {"measured_costs": costs_record(session, costs.by_rows), "measured_costs_seconds": costs.seconds}
    return rounded(record_of(benchmark, session, record))


def _tokens_per_wall_second(output: Decoded | None) -> float | None:
    """Return the new tokens per second of decoding until the last row ends."""
    return ratio(sum(map(len, output.tokens)), output.stats.decode_seconds) if output else None


def _phase_times(timed: Decoded | None) -> dict[str, float | None]:
    """Return median ms of a draft step, a verification and the rest of a round, over rounds that drafted if any did."""
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
        "refresh_ms": _median_ms(timed.phases.get("refresh", ()) if timed else ()),
    }


def _choices(session: Session, speculative: GenerateOutput) -> list[dict[str, Any]]:
    """Return the number of rounds of each draft, policy, budget and gamma."""
    counts = Counter(round_.choice for round_ in speculative.stats.rounds)
    return [
        {**cache_of(session, choice), "gamma": choice.gamma, "rounds": n}
        for choice, n in sorted(counts.items(), key=lambda item: (item[0].drafter or 0, item[0].gamma))
    ]


def costs_record(session: Session, costs: Mapping[int, Sequence[Costs]]) -> list[dict[str, Any]]:
    """Return costs with their acceptance, for each number of rows (largest first) and each drafter."""
    return [
        {
            "rows": n_rows,
            **cache_of(session, RoundChoice(index, cost.at[-1])),
            "gammas": cost.at,
            "verify_ms": cost.verify_ms,
            **{name: getattr(cost, name) for name in MS_OF_ROUNDS},
            "accepted_share": cost.acceptance.value if cost.acceptance else None,
            "verified": cost.acceptance.n if cost.acceptance else None,
        }
        for n_rows, by_drafter in sorted(costs.items(), reverse=True)
        for index, cost in enumerate(by_drafter)
    ]


def cache_of(session: Session, choice: RoundChoice) -> dict[str, Any]:
    """Return the policy and the KV entries of a row in rounds of a choice, None for drafts without a cache; and the
    name of the draft, if there are several."""
    drafts = session.plan.candidates
    record = drafts[choice.drafter].record() if drafts and choice.drafter is not None and choice.gamma else {}
    names = ["draft"] * (len({draft.config.kind for draft in drafts}) > 1)
    return {name: record.get(name) for name in (*names, "draft_policy", "draft_budget")}
