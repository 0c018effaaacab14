"""How a benchmark ends: texts and a table for people, the record for programs."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from common.jsonl import publish
from common.say import dtype_name
from engine.bench.passes import Passes
from engine.bench.record import make_record
from engine.bench.session import Session
from engine.bench.table import notes, table
from engine.parallel.ranks import ModelRanks

# Tokens of a prompt that --printoutput shows.
PROMPT_END = 32


def finish(benchmark: str, session: Session, passes: Passes) -> None:
    """Print the texts asked for, the table, and last the record; append it to --output. One rank does. Errors:
    ConfigError if either failed, or what the run put off.
    """
    record = make_record(benchmark, session, passes)
    own = [(len(prompt), prompt[-PROMPT_END:]) for prompt in session.prompts]
    lengths, ends = zip(*chain.from_iterable(session.of_replicas(own)), strict=True)
    put_off = [*chain.from_iterable(session.processes.gathered(session.put_off))]
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
    """Model, storage and ranks of target and draft, sizes, and sampling, in one line."""
    target, plan = session.config.target, session.plan
    prompts = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else max(lengths)
    weights = f", {target.quantize} weights" if target.quantize else ""
    entries = f", {target.kv_dtype} KV" if target.kv_dtype != "same" else ""
    n_ranks, where, of_each = session.ranks.size, _on(session, session.target_ranks), ""
    if session.config.n_replicas > 1:
        where = f" on {session.config.n_replicas} replicas of {n_ranks} rank{'s' if n_ranks > 1 else ''}"
        of_each = " in each"
    return (
        f"{record['model']}, {record['device']}, {record['dtype']}{weights}{entries}"
        f"{where}{_drafting(session)}: {plan.n_rows} rows at a time{of_each}, "
        f"{prompts} prompt tokens, {plan.gen_len} new tokens each; {sampling_text(record)}; "
        f"prefill {record['prefill_seconds']:.1f} s"
    )


def sampling_text(record: dict[str, Any]) -> str:
    """The verification mode, and what it samples by."""
    if not record["temperature"]:
        return record["verification"]
    filters = "".join(f", {name} {record[name]}" for name, off in (("top_k", 0), ("top_p", 1.0)) if record[name] != off)
    return f"{record['verification']} at temperature {record['temperature']}{filters}, seed {record['seed']}"


def _drafting(session: Session) -> str:
    draft = session.draft
    if draft is None:
        return ""
    if draft.dtype is None:
        return f", {draft.kind} draft"
    assert draft.policy is not None
    name = f" {session.draft_source.name}" if session.draft_source else ""
    layers = f" of {len(draft.layers)} layers" if draft.layers is not None else ""
    weights = f" with {draft.quantize} weights" if draft.quantize else ""
    entries = " or ".join(map(str, draft.budgets)) or draft.capacity
    policy = " chosen by attention" if draft.policy.n_observed else ""
    where = " (positions inside the cache)" if draft.policy.in_cache_positions else ""
    made_of = f"{name}{_on(session, session.draft_ranks)}{layers}{weights}"
    return f", {dtype_name(draft.dtype)} draft{made_of}, {entries} KV entries{policy}{where}"


def _on(session: Session, model: ModelRanks | None) -> str:
    """The ranks that hold a model, where there are several at all."""
    if model is None or session.ranks.size == 1:
        return ""
    return f" on rank{'s' if len(model.ranks) > 1 else ''} {' '.join(map(str, model.ranks))}"
