"""What a benchmark says of its passes: the JSON record, and the table for people."""

from __future__ import annotations

import hashlib
import json
import resource
from collections import Counter
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch

from common.jsonl import publish
from common.provenance import provenance
from common.say import dtype_name
from engine.bench.notes import notes
from engine.bench.passes import Passes
from engine.bench.settings import AUTO, DraftSettings
from engine.bench.setup import Setup
from engine.contention import contention
from engine.cost_model.costs import Costs
from engine.decoding import GenerateOutput
from engine.pacing import Choice
from engine.timing import PhaseTimer

# Tokens of a prompt that --printoutput shows.
PROMPT_END = 32


def tokens_per_second(output: GenerateOutput) -> float | None:
    """Emitted tokens per second over the rounds in which every slot was busy."""
    steady = output.stats.steady()
    return sum(r.emitted for r in steady) / sum(r.seconds for r in steady) if steady else None


def round_ms(output: GenerateOutput) -> float | None:
    """Median wall time in ms of the rounds in which every slot was busy."""
    steady = output.stats.steady()
    return 1e3 * median(r.seconds for r in steady) if steady else None


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
    fractions = []
    for row in rows:
        grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
        if grams:
            fractions.append(len(set(grams)) / len(grams))
    return mean(fractions) if fractions else None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes held so far: allocated on a GPU, the resident set of the process (its libraries too) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rounded(record: dict[str, Any], digits: int = 4) -> dict[str, Any]:
    """The record with its floats, also those in lists and records within it, rounded for reading."""

    def shorten(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, digits)
        if isinstance(value, dict):
            return rounded(value, digits)
        return [shorten(v) for v in value] if isinstance(value, (list, tuple)) else value

    return {key: shorten(value) for key, value in record.items()}


def table(record: dict[str, Any]) -> str:
    """The record's headline as a short table."""
    one, unit = ("-", "-") if record["baseline_step_ms"] is None else ("1", "1.00")
    rows: list[tuple[str, str, str]] = [
        ("", "plain decoding", "speculation"),
        (
            "tokens per second",
            _number(record["baseline_tokens_per_second"]),
            _number(record["decode_tokens_per_second"]),
        ),
        ("ms per step / round", _number(record["baseline_step_ms"]), _number(record["round_ms"])),
        ("speedup (all rows busy)", unit, _number(record["speedup"], 2)),
        ("speedup (to the last row)", unit, _number(record["wall_speedup"], 2)),
        ("acceptance rate", "-", _number(record["acceptance_rate"], 3)),
        (f"tokens per round (of {_most_tokens(record)})", one, _number(record["mean_accepted_length"], 2)),
        ("identical rows", "-", _identical(record)),
    ]
    if record["verify_step_ms"] is not None:
        rows += [
            ("ms per draft step", "-", _number(record["draft_step_ms"])),
            ("ms per verification", "-", _number(record["verify_step_ms"])),
            ("ms of a round's rest", "-", _number(record["other_ms_per_round"])),
        ]
    if AUTO in (record["gamma"], record["draft_budget"]):
        rows.append(("rounds by choice", "", _chosen(record)))
    if record["benchmark"] == "baseline":
        rows = [(name, plain, "") for name, plain, _ in rows[:3]]
    return "\n".join(f"  {name:<28}{plain:>16}{speculative:>18}".rstrip() for name, plain, speculative in rows)


def _chosen(record: dict[str, Any]) -> str:
    """What rounds chose: `gamma 3: 12 rounds`, with the budget where that is chosen, too."""
    parts = []
    for choice in record["choices"]:
        budget = f"{choice['draft_budget']} entries, " if record["draft_budget"] == AUTO else ""
        parts.append(f"{choice['rounds']} x " + (f"{budget}gamma {choice['gamma']}" if choice["gamma"] else "plain"))
    return "; ".join(parts)


def _most_tokens(record: dict[str, Any]) -> str:
    """What a round can emit at most."""
    return "gamma + 1" if record["gamma"] == AUTO else str(record["gamma"] + 1)


def _identical(record: dict[str, Any]) -> str:
    same = record["identical_sequences"]
    if same is None:
        return "-" if record["baseline_step_ms"] is None else "not meant to be"
    return f"{same} of {record['sequences']}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def make_record(benchmark: str, setup: Setup, passes: Passes) -> dict[str, Any]:
    """The JSON record of a run. What was not measured is null; random weights measure no acceptance."""
    args, baseline, speculative = setup.args, passes.baseline, passes.speculative
    real = setup.target.has_text
    measured = speculative or baseline
    assert measured is not None
    counts = speculative.stats.counts if speculative and real else None
    base_tps = tokens_per_second(baseline) if baseline else None
    tps = tokens_per_second(measured)
    compared = baseline is not None and speculative is not None
    step_ms = round_ms(baseline) if baseline else None
    peaks = setup.ranks.gathered(peak_memory_bytes(setup.runner.device))
    record = {
        "benchmark": benchmark,
        "run": setup.run,
        "model": setup.name,
        "draft": setup.draft.kind if setup.draft else None,
        "load_format": args.load_format,
        "dataset": setup.dataset,
        "B": args.B,
        "prefix_len": args.prefix_len,
        "gen_len": args.gen_len,
        **settings_record(setup),
        **_rank_record(setup),
        "tokens_generated": sum(map(len, measured.tokens)),
        "drafted": counts.drafted if counts else None,
        "judged": counts.verified if counts else None,
        "accepted": counts.accepted if counts else None,
        "emitted": counts.emitted if counts else None,
        "acceptance_rate": counts.acceptance_rate if counts else None,
        "acceptance_per_position": counts.acceptance_per_position if counts else None,
        "mean_accepted_length": counts.mean_accepted_length if counts else None,
        "mean_accepted_length_per_row": [row.mean_accepted_length for row in speculative.stats.rows]
        if speculative and real
        else None,
        "decode_tokens_per_second": tps if real or not speculative else None,
        "baseline_tokens_per_second": base_tps,
        "speedup": ratio(tps, base_tps) if compared and real else None,
        "wall_speedup": ratio(baseline.stats.decode_seconds, speculative.stats.decode_seconds)
        if baseline and speculative and real
        else None,
        "identical_sequences": identical_rows(baseline.tokens, speculative.tokens)
        if baseline and speculative and setup.sampling.reproducible
        else None,
        "sequences": len(measured.tokens),
        "tokens_sha256": tokens_sha256(measured.tokens),
        "prefill_seconds": passes.prefill_seconds,
        "draft_prefill_seconds": speculative.stats.draft_prefill_seconds
        if speculative and setup.draft_source
        else None,
        "baseline_step_ms": step_ms,
        "round_ms": round_ms(speculative) if speculative else None,
        **_phase_times(passes.timed),
        "steady_rounds": len(measured.stats.steady()),
        "choices": _choices(setup, speculative) if speculative else None,
        "measured_costs": costs_record(setup, passes.costs),
        "measured_costs_seconds": passes.cost_seconds if passes.costs else None,
        "contention": _contention(setup, passes),
        "peak_memory_bytes": max(peaks),
        "peak_memory_bytes_per_rank": peaks,
        "startup_memory_bytes_per_rank": setup.ranks.gathered(setup.startup_bytes),
        "distinct_4gram_fraction": distinct_4gram_fraction(measured.tokens) if real else None,
        **provenance(),
    }
    return rounded(record)


def settings_record(setup: Setup) -> dict[str, Any]:
    """How a run decodes and drafts, and how both models are stored: the same in every record."""
    params, runner = setup.sampling.params, setup.runner
    return {
        **_draft_record(setup),
        "verification": setup.sampling.mode,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "seed": None if params.greedy else params.seed,
        "device": str(runner.device),
        "dtype": dtype_name(setup.dtype),
        "attention": runner.model.backend.name,
        "draft_attention": _draft_attention(setup),
        "compile": setup.args.compile,
        "cuda_graphs": runner.graphs is not None,
        "quantize": setup.args.quantize,
        "kv_dtype": dtype_name(runner.cache.keys.dtype),
        "pointwise": runner.model.pointwise.name,
    }


def _draft_record(setup: Setup) -> dict[str, Any]:
    draft = setup.draft or DraftSettings("none", 0)
    has_cache = draft.dtype is not None
    return {
        "draft_model": setup.draft_source.name if setup.draft_source else None,
        "gamma": AUTO if draft.auto_gamma else draft.gamma,
        "draft_policy": draft.policy,
        "draft_budget": (AUTO if draft.budgets else draft.capacity) if has_cache else None,
        "n_sink": draft.n_sink,
        "snapkv_window": draft.window,
        "draft_positions": draft.positions or ("absolute" if has_cache else None),
        "draft_layers": None if draft.layers is None else list(draft.layers),
        "draft_dtype": dtype_name(draft.dtype) if draft.dtype is not None else None,
        "draft_weights": draft.quantize,
        "draft_kv_dtype": dtype_name(draft.kv_dtype or draft.dtype) if draft.dtype is not None else None,
        "max_ngram": draft.max_ngram,
    }


def _draft_attention(setup: Setup) -> str | None:
    """The backend of what drafts; None for drafts without a model, and on a rank that has no part of it."""
    if setup.draft_model is not None:
        return setup.draft_model.backend.name
    return setup.runner.model.backend.name if setup.draft and setup.draft.kind == "self" else None


def _rank_record(setup: Setup) -> dict[str, Any]:
    return {
        "tensor_parallel": len(setup.target_ranks.ranks),
        "rank_group": list(setup.target_ranks.ranks),
        "draft_ranks": list(setup.draft_ranks.ranks) if setup.draft_ranks else None,
        "all_reduce": setup.target_ranks.reduce.name,
        "check_ranks": setup.ranks.check,
    }


def _phase_times(timed: tuple[PhaseTimer, GenerateOutput] | None) -> dict[str, float | None]:
    """Medians over the rounds of the timed pass: one draft step, one verification, the rest of a round.

    Where rounds choose what to draft, over those that draft.
    """
    names = ("draft_step_ms", "verify_step_ms", "other_ms_per_round")
    if timed is None or not timed[1].stats.rounds:
        return dict.fromkeys(names)
    timer, output = timed
    phases = zip(output.stats.rounds, timer.seconds["draft"], timer.seconds["verify"], strict=True)
    drafted = any(round_.choice.gamma for round_ in output.stats.rounds)
    seconds = [
        (draft / max(1, round_.choice.gamma), verify, round_.seconds - draft - verify)
        for round_, draft, verify in phases
        if round_.choice.gamma or not drafted
    ]
    draft_ms, verify_ms, other_ms = (1e3 * median(column) for column in zip(*seconds, strict=True))
    return dict(zip(names, (draft_ms if drafted else None, verify_ms, other_ms), strict=True))


def _contention(setup: Setup, passes: Passes) -> dict[str, dict[str, Any]]:
    """Of each pass; every rank has to call this."""
    timed = passes.timed[1] if passes.timed else None
    named = {"baseline": passes.baseline, "speculation": passes.speculative, "phase times": timed}
    usages = {name: setup.ranks.gathered(output.usage) for name, output in named.items() if output}
    return {name: contention(ranks) for name, ranks in usages.items()}


def _choices(setup: Setup, speculative: GenerateOutput) -> list[dict[str, Any]]:
    """How many rounds drafted how far, and with how many KV entries a row."""
    counts = Counter(round_.choice for round_ in speculative.stats.rounds)
    return [
        {"draft_budget": drafting_budget(setup, choice), "gamma": choice.gamma, "rounds": n}
        for choice, n in sorted(counts.items(), key=lambda item: (item[0].drafter or 0, item[0].gamma))
    ]


def costs_record(setup: Setup, costs: Sequence[Costs]) -> list[dict[str, Any]] | None:
    """What rounds cost and accepted, of each drafter, with its KV entries a row if it has a cache."""
    budgets = setup.draft.capacities if setup.draft and setup.draft.dtype is not None else [None] * len(costs)
    pairs = zip(budgets, costs, strict=True) if costs else ()
    return [{"draft_budget": budget, **_cost_record(one)} for budget, one in pairs] or None


def _cost_record(costs: Costs) -> dict[str, Any]:
    seen = costs.acceptance
    return {
        "plain_ms": costs.plain_ms,
        "gammas": costs.at,
        "verify_ms": costs.verify_ms,
        "draft_ms": costs.draft_ms,
        "other_ms": costs.other_ms,
        "accepted_share": seen.value if seen else None,
        "places_reached": seen.n if seen else None,
    }


def drafting_budget(setup: Setup, choice: Choice) -> int | None:
    """KV entries a row of what a round drafted with; None if nothing did, or it has no cache."""
    if not setup.draft or setup.draft.dtype is None or choice.drafter is None or not choice.gamma:
        return None
    return setup.draft.capacities[choice.drafter]


def finish(benchmark: str, setup: Setup, passes: Passes) -> None:
    """Print the texts asked for, the table, and last the record; append it to --output. One rank does.

    Errors: ConfigError if either failed, or what the run put off.
    """
    record = make_record(benchmark, setup, passes)
    if not setup.ranks.leads:
        return
    args = setup.args
    headline = (
        f"\n  {record['model']}, {record['device']}, {record['dtype']}"
        f"{_storage(setup)}{_splitting(setup)}{_drafting(setup)}: "
        f"{args.B} rows at a time, "
        f"{args.prefix_len} prompt tokens, {args.gen_len} new tokens each; {_sampling(record)}; "
        f"prefill {record['prefill_seconds']:.1f} s\n"
    )
    said = "\n".join([table(record), *(f"  {note}" for note in notes(record, setup.draft))]) + "\n"
    publish(args.output, record, *_texts(setup, passes), headline, said, put_off=setup.put_off)


def _texts(setup: Setup, passes: Passes) -> list[str]:
    """How the first row goes on; with --printoutput of every row how its prompt ends, and how it goes on."""
    output = passes.speculative or passes.baseline
    assert output is not None

    def shown(tokens: list[int]) -> str:  # random weights have no tokenizer: their rows are shown as ids
        return repr(setup.tokenizer.decode(tokens) if setup.tokenizer else tokens)

    if not setup.args.printoutput:
        return [f"  row 0 goes on: {shown(output.tokens[0])}"] if setup.tokenizer else []
    return [
        line
        for row, (prompt, tokens) in enumerate(zip(setup.prompts, output.tokens, strict=True))
        for line in (f"prompt {row} ends: {shown(prompt[-PROMPT_END:])}", f"row {row}: {shown(tokens)}")
    ]


def _sampling(record: dict[str, Any]) -> str:
    """The verification mode, and what it samples by."""
    if not record["temperature"]:
        return record["verification"]
    filters = "".join(f", {name} {record[name]}" for name, off in (("top_k", 0), ("top_p", 1.0)) if record[name] != off)
    return f"{record['verification']} at temperature {record['temperature']}{filters}, seed {record['seed']}"


def _drafting(setup: Setup) -> str:
    draft = setup.draft
    if draft is None:
        return ""
    if draft.dtype is None:
        return f", {draft.kind} draft"
    name = f" {setup.draft_source.name}" if setup.draft_source else ""
    if setup.draft_ranks and setup.ranks.size > 1:
        name += f" on {_ranks(setup.draft_ranks.ranks)}"
    if draft.layers is not None:
        name += f" of {len(draft.layers)} layers"
    where = " (positions inside the cache)" if draft.positions == "cache" else ""
    weights = f" with {draft.quantize} weights" if draft.quantize else ""
    entries = " or ".join(map(str, draft.budgets)) or draft.capacity
    policy = " chosen by attention" if draft.policy == "snapkv" else ""
    return f", {dtype_name(draft.dtype)} draft{name}{weights}, {entries} KV entries{policy}{where}"


def _storage(setup: Setup) -> str:
    """How the target is stored, where that is not in its dtype."""
    weights = f", {setup.args.quantize} weights" if setup.args.quantize else ""
    return weights + (f", {setup.args.kv_dtype} KV" if setup.args.kv_dtype != "same" else "")


def _splitting(setup: Setup) -> str:
    return f" on {_ranks(setup.target_ranks.ranks)}" if setup.ranks.size > 1 else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(map(str, ranks))}"
