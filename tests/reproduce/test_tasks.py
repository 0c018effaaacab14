"""Tasks with right answers: RULER's texts, files of LongBench and InfiniteBench, metrics, and a run that is scored."""

import json
import random
import re
from itertools import product
from pathlib import Path
from string import ascii_uppercase, digits
from types import SimpleNamespace
from typing import Any

import pytest

from bench import passes
from common.errors import ConfigError
from models.checkpoints.tokenizer import load_tokenizer
from reproduce.tasks.metrics import METRICS
from reproduce.tasks.task import BENCHMARKS, Encoder, find_task, made, read

SCRIPT = "reproduce/compare.py"
NAMES = [name for name, value in BENCHMARKS["ruler"].items() if isinstance(value, dict)]


def joining(text: str, split: Any) -> SimpleNamespace:
    return SimpleNamespace(encode=lambda text, add_bos=True: split(text), decode=text.join)


TOKENIZERS = {"characters": joining("", list), "words": joining(" ", str.split)}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    """400 words of six letters in sentences of four."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(400)]
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(" ".join(f"{' '.join(words[i : i + 4])}." for i in range(0, 400, 4)))
    return str(path)


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest):
    return TOKENIZERS[request.param]


COUNTS = {"niah_multivalue": [1] * 4, "niah_multiquery": [1] * 4, "vt": [2, 2, 2, 2, 1], "cwe": [30] * 10}


@pytest.mark.parametrize("name", NAMES)
def test_a_text_of_ruler_has_its_answers_and_fits(name: str, tokenizer, book: str):
    task, joined = find_task("ruler", name), tokenizer.decode
    for most in (4500, 6000):
        _, examples = made(task, 3, Encoder(tokenizer, None, most), 7, book)
        for example in examples:
            text, found = joined(example.prompt), [*map(str.upper, example.right)]
            found = [len(re.findall(rf"\b{right}\b", text, re.IGNORECASE)) for right in found]
            assert found == COUNTS.get(name, [1])
            if name == "vt":
                places = [text.index(f"VAR {right} =") for right in example.right]
                assert places == sorted(places), "no variable stands before what it takes its value from"
            n_fact = 1 if name.startswith("niah_single") else 4
            assert text.count("The secret number for") == (n_fact if task.make == "needles" else 0)
            assert text.endswith((" are", " 10 words that are in the list most often are"))
            assert len(example.prompt) <= most
            if name != "cwe":  # a longer list of words needs more words than this book has
                assert len(example.prompt) > most - 40, "another sentence does not fit"


def test_texts_depend_on_seed_and_number_alone(tokenizer, book: str):
    task, encoder = find_task("ruler", "niah_multikey_1"), Encoder(tokenizer, None, 900)
    examples, more, others = (made(task, n, encoder, seed, book)[1] for n, seed in ((3, 7), (4, 7), (3, 8)))
    assert examples == more[:3] and len({each.right[0] for each in (*more, *others)}) == 7


def test_a_refusal_says_how_long_a_context_has_to_be(tokenizer, book: str):
    task = find_task("ruler", "cwe")
    with pytest.raises(ConfigError) as caught:
        made(task, 1, Encoder(tokenizer, None, 50), 7, book)
    (least,) = map(int, re.findall(r"required: (\d+)", str(caught.value)))
    made(task, 1, Encoder(tokenizer, None, least), 7, book)
    with pytest.raises(ConfigError):
        made(task, 1, Encoder(tokenizer, None, least - 1), 7, book)


METRIC_CASES = [
    ("share", "It is 12 and ABCDE", ["12", "abcde", "77"], (), 2 / 3),
    ("f1", "The cat, sat!", ["a dog", "cat sat down"], (), 4 / 5),
    ("f1", "cat cat dog", ["cat"], (), 1 / 2),
    ("f1", "the", ["a"], (), 0),
    ("one_class", "food or sport food", ["food"], ["food", "sport", "city"], 1 / 2),
    ("one_class", "other location", ["other location"], ["location", "other location"], 1),
    ("one_class", "location", ["other location"], ["location", "other location"], 0),
    ("numbers", "Paragraph 3, or 13, or 3", ["Paragraph 3"], (), 2 / 3),
    ("first_number", "It is 0071, not 71.", ["0071"], (), 1),
    ("first_number", "It is 71", ["0071"], (), 0),
    ("first_number", "12.50 and 12.5", ["12.5"], (), 0),
    ("first_number", "12.0", ["12"], (), 1),
    ("last_number", "f(3) is -17.", ["-17"], (), 1),
    ("word", "{'key': 'ab-1f'}", ["ab-1f"], (), 1),
    ("word", "Jonathan", ["JON", "ANN"], (), 0),
    ("word", "it's Ann!", ["JON", "ANN"], (), 1),
    ("choice", "The answer is B.", ["hot"], ["cold", "hot"], 1),
    ("choice", "A. cold, not B", ["hot"], ["cold", "hot"], 0),
    ("choice", " hot and dry", ["hot"], ["cold", "hot"], 1),
    ("choice", "C", ["run", "C"], ["walk", "sit", "run"], 1),
    ("choice", "", ["hot"], ["cold", "hot"], 0),
]


@pytest.mark.parametrize(("name", "answer", "right", "choices", "score"), METRIC_CASES)
def test_metrics_by_hand(name: str, answer: str, right: list[str], choices: list[str], score: float):
    assert METRICS[name](answer, right, choices) == pytest.approx(score)


def write(folder: Path, name: str, *rows: Any) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def test_files_are_read_and_long_contexts_lose_their_middle(tmp_path: Path, tokenizer):
    encoder = Encoder(tokenizer, None, 400)
    long = {"context": "first " * 600 + "last", "input": "who?", "answers": ["x", "y"], "dataset": "qasper"}
    short = {"context": "abc", "answer": 7, "options": ["u", "v"]}
    path = write(tmp_path, "any", long, long)
    task, (example,) = read("longbench", path, 1, encoder)
    assert (task.name, task.new_tokens, example.right) == ("longbench:qasper", 128, ["x", "y"])
    assert len(example.prompt) in (399, 400), "where the middle was, two words may have become one"
    text = tokenizer.decode(example.prompt)
    assert re.search(r"can\.\s+first first .* first last\s+Question: who\?\s+Answer:$", text)
    task, examples = read("infinitebench", write(tmp_path, "code_debug", short, short), 9, encoder)
    assert task.name == "infinitebench:code_debug" and len(examples) == 2
    assert (examples[0].right, examples[0].choices) == (["7"], ["u", "v"])
    text = " ".join(tokenizer.decode(examples[0].prompt).split())
    assert text.startswith("abc A. u B. v")


FLAGS = "--B 2 --device cpu --dtype float64 --gamma 2 --draft_dtype same --draft_budget 40 --rope_scaling linear:4"


def test_tasks_are_scored_by_plain_decoding(call, checkpoint: Path, book: str, tmp_path: Path, monkeypatch):
    """A row for each task, context and drafter, all with the score of the tokens that plain decoding gave."""
    letters, outputs = [*ascii_uppercase, *digits], list[tuple[str, list[list[int]]]]()
    texts = zip(("go " * 5, "go " * 300, "go " * 9), "RR3", strict=True)
    rows = [{"context": text, "answers": [letter], "all_classes": letters} for text, letter in texts]

    def decode(session: Any, name: str, *rest: Any, **more: Any) -> Any:
        output = original(session, name, *rest, **more)
        outputs.append((name, output.tokens))
        return output

    original = passes.decode
    monkeypatch.setattr("bench.decode", decode)
    tasks = f"--tasks longbench:{write(tmp_path, 'trec', *rows)} ruler:vt --contexts 600 700"
    ended = call(SCRIPT, f"{FLAGS} --dataset {book} {tasks} --num_prompts 3 --drafters self:streaming ngram")
    found = [(row["context"], row["task"], row["drafter"]) for row in ended.record["rows"]]
    expected = product((600, 700), ("longbench:trec", "ruler:vt"), ("self:streaming", "ngram"))
    assert found == [*expected]
    tokenizer = load_tokenizer(checkpoint)
    plain = [tokens for name, batch in outputs if name.startswith("plain") for tokens in batch]
    for n, row in enumerate(ended.record["rows"]):
        assert row["identical_sequences"] == row["sequences"] == len(row["scores"]) == 3
        if row["task"] == "longbench:trec":
            first = n // 4 * 6
            lines = [tokenizer.decode(tokens).strip().partition("\n")[0] for tokens in plain[first : first + 3]]
            right = [METRICS["one_class"](line, [letter], letters) for line, letter in zip(lines, "RR3", strict=True)]
            assert row["scores"] == pytest.approx(right, abs=1e-4)
            assert row["score"] == pytest.approx(sum(right) / 3, abs=1e-4) and row["score_standard_error"] is None
    assert any(row["score"] for row in ended.record["rows"])


WRONG = {"ruler:nothing": "niah_single_1", "squad:vt": "longbench", "ruler:vt --chat": "two sets of prompts"}
WRONG |= {"ruler:vt --texts book": "teacher-forced", "ruler:vt --gen_len 32": "--gen_len"}


@pytest.mark.parametrize(("tasks", "message"), [*WRONG.items(), ("ruler:vt --contexts 700 50", "no room")])
def test_flags_that_contradict_tasks_are_refused(call, book: str, tasks: str, message: str):
    assert message in call(SCRIPT, f"{FLAGS} --dataset {book} --drafters ngram --tasks {tasks}").refusal
