"""How a benchmark ends: texts and a table for people, the record for programs."""

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from bench.config import AUTO
from bench.passes import Passes
from bench.record import make_record
from bench.resolved import ResolvedDraft
from bench.session import Session
from common.jsonl import publish
from common.say import dtype_name
from common.tables import Column, console
from engine.counts import acceptance_text

# Tokens of a prompt that --printoutput shows.
PROMPT_END = 32
COLUMNS = [
    Column(itemgetter(0), "", align="<"),
    Column(itemgetter(1), "plain decoding"),
    Column(itemgetter(2), "speculation"),
]
# Rounds below which one that was interrupted decides the ratio of two passes.
FEW_ROUNDS = 8
# The share by which the speedup to the last row is lower where that is explained.
WORTH_SAYING = 0.05


def finish(benchmark: str, session: Session, passes: Passes) -> None:
    """Print the texts asked for, the table, and last the record; append it to --output. One rank does. Errors:
    ConfigError if either failed, or what the run put off."""
    record = make_record(benchmark, session, passes)
    own = [(len(prompt), prompt[-PROMPT_END:]) for prompt in session.prompts]
    lengths, ends = zip(*chain.from_iterable(session.of_replicas(own)), strict=True)
    put_off = [*chain.from_iterable(session.processes.gathered(session.put_off))]
    session.runner.drop_graphs()  # while one holds a collective, no rank can leave the others (pytorch #115388)
    if not session.processes.leads:
        return
    said = [table(record), *(f"  {note}" for note in notes(record, session.draft)), ""]
    line = f"\n  {headline(session, record, lengths)}\n"
    texts = [*_texts(session, ends, passes.last.tokens), line, "\n".join(said)]
    publish(session.config.output.output, record, *texts, put_off=put_off)


def _texts(session: Session, ends: Sequence[list[int]], rows: list[list[int]]) -> list[str]:
    """How the first row goes on; with --printoutput of every row how its prompt ends, and how it goes on."""

    def shown(tokens: list[int]) -> str:  # random weights have no tokenizer: their rows are shown as ids
        return repr(session.tokenizer.decode(tokens) if session.tokenizer else tokens)

    if not session.config.printoutput:
        return [f"  row 0 goes on: {shown(rows[0])}"] if session.tokenizer else []
    lines = []
    for row, (end, tokens) in enumerate(zip(ends, rows, strict=True)):
        lines += [f"prompt {row} ends: {shown(end)}", f"row {row}: {shown(tokens)}"]
    return lines


def headline(session: Session, record: dict[str, Any], lengths: Sequence[int]) -> str:
    """Model, how it and the draft are stored, ranks, sizes, and sampling, in one line."""
    target, n_ranks, n_replicas = session.config.target, session.ranks.size, session.config.n_replicas
    rows = "1 row" if session.n_rows == 1 else f"{session.n_rows} rows"
    prompts = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else max(lengths)
    parts = [
        f"{record['model']}, {record['device']}, {record['dtype']}",
        f"{target.quantize} weights" if target.quantize else "",
        f"{target.kv_dtype} KV" if target.kv_dtype != "same" else "",
        f"{n_replicas} x {n_ranks} ranks" if n_replicas * n_ranks > 1 else "",
        _drafting(session.draft) if session.draft and session.draft.gamma else "",
    ]
    return (
        f"{', '.join(filter(None, parts))}: {rows} at a time, {prompts} prompt tokens, "
        f"{session.gen_len} new tokens each; {sampling_text(record)}; prefill {record['prefill_seconds']:.1f} s"
    )


def sampling_text(record: dict[str, Any]) -> str:
    """The verification mode, and what it samples by."""
    if not record["temperature"]:
        return record["verification"]
    filters = "".join(f", {name} {record[name]}" for name, off in (("top_k", 0), ("top_p", 1.0)) if record[name] != off)
    return f"{record['verification']} at temperature {record['temperature']}{filters}, seed {record['seed']}"


def _drafting(draft: ResolvedDraft) -> str:
    name = f" {draft.source.name}" if draft.source else ""
    if draft.dtype is None or draft.policy is None:
        return f"{draft.kind} draft{name}"
    layers = f" of {len(draft.layers)} layers" if draft.layers is not None else ""
    weights = f" with {draft.quantize} weights" if draft.quantize else ""
    entries = " or ".join(dict.fromkeys(map(str, reversed(draft.capacities))))
    how = " or ".join(dict.fromkeys(one.name for one in draft.policies))
    inner = f" (its own draft: {_drafting(draft.inner)})" if draft.inner else ""
    return f"{dtype_name(draft.dtype)} draft{name}{layers}{weights}, {entries} KV entries by {how}{inner}"


def table(record: dict[str, Any]) -> str:
    """The record's headline as a short table: a line for each figure."""

    def figure(key: str, digits: int = 1) -> str | None:
        return None if record[key] is None else f"{record[key]:.{digits}f}"

    one, unit = (None, None) if record["baseline_step_ms"] is None else ("1", "1.00")
    same, unmeant = record["identical_sequences"], "not meant to be" if unit else None
    identical = unmeant if same is None else f"{same} of {record['sequences']}"
    most = "gamma + 1" if record["gamma"] == AUTO else record["gamma"] + 1
    lines = [
        ("tokens per second", figure("baseline_tokens_per_second"), figure("decode_tokens_per_second")),
        ("ms per step / round", figure("baseline_step_ms"), figure("round_ms")),
        ("speedup (all rows busy)", unit, figure("speedup", 2)),
        ("speedup (to the last row)", unit, figure("wall_speedup", 2)),
        ("acceptance rate", None, acceptance_text(record)),
        (f"tokens per round (of {most})", one, figure("mean_accepted_length", 2)),
        ("identical rows", None, identical),
    ]
    if record["verify_step_ms"] is not None:
        lines += [
            ("ms per draft step", None, figure("draft_step_ms")),
            ("ms per verification", None, figure("verify_step_ms")),
            ("ms of a round's rest", None, figure("other_ms_per_round")),
        ]
    if record["benchmark"] == "baseline":
        return console(lines[:2], COLUMNS[:2])
    shown = console(lines, COLUMNS)
    is_chosen = AUTO in (record["gamma"], record["draft_policy"], record["draft_budget"])
    return f"{shown}\n  rounds by choice: {_chosen(record)}" if is_chosen else shown


def _chosen(record: dict[str, Any]) -> str:
    """What rounds chose: `12 x gamma 3`, with the policy and the budget where those are chosen, too."""
    parts = []
    for choice in record["choices"]:
        policy = f"{choice['draft_policy']}, " if record["draft_policy"] == AUTO else ""
        budget = f"{choice['draft_budget']} entries, " if record["draft_budget"] == AUTO else ""
        how = f"{policy}{budget}gamma {choice['gamma']}" if choice["gamma"] else "plain"
        parts.append(f"{choice['rounds']} x {how}")
    return "; ".join(parts)


def notes(record: dict[str, Any], draft: ResolvedDraft | None) -> list[str]:
    """One sentence for each thing that the record of a run would be misread without; mostly none."""
    found = []
    if waited := {name: seen for name, seen in record["contention"].items() if seen["contended"]}:
        each = (
            f"{one['threads_waiting'] + one['stolen_processors']:.1f} during {name}" for name, one in waited.items()
        )
        advice = "no time or speedup here is to be trusted (OMP_NUM_THREADS sets how many there are)"
        found.append(f"threads waited for processors, {', '.join(each)}: {advice}")
    told = {name: seen for name, seen in record["contention"].items() if seen["threads_waiting"] is not None}
    if record["gen_len"] > 1 and (short := [name for name, seen in told.items() if seen["contended"] is None]):
        found.append(f"too short to judge whether threads waited for processors: {', '.join(short)}")
    if record["gen_len"] == 1:
        found.append("nothing was timed: the first new token comes from the prompt; --gen_len 2 or more decodes")
    if not record["choices"] or draft is None:
        return found
    if seconds := record["measured_costs_seconds"]:
        what = "checking the costs of an earlier run" if record["measured_costs_kept"] else "measuring what rounds cost"
        found.append(f"{what} took {seconds:.1f} s, which is in no speedup")
    if held_up := record["held_up_rounds"]:
        rounds = "1 round" if held_up == 1 else f"{held_up} rounds"
        found.append(f"{rounds} took over twice what they cost: something else kept the machine busy")
    n_rounds, n_all = record["steady_rounds"], sum(choice["rounds"] for choice in record["choices"])
    compared = record["speedup"] is not None
    if draft.automatic and draft.gamma and not any(choice["gamma"] for choice in record["choices"]):
        found.append("every round was a plain step" + (", so the speedups are noise" if compared else ""))
    elif compared and n_rounds < FEW_ROUNDS:
        found.append(f"too few rounds with all rows busy for a speedup, {n_rounds}; a longer --gen_len has more")
    elif compared and n_rounds < n_all and record["wall_speedup"] < (1 - WORTH_SAYING) * record["speedup"]:
        why = "rows whose drafts are accepted less often end later, and a few rows gain less than all"
        found.append(f"{n_all - n_rounds} of {n_all} rounds had fewer rows: {why}")
    return found
