"""Tasks with right answers, as tasks.toml describes them: their prompts, and scores of answers."""

import random
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from bench.data import files_of, load_books, resolve_dataset, rows_of, unreadable
from common.errors import DataError, refuse
from models.checkpoints.chat_template import ChatTemplate, NoChatTemplateError
from models.checkpoints.model_source import ModelSource
from models.checkpoints.tokenizer import Tokenizer
from reproduce.tasks import ruler
from reproduce.tasks.metrics import LETTERS, METRICS

BENCHMARKS = tomllib.loads((Path(__file__).parent / "tasks.toml").read_text(encoding="utf-8"))
KEYS = ("context", "input", "answers", "answer", "all_classes", "options", "dataset")
# Words of a book for keys and lists, and the fewest that will do.
WORDS, LEAST_WORDS = re.compile(r"\b[a-z]{6,}\b"), 20


@dataclass(frozen=True)
class Example:
    """A prompt as token ids, the right answers, and the classes or options to choose among."""

    prompt: list[int]
    right: list[str]
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class Task:
    """A task; tasks.toml says what its fields are."""

    name: str
    metric: Callable[[str, Sequence[str], Sequence[str]], float]
    new_tokens: int
    prompt: str
    opening: str = ""
    chat: bool = True
    first_line: bool = False
    make: str = ""
    haystack: str = "noise"
    options: dict[str, Any] = field(default_factory=dict)

    def scores(self, examples: Sequence[Example], answers: Sequence[str]) -> list[float]:
        """Return the score of each answer, from 0 to 1."""
        kept = [answer.strip().partition("\n")[0] if self.first_line else answer for answer in answers]
        return [self.metric(text, each.right, each.choices) for text, each in zip(kept, examples, strict=True)]


def find_task(benchmark: str, name: str) -> Task:
    """Return the task of that name. Errors: ConfigError, also for published tasks whose metric is not here."""
    table = BENCHMARKS.get(benchmark, {})
    tasks = {key: value for key, value in table.items() if isinstance(value, dict)}
    if name not in tasks:
        required = ", ".join(tasks) or ", ".join(BENCHMARKS)
        refuse("tasks", f"{benchmark}:{name}", required, "there is no such task, or no metric for it", "choose another")
    chosen = {key: value for key, value in table.items() if key not in tasks} | tasks[name]
    return Task(f"{benchmark}:{name}", METRICS[chosen.pop("metric")], **chosen)


@dataclass(frozen=True)
class Encoder:
    """A model's tokenizer, its chat template if it has one, and the most tokens of a prompt."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    most: int

    def ids(self, task: Task, **texts: str) -> list[int]:
        """Return the token ids of a prompt, with the beginning of its answer."""
        prompt, opening = task.prompt.strip().format(**texts), task.opening.format(**texts)
        if self.template is None or not task.chat:
            return self.tokenizer.encode(f"{prompt}\n{opening}" if opening else prompt)
        message = {"role": "user", "content": prompt}
        return self.template.encode([message]) + self.tokenizer.encode(opening, add_bos=False)

    def longest(self, task: Task, sizes: int, example: Callable[[int], Example]) -> Example:
        """Return the example of the largest size below `sizes` that fits. Errors: ConfigError without any."""
        fitting = bisect_left(range(sizes), True, key=lambda size: len(example(size).prompt) > self.most)
        if fitting == 0:
            what, fix = f"a prompt has no room for what {task.name} asks", "make it longer, or leave out the task"
            refuse("contexts", self.most, f"{len(example(0).prompt)} tokens or more", what, fix)
        return example(fitting - 1)


def made(task: Task, n: int, encoder: Encoder, seed: int, dataset: str) -> tuple[Task, list[Example]]:
    """Return a task of RULER and `n` examples, with the words and sentences of a data set's first book. Errors:
    UserError."""
    book = " ".join(next(load_books(dataset)).split())
    words, sentences = sorted({*WORDS.findall(book)}), re.split(r"(?<=[.!?]) ", book)
    if len(words) < LEAST_WORDS:
        required = f"{LEAST_WORDS} words of six letters or more"
        refuse("dataset", f"{len(words)} words", required, "a book has too few words", "name another book", DataError)

    def example(number: int, size: int) -> Example:
        rng = random.Random(f"{seed} {task.name} {number}")
        haystack = sentences if task.haystack == "book" else ruler.NOISE
        context, question, right = ruler.TEXTS[task.make](rng, words, haystack, size, **task.options)
        return Example(encoder.ids(task, context=context, input=question), right)

    return task, [encoder.longest(task, encoder.most, partial(example, number)) for number in range(n)]


def read(benchmark: str, file: str, n: int, encoder: Encoder) -> tuple[Task, list[Example]]:
    """Return the task of a file of LongBench or InfiniteBench, and its first `n` examples. Errors: UserError."""
    (path,) = files_of(file, "tasks", (), "ruler:TASK")
    rows = [*islice(rows_of(path, KEYS, "tasks"), n)]
    for number, row in rows or [(0, None)]:
        if not (isinstance(row, dict) and right_of(row) and isinstance(row.get("context"), str)):
            required = "lines with a text under `context`, and right answers under `answers` or `answer`"
            raise unreadable(path, f"line {number}: {str(row)[:80]}", required, "tasks")
        if len(options := row.get("options") or ()) > (most := len(LETTERS)):
            raise unreadable(path, f"line {number}: {len(options)} options", f"at most {most} options", "tasks")
    task = find_task(benchmark, rows[0][1].get("dataset") or path.stem)
    return task, [of_row(task, row, encoder) for _, row in rows]


def right_of(row: dict[str, Any]) -> list[str]:
    """Return the right answers of a row."""
    right = row.get("answers", row.get("answer"))
    return [str(each) for each in (right if isinstance(right, list) else [right]) if each is not None]


def of_row(task: Task, row: dict[str, Any], encoder: Encoder) -> Example:
    """Return the example of a row; of a context that is too long, the middle is left out. Errors: ConfigError."""
    tokens = encoder.tokenizer.encode(row["context"], add_bos=False)
    choices = row.get("all_classes") or row.get("options") or ()
    listed = "\n".join(map("{}. {}".format, LETTERS, choices))

    def example(size: int) -> Example:
        parts = tokens[: size // 2], tokens[len(tokens) - (size - size // 2) :]
        context = row["context"] if size == len(tokens) else "".join(map(encoder.tokenizer.decode, parts))
        ids = encoder.ids(task, context=context, input=row.get("input") or "", choices=listed)
        return Example(ids, right_of(row), choices)

    return encoder.longest(task, len(tokens) + 1, example)


def tasks_of(
    names: Sequence[str], n: int, most: int, seed: int, target: ModelSource, dataset: str
) -> list[tuple[Task, list[Example]]]:
    """Return each task that a flag names, ruler:TASK, longbench:FILE or infinitebench:FILE, and its first `n` examples,
    of at most `most` tokens. Errors: UserError."""
    template, found = None, []
    with suppress(NoChatTemplateError):
        template = target.chat_template()
    encoder = Encoder(target.tokenizer(), template, most)
    for benchmark, _, name in (each.partition(":") for each in names):
        if benchmark in ("longbench", "infinitebench"):
            found.append(read(benchmark, name, n, encoder))
        else:
            task = find_task(benchmark, name)
            found.append(made(task, n, encoder, seed, resolve_dataset(dataset, target) or dataset))
    return found
