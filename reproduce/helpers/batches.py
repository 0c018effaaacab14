"""Batches of prompts: of a session, of a task, and of conversations turn by turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import bench
from bench.data import Prompt
from models.checkpoints.chat_template import ChatTemplate
from reproduce.tasks.task import Example, Task

# The most tokens that a token of an answer becomes when its text is encoded again: three for each byte of a character
# that was cut off.
READ_AGAIN = 3


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together.

    first: number of the first request, on which samples depend. sources: a number of the text that each prompt comes
    from. continuations: tokens that follow each prompt in its text. talks: messages of each conversation. score:
    returns the score of each answer, from 0 to 1.
    """

    prompts: list[list[int]]
    first: int
    sources: Sequence[int]
    continuations: list[list[int]] = field(default_factory=list)
    talks: Sequence[list[dict[str, str]]] = ()
    score: Callable[[Sequence[str]], list[float]] | None = None

    def answer(self, texts: Sequence[str]) -> None:
        """Add the answers to the conversations."""
        for talk, text in zip(self.talks, texts, strict=True):
            talk.append({"role": "assistant", "content": text})


def batches_of(session: bench.Session) -> Iterator[Batch]:
    """Yield the prompts of a session, as many at a time as it has rows."""
    n_rows = session.plan.target.n_rows
    for first in range(0, len(session.prompts), n_rows):
        rows = slice(first, first + n_rows)
        prompts = session.prompts[rows]
        yield Batch(prompts, first, range(first, first + len(prompts)), session.continuations[rows])


def examples_of(session: bench.Session, task: Task, examples: Sequence[Example]) -> Iterator[Batch]:
    """Yield the prompts of a task's examples, as many at a time as the session has rows."""
    for batch in batches_of(replace(session, prompts=[example.prompt for example in examples])):
        rows = [examples[source] for source in batch.sources]
        yield replace(batch, score=partial(task.scores, rows))


def turns_of(category: Sequence[Prompt], template: ChatTemplate, n_rows: int) -> Iterator[Batch]:
    """Yield each turn of the conversations that have it. The answers have to be added to the `talks` before the next
    batch is taken."""
    talks: list[list[dict[str, str]]] = [[] for _ in category]
    first = 0
    for turn in range(max(len(prompt.turns) for prompt in category)):
        going = [row for row, prompt in enumerate(category) if turn < len(prompt.turns)]
        for rows in (going[start : start + n_rows] for start in range(0, len(going), n_rows)):
            for row in rows:
                talks[row].append({"role": "user", "content": category[row].turns[turn]})
            yield Batch([template.encode(talks[row]) for row in rows], first, rows, talks=[talks[row] for row in rows])
            first += len(rows)


def longest_form(template: ChatTemplate, prompt: Prompt, gen_len: int) -> list[int]:
    """Return as many token ids as the prompt of the last turn has after the longest possible answers."""
    turns = [{"role": "user", "content": turn} for turn in prompt.turns]
    empty = {"role": "assistant", "content": ""}
    ids = template.encode([*chain.from_iterable((turn, empty) for turn in turns[:-1]), turns[-1]])
    return ids + ids[:1] * (READ_AGAIN * gen_len * (len(turns) - 1))
