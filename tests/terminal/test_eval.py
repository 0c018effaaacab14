"""`foretoken.py eval`: its statistics, problems and answers, and whether it notices a verification that is broken."""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.session import Session
from engine.drafters.stored import Models
from engine.verification import Verdict
from models.checkpoints.tokenizer import Tokenizer
from terminal.eval import is_right, problems, prompt
from terminal.significance import compared, mcnemar, paired_difference, wilson
from tests.support.hf_tiny import N_TOKENS
from tests.support.programs import Ended, run, saved
from tests.support.witness import FakeConfig, FakeModel


def test_intervals_are_published_ones() -> None:
    """Wilson's interval is that of Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3, and the paired
    one that of `ci.prop.ps` in R's statpsych."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert paired_difference(4, 26, 48) == pytest.approx((0.2548067, 0.6251933), abs=1e-7)
    assert paired_difference(0, 0, 48) == pytest.approx((-0.0554, 0.0554), abs=1e-4), "none is seen, some may be"


@given(st.integers(0, 6), st.integers(0, 6))
def test_mcnemar_counts_the_tosses_that_are_as_uneven(first: int, second: int) -> None:
    """By going through all of them."""
    tosses = [sum(toss) for toss in itertools.product((-1, 1), repeat=first + second)]
    assert mcnemar(first, second) == sum(abs(sides) >= abs(first - second) for sides in tosses) / len(tosses)


def test_what_is_compared_is_paired() -> None:
    plain = [True] * 30 + [False] * 70
    record = compared(plain, [not right if place < 20 else right for place, right in enumerate(plain)])
    assert (record["plain"]["right"], record["speculative"]["right"], record["difference"]) == (30, 10, -0.2)
    assert (record["only_plain_right"], record["only_speculative_right"]) == (20, 0)
    assert record["significant"] and record["difference_interval"][1] < -0.1
    assert record["plain"] == {"right": 30, "success": 0.3, "interval": wilson(30, 100)}
    assert record["speculative"]["interval"] == wilson(10, 100)
    assert not compared(plain, plain[::-1][:70] + [True] * 30)["significant"]


@pytest.mark.parametrize("answer", [" 408", "408\n7", " is 408, which is 24 * 17", " 408.", "\t408 * 1 = 408\n"])
def test_the_first_number_of_the_first_line_counts(answer: str) -> None:
    assert is_right((12, 34), answer)


class Calculator(FakeModel):
    """Multiplies: after `a * b =` every character of the product is as it should be 19 times of 20."""

    config = FakeConfig(N_TOKENS, max_context=256)
    dtype = torch.float64
    backend = pointwise = SimpleNamespace(name="calculator")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def hidden(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        held, _, _ = self.look(tokens, positions, cache)
        rows = zip(held[:, 0].tolist(), positions.tolist(), strict=True)
        return torch.tensor([[[self._next(row[: place + 1])] for place in places] for row, places in rows])

    def _next(self, text: list[int]) -> int:
        last = self._tokenizer.decode(text).rpartition("\n")[2]
        asked = re.fullmatch(r"(\d+) \* (\d+) =(.*)", last)
        result = f" {int(asked[1]) * int(asked[2])}\n" if asked else ""
        written = len(asked[3]) if asked else 0
        return self._tokenizer.encode(result[written : written + 1] or "\n", add_bos=False)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[..., 0], N_TOKENS) * math.log(19 * N_TOKENS)


def accept_everything(drafts: Tensor, q: Tensor | None, p: Tensor, *noise: Tensor | None) -> Verdict:
    """A verification that looks at nothing."""
    lengths = noise[-1] if noise[-1] is not None else torch.full((len(drafts),), drafts.shape[1])
    return Verdict(lengths, p[torch.arange(len(p)), lengths].argmax(dim=-1))


Evaluate = Callable[[str], Ended]


@pytest.fixture
def evaluate(chat_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Runs it on the random model, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda flags: run("foretoken.py", f"eval {chat_checkpoint} {flags} --dtype float64 --device cpu".split())


@pytest.fixture
def calculate(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Runs it on a model that can multiply, with drafts that are mostly wrong."""
    monkeypatch.setattr(Models, "load_target", lambda models: Calculator(models.planned.source.tokenizer()))
    return lambda flags: evaluate(f"ngram --temperature 1 {flags}")


def test_every_answer_is_saved_and_counted(calculate: Evaluate) -> None:
    ended = calculate("--nb_prompts 50 --B 16 --seed 3")
    record, (asked, rows) = ended.record, (problems(3, 50), saved("eval/generations.jsonl"))
    assert [row["prompt"] for row in rows] == [prompt(one) for one in asked]
    for way in ("plain", "speculative"):
        right = [is_right(one, row[way]) for one, row in zip(asked, rows, strict=True)]
        assert [row[f"{way}_right"] for row in rows] == right and sum(right) == record[way]["right"]
        assert 0.6 < record[way]["success"] < 0.95 and not any("\n" in row[way][:-1] for row in rows)
    same = [row["plain"] == row["speculative"] for row in rows]
    assert [row["identical"] for row in rows] == same and 0 < sum(same) == record["identical_answers"] < 50
    assert {row["run"] for row in rows} == {record["run"]} and record["generations"] == "eval/generations.jsonl"
    assert 0 < record["speculative"]["acceptance_rate"] < 0.5
    assert 0 < record["speculative"]["acceptance_standard_error"] < 0.1 and " ± 0." in ended.out
    assert not record["significant"] and record["difference_interval"][1] > 0 and ", not significant" in ended.out
    assert ["plain", "decoding", str(record["plain"]["right"])] in [line.split()[:3] for line in ended.lines]


def test_a_broken_verification_is_significant(calculate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.modes.verify_rejection", accept_everything)
    ended = calculate("--nb_prompts 50 --B 16")
    assert ended.record["significant"] and ended.record["difference_interval"][1] < 0
    assert ", not significant" not in ended.out


def test_what_was_answered_survives_an_interruption(calculate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    generation, calls = Session.generation, itertools.count()

    def interrupted(session: Session, **how: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return generation(session, **how)

    monkeypatch.setattr(Session, "generation", interrupted)
    assert calculate("--nb_prompts 20 --B 4 --save half.jsonl").code == 130
    assert [row["problem"] for row in saved("half.jsonl")] == [*range(8)]
