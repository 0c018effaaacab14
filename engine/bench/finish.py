"""How a benchmark ends: texts and a table for people, the record for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.jsonl import publish
from common.say import dtype_name
from engine.bench.notes import notes
from engine.bench.passes import Passes
from engine.bench.record import make_record
from engine.bench.session import Session
from engine.bench.table import table

# Tokens of a prompt that --printoutput shows.
PROMPT_END = 32


def finish(benchmark: str, session: Session, passes: Passes) -> None:
    """Print the texts asked for, the table, and last the record; append it to --output. One rank does.

    Errors: ConfigError if either failed, or what the run put off.
    """
    record = make_record(benchmark, session, passes)
    if not session.ranks.leads:
        return
    plan = session.plan
    headline = (
        f"\n  {record['model']}, {record['device']}, {record['dtype']}"
        f"{_storage(session)}{_splitting(session)}{_drafting(session)}: "
        f"{plan.n_rows} rows at a time, "
        f"{_prompt_lengths(session)} prompt tokens, {plan.gen_len} new tokens each; {_sampling(record)}; "
        f"prefill {record['prefill_seconds']:.1f} s\n"
    )
    said = "\n".join([table(record), *(f"  {note}" for note in notes(record, session.draft))]) + "\n"
    publish(session.config.output.output, record, *_texts(session, passes), headline, said, put_off=session.put_off)


def _texts(session: Session, passes: Passes) -> list[str]:
    """How the first row goes on; with --printoutput of every row how its prompt ends, and how it goes on."""
    output = passes.speculative or passes.baseline
    assert output is not None

    def shown(tokens: list[int]) -> str:  # random weights have no tokenizer: their rows are shown as ids
        return repr(session.tokenizer.decode(tokens) if session.tokenizer else tokens)

    if not session.config.printoutput:
        return [f"  row 0 goes on: {shown(output.tokens[0])}"] if session.tokenizer else []
    return [
        line
        for row, (prompt, tokens) in enumerate(zip(session.prompts, output.tokens, strict=True))
        for line in (f"prompt {row} ends: {shown(prompt[-PROMPT_END:])}", f"row {row}: {shown(tokens)}")
    ]


def _sampling(record: dict[str, Any]) -> str:
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
    name = f" {session.draft_source.name}" if session.draft_source else ""
    if session.draft_ranks and session.ranks.size > 1:
        name += f" on {_ranks(session.draft_ranks.ranks)}"
    if draft.layers is not None:
        name += f" of {len(draft.layers)} layers"
    assert draft.policy is not None
    where = " (positions inside the cache)" if draft.policy.in_cache_positions else ""
    weights = f" with {draft.quantize} weights" if draft.quantize else ""
    entries = " or ".join(map(str, draft.budgets)) or draft.capacity
    policy = " chosen by attention" if draft.policy.n_observed else ""
    return f", {dtype_name(draft.dtype)} draft{name}{weights}, {entries} KV entries{policy}{where}"


def _storage(session: Session) -> str:
    """How the target is stored, where that is not in its dtype."""
    target = session.config.target
    weights = f", {target.quantize} weights" if target.quantize else ""
    return weights + (f", {target.kv_dtype} KV" if target.kv_dtype != "same" else "")


def _prompt_lengths(session: Session) -> str:
    lengths = [len(prompt) for prompt in session.prompts]
    return f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else str(max(lengths))


def _splitting(session: Session) -> str:
    return f" on {_ranks(session.target_ranks.ranks)}" if session.ranks.size > 1 else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(map(str, ranks))}"
