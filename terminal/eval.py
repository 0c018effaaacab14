"""foretoken.py eval: how many multiplications plain decoding and speculation get right."""

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bench.config import BatchSize, Output, Rows, Sampling, Sizes
from bench.passes import decode_batches
from bench.record import acceptance, record_of
from bench.session import Session
from bench.table import reads_text, sampling_text
from common.errors import require_at_least
from common.jsonl import append_or_put_off, publish
from common.say import say
from common.tables import Column, console
from engine.stats import Counts, acceptance_text
from terminal.models import ModelFlags, plan_in_turns
from terminal.significance import compared

NUMBERS = range(1, 100)
# Solved in every prompt, and never drawn as problems.
SHOTS = ((7, 8), (23, 4), (16, 31))
# New tokens, enough for a tokenizer with a token for each digit: a blank, the four digits of 9801, and the line's end.
LONGEST_ANSWER = 8
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")

Problem = tuple[int, int]
COLUMNS = [
    Column("way", "", align="<"),
    Column("right", "right"),
    Column("success", "success", ".1%"),
    Column("interval", "95% interval", lambda ends: f"{ends[0]:.1%} to {ends[1]:.1%}"),
    Column(acceptance_text, "acceptance"),
    Column("mean_accepted_length", "tokens per round", ".2f"),
]


@dataclass(frozen=True, kw_only=True)
class Eval(ModelFlags):
    """the quality of answers to multiplications, plain and speculative. Unless --draft_budget is given, a draft's cache
    keeps half of a prompt"""

    FLAGS: ClassVar[dict[str, str]] = ModelFlags.FLAGS | {"save_rows": "--save"}

    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.6, seed=0))  # also draws the problems
    output: Output = field(default_factory=Output)
    nb_prompts: int = 2000  # problems
    B: BatchSize = 64  # problems decoded together
    save: str = "eval/generations.jsonl"  # append every problem to this file, with what both ways answered

    def run(self) -> None:
        require_at_least("nb_prompts", self.nb_prompts, 1)
        seed, sampling = self.sampling.seed or 0, self.sampling
        sampling = sampling if sampling.temperature else replace(sampling, seed=None)  # greedy decoding has none
        tasks = problems(seed, self.nb_prompts)
        sizes, saved = Sizes(self.B, None, LONGEST_ANSWER), Rows(save_rows=self.save)
        config = self.config(sizes=sizes, rows=saved, sampling=sampling)
        texts, evicts = [prompt(task) for task in tasks], self.draft.draft_budget is None
        session = Session.of_plan(plan_in_turns(config, texts, evicts=evicts))
        assert session.tokenizer
        say(f"every generation is appended to {self.save}, run {session.run}")
        line_ends = (i for i in range(len(session.tokenizer.pieces())) if "\n" in session.tokenizer.decode([i]))
        stops = [*session.plan.target.source.end_tokens, *line_ends]
        rows: list[dict[str, Any]] = []
        counts: list[Counts] = []
        for plainly, speculatively in decode_batches(session, stop_tokens=stops):
            counts += speculatively.stats.rows
            for ids in zip(plainly.tokens, speculatively.tokens, strict=True):
                problem, (plain, speculative) = tasks[len(rows)], map(session.tokenizer.decode, ids)
                row = {"run": session.run, "problem": len(rows), "prompt": prompt(problem)}
                row |= {"plain": plain, "plain_right": is_right(problem, plain)}
                row |= {"speculative": speculative, "speculative_right": is_right(problem, speculative)}
                rows.append(row | {"identical": ids[0] == ids[1]})
                append_or_put_off(self.save, rows[-1], session.put_off)
        found = compared(*([row[right] for row in rows] for right in ("plain_right", "speculative_right")))
        found["speculative"] |= acceptance(counts)
        found |= {"identical_answers": sum(row["identical"] for row in rows), "generations": self.save}
        measured = {"run": session.run, "problem_seed": seed, "problems": len(rows), **found}
        record = record_of("eval", session, measured)
        publish(self.output.output, record, _summary(record), put_off=session.put_off, for_people=True)


def problems(seed: int, n: int) -> list[Problem]:
    """Return `n` pairs of numbers from 1 to 99, all equally likely; no pair comes twice before all have come. A smaller
    `n` gives the first of the same problems."""
    rng = random.Random(seed)
    every = [(a, b) for a in NUMBERS for b in NUMBERS if (a, b) not in SHOTS]
    drawn: list[Problem] = []
    while len(drawn) < n:
        rng.shuffle(every)
        drawn += every[: n - len(drawn)]
    return drawn


def prompt(problem: Problem) -> str:
    """Return the solved problems, a line each, and the problem's line up to the result."""
    lines = [f"{a} * {b} = {a * b}" for a, b in SHOTS]
    a, b = problem
    return "\n".join([*lines, f"{a} * {b} ="])


def is_right(problem: Problem, answer: str) -> bool:
    """Return whether the first number of the answer's first line is the product."""
    a, b = problem
    found = NUMBER.search(answer.partition("\n")[0])
    return found is not None and found[0] == str(a * b)


def _summary(record: dict[str, Any]) -> str:
    """Return the table of a record, with its statistics in sentences."""
    rows = [{"way": "plain decoding", **record["plain"]}, {"way": "speculation", **record["speculative"]}]
    low, high = (f"{100 * end:+.1f}" for end in record["difference_interval"])
    found = f"p = {record['mcnemar_p']:.2g}, {'' if record['significant'] else 'not '}significant"
    draft, n, only = record.get("draft_model") or record["draft"], record["problems"], "right in only a single way"
    reads = f"  a draft step reads {text}\n" if (text := reads_text(record)) else ""
    return f"""
  {record["model"]}, {draft} draft: {n} multiplications, {sampling_text(record)}

{console(rows, COLUMNS)}

{reads}  difference: {100 * record["difference"]:+.1f} points (95% interval {low} to {high}), {found}
  {only}: {record["only_plain_right"]} in plain decoding, {record["only_speculative_right"]} in speculation
  identical answers: {record["identical_answers"]} of {n}; all are in {record["generations"]}
"""
