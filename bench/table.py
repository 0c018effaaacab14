"""Publishes a benchmark: texts and a table for people, a record for programs."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from bench.draft_flags import ModelDraft, written
from bench.passes import PassResults
from bench.record import make_record, ratio
from bench.session import Session
from common.jsonl import publish
from common.tables import Column, console
from engine.drafters.config import AUTO
from engine.stats import acceptance_text, with_error


def reads_text(record: Mapping[str, Any]) -> str | None:
    """Return what a draft step reads, such as `int4 weights (31%), 512 entries (7%)`: the shares are of the bytes of
    the target's weights, and of the entries of a row at its end. None for a draft without a cache, and for gamma 0."""
    if record.get("draft_weights_share") is None or record.get("gamma") == 0:
        return None
    form, budget, share = (record[f"draft_{name}"] for name in ("weights", "budget", "entries_share"))
    weights = f"{form or record['draft_dtype']} weights ({record['draft_weights_share']:.0%})"
    entries = f"{budget} entries ({'at most ' * (budget == AUTO)}{share:.0%})" if share < 1 else "all entries"
    return f"{weights}, {entries}"


def few_rounds(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence if a speedup is of too few rounds to be trusted."""
    n = record.get("steady_rounds", FEW_ROUNDS)
    is_few = record.get("speedup") is not None and n < FEW_ROUNDS
    return [f"too few rounds with all rows busy for a speedup, {n}"] if is_few else []


def speedup_text(record: Mapping[str, Any]) -> str | None:
    """Return the speedup, with its standard error if that is known and of enough rounds. None without a speedup."""
    error = None if few_rounds(record) else record.get("speedup_standard_error")
    return with_error(record.get("speedup"), error, 2)


# What marks behind numbers mean, by the expression that finds a mark in a table.
MARKS = {
    r"\d\*": "*: slower than plain decoding",
    "±": "±: one standard error over rows, of a speedup over rows and rounds",
    r"\d =( |$)": "=: no difference shown",
    r"\d\?": "?: the acceptance is assumed",
}
# Tokens of a prompt's end that --printoutput prints.
PROMPT_END = 32
COLUMNS = [
    Column(itemgetter(0), "", align="<"),
    Column(itemgetter(1), "plain decoding"),
    Column(itemgetter(2), "speculation"),
]
BY_LENGTH = [
    Column(lambda row: "{} to {}".format(*row["generated"]), "generated tokens", align="<"),
    Column("acceptance_rate", "acceptance", ".3f"),
    Column("mean_accepted_length", "tokens per round", ".2f"),
    Column("baseline_step_ms", "plain step, mean ms", ".1f"),
    Column("round_ms", "round, mean ms", ".1f"),
    Column("draft_ms", "its drafts", ".1f"),
    Column("verify_ms", "its verification", ".1f"),
    Column("speedup", "speedup", ".2f"),
]
ABLATED = [
    Column(reads_text, "a draft step reads", align="<"),
    Column(acceptance_text, "acceptance"),
    Column("mean_accepted_length", "tokens per round", ".2f"),
    Column(speedup_text, "speedup"),
]
MORE = {"by_length": BY_LENGTH, "rows": ABLATED}
# A text with fewer distinct 4-grams than this share repeats itself.
LOOPING = 0.6
# With fewer rounds, a single interrupted round decides the ratio of two passes.
FEW_ROUNDS = 8
# The share of its speedup that a run may lose to rows that end early, before a note says how to fill their places.
MOST_LOST = 0.15


def finish(benchmark: str, session: Session, passes: PassResults) -> None:
    """Print texts, the table, and last the record, and append the record to --output, on the leader only.

    Errors: ConfigError if printing or appending failed, or if the run put an error off.
    """
    record = make_record(benchmark, session, passes)
    prompts = [(len(prompt), prompt[-PROMPT_END:]) for prompt in session.prompts]
    lengths, ends = zip(*chain.from_iterable(session.by_replica(prompts)), strict=True)
    put_off = [*chain.from_iterable(session.processes.all_gather_object(session.put_off))]
    session.runner.drop_graphs()  # while a graph holds a collective, no rank can leave the others (pytorch #115388)
    if not session.processes.leads:
        return
    texts = [*_texts(session, ends, passes.last.tokens), "", *summary(session, record, lengths), ""]
    publish(session.plan.config.output.output, record, *texts, put_off=put_off)


def summary(session: Session, record: dict[str, Any], lengths: Sequence[int]) -> list[str]:
    """Return the lines of a headline, the table of figures, and notes. lengths: tokens of the prompts."""
    said = [f"  {note}" for note in notes(record, session.plan.automatic)]
    drawn = table(record)
    return [f"  {headline(session, record, lengths)}", "", *drawn.splitlines(), *legend(drawn), *said]


def legend(table: str) -> list[str]:
    """Return a line on the marks that a printed table has, or nothing without any."""
    found = [meaning for mark, meaning in MARKS.items() if re.search(mark, table, re.MULTILINE)]
    return [f"  {'; '.join(found)}"] if found else []


def _texts(session: Session, ends: Sequence[list[int]], rows: list[list[int]]) -> list[str]:
    """Return the text of the first row; with --printoutput the end of every prompt, and the text of its row."""

    def text(tokens: list[int]) -> str:  # random weights have no tokenizer: their rows are printed as ids
        return repr(session.tokenizer.decode(tokens) if session.tokenizer else tokens)

    if not session.plan.config.printoutput:
        return [f"  row 0 goes on: {text(rows[0])}"] if session.tokenizer else []
    pairs = enumerate(zip(ends, rows, strict=True))
    return [f"prompt {row} ends: {text(end)}\nrow {row}: {text(tokens)}" for row, (end, tokens) in pairs]


def headline(session: Session, record: dict[str, Any], lengths: Sequence[int]) -> str:
    """Return a line with model, storage, ranks, sizes and sampling."""
    config, sizes, n_ranks = session.plan.config, session.plan.target, session.ranks.size
    target, n_replicas = config.target, config.n_replicas
    prompts = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else max(lengths)
    parts = [
        f"{record['model']}, {record['device']}, {record['dtype']}",
        f"{target.quantize} weights" if target.quantize else "",
        f"{target.kv_dtype} KV" if target.kv_dtype != "same" else "",
        f"context extended by {target.rope_scaling}" if target.rope_scaling else "",
        f"{n_replicas} x {n_ranks} ranks" if n_replicas * n_ranks > 1 else "",
        _draft_text(record),
    ]
    return (
        f"{', '.join(filter(None, parts))}: {sizes.n_rows} row{'s' * (sizes.n_rows > 1)} at a time, {prompts} prompt "
        f"tokens, {sizes.gen_len} new tokens each; {sampling_text(record)}; prefill {record['prefill_seconds']:.1f} s"
        f"{f', {n_taken} of the prompts from --prefix_cache' if (n_taken := record['prefill_taken_over']) else ''}"
    )


def sampling_text(record: dict[str, Any]) -> str:
    """Return the verification mode, with temperature, filters and seed."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    others = "".join(f", {name} {record[name]}" for name, off in neutral.items() if record.get(name, off) != off)
    if not record["temperature"]:
        return f"{record['verification']}{others}"
    return f"{record['verification']} at temperature {record['temperature']}{others}, seed {record['seed']}"


def _draft_text(record: dict[str, Any]) -> str:
    if not record["gamma"]:
        return ""
    options = record["config"]["draft"]
    name = written(options | {"draft_policy": record["draft_policy"], "gamma": record["gamma"]})
    without_flag = {each: value for each, value in options.items() if each not in ModelDraft.__dataclass_fields__}
    name += "".join(f", {each} {value}" for each, value in without_flag.items())
    return f"drafts by {' or '.join([name, *record.get('auto_drafts', ())])}"


def table(record: dict[str, Any]) -> str:
    """Return the record's main figures as a table, a line for each figure."""

    def figure(key: str, digits: int = 1) -> str | None:
        return None if record[key] is None else f"{record[key]:.{digits}f}"

    has_baseline, gamma = record["baseline_step_ms"] is not None, record["gamma"]
    identical = "not meant to be" if has_baseline else None
    if record["identical_sequences"] is not None:
        identical = f"{record['identical_sequences']} of {record['sequences']}"
    rows = [
        ("tokens per second", figure("baseline_tokens_per_second"), figure("decode_tokens_per_second")),
        ("ms per step / round", figure("baseline_step_ms"), figure("round_ms")),
    ]
    if record["benchmark"] == "baseline":
        return console(rows, COLUMNS[:2])
    most = "gamma + 1" if gamma == AUTO else gamma + 1
    rows += [
        ("speedup (all rows busy)", "1.00" if has_baseline else None, speedup_text(record)),
        ("speedup (to the last row)", "1.00" if has_baseline else None, figure("wall_speedup", 2)),
        ("acceptance rate", None, acceptance_text(record)),
        (f"tokens per round (of {most})", "1" if has_baseline else None, figure("mean_accepted_length", 2)),
        ("identical rows", None, identical),
    ]
    if record["verify_step_ms"] is not None:
        rows += [
            ("ms per draft step", None, figure("draft_step_ms")),
            ("ms per verification", None, figure("verify_step_ms")),
            ("ms of a round's rest", None, figure("other_ms_per_round")),
        ]
    is_chosen = AUTO in (gamma, record["draft_policy"], record["draft_budget"])
    choices = f"\n  rounds by choice: {_chosen(record)}" if is_chosen else ""
    more = [console(record[name], columns) for name, columns in MORE.items() if name in record]
    reads = f"\n  a draft step reads {text}" if (text := reads_text(record)) else ""
    return console(rows, COLUMNS) + reads + choices + "".join(f"\n\n{lines}" for lines in more)


def _chosen(record: dict[str, Any]) -> str:
    """Return the rounds by choice, such as `12 x gamma 3`, with draft, policy and budget if these are chosen, too."""
    parts = []
    for choice in record["choices"]:
        name = f"{choice['draft']}, " if "draft" in choice else ""
        has_cache = choice["draft_policy"] is not None
        policy = f"{choice['draft_policy']}, " if has_cache and record["draft_policy"] == AUTO else ""
        budget = f"{choice['draft_budget']} entries, " if has_cache and record["draft_budget"] == AUTO else ""
        round_ = f"{name}{policy}{budget}gamma {choice['gamma']}" if choice["gamma"] else "plain"
        parts.append(f"{choice['rounds']} x {round_}")
    return "; ".join(parts)


def attribution(record: dict[str, Any]) -> list[str]:
    """Return a sentence on what a draft over a cache can gain by."""
    if (weights := record.get("draft_weights_share")) is None or record.get("gamma") == 0:
        return []
    kv, keeps = record["draft_kv_share"], "" if record["draft_entries_share"] < 1 else ", and drops no entry"
    shares = {"weights": weights, "KV entries": kv}
    ways = [f"{share:.0%} of the bytes of the {name}" for name, share in shares.items() if share < 1]
    if len(ways) > 1:
        apart = "" if "rows" in record else "; tests/selfspec_benchmark.py --ablate takes them apart"
        return [f"the draft can gain by reading {' and '.join(ways)}{keeps}{apart}"]
    reads = f"can gain by reading {ways[0]} alone" if ways else "reads all that a plain step reads: it cannot gain"
    return [f"the draft {reads}{keeps}"]


def looping(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence if a text repeats itself."""
    distinct = record.get("distinct_4gram_fraction")
    if distinct is None or distinct >= LOOPING:
        return []
    return [f"the text repeats itself ({distinct:.0%} of its 4-grams are distinct), which is easy to draft"]


def notes(record: dict[str, Any], automatic: Sequence[str]) -> list[str]:
    """Return sentences without which a record would be misread. automatic: see `Plan`."""
    found = []
    if contended := [name for name, usage in record["contention"].items() if usage["contended"]]:
        advice = "no time or speedup here is to be trusted (OMP_NUM_THREADS sets how many there are)"
        found.append(f"threads waited for processors during {', '.join(contended)}: {advice}")
    found += [*looping(record), *attribution(record)]
    if record["gen_len"] == 1:
        found.append("nothing was timed: the first new token comes from the prompt; --gen_len 2 or more decodes")
    if not (choices := record.get("choices")):
        return found
    if seconds := record.get("measured_costs_seconds"):
        found.append(f"measuring what rounds cost took {seconds:.1f} s, which is in no speedup")
    if automatic and record["gamma"] and not any(choice["gamma"] for choice in choices):
        found.append("every round was a plain step, so the speedups are noise")
    elif few := [note for row in record.get("rows", [record]) for note in few_rounds(row)]:
        found += [f"{few[0]}: use a longer --gen_len"]
    elif record.get("sequences", 0) <= record.get("B", 0) * record.get("data_parallel", 1):
        lost = 1 - (ratio(record.get("wall_speedup"), record["speedup"]) or 1)
        if lost > MOST_LOST:
            places = "more prompts (--num_prompts) would take their places"
            found.append(f"rows that ended first left {lost:.0%} of the speedup unused: {places}")
    return found
