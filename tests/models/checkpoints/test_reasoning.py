"""Reasoning is separated from an answer, however its text comes in pieces."""

import pytest

from models.checkpoints.reasoning import ReasoningParser, reasons_after

# The text, whether it begins within reasoning, its reasoning and its answer.
CASES: list[tuple[str, bool | None, str, str]] = [
    ("<think>\nwhy </thi\n</think>\n\nyes < no", None, "why </thi\n", "yes < no"),
    ("\n<think>why</think>yes</think>", None, "why", "yes</think>"),
    ("\nwhy</think>\n", True, "why", ""),
    ("why </thin", True, "why </thin", ""),
    ("<thinking> </think>", None, "", "<thinking> </think>"),
    ("  <thi", None, "", "  <thi"),
    ("<think>why</think>yes", False, "", "<think>why</think>yes"),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), CASES)
def test_the_pieces_of_a_text_do_not_matter(text, is_open, reasoning, answer):
    for size in (1, 2, 5, 100):
        parser, pieces = ReasoningParser(is_open), [text[i : i + size] for i in range(0, len(text), size)]
        parts = [*map(parser.add, pieces[:-1]), parser.add(pieces[-1], is_last=True)]
        assert ("".join(part for part, _ in parts), "".join(part for _, part in parts)) == (reasoning, answer)


def test_a_prompt_opens_reasoning_or_closes_it_or_leaves_it_free():
    assert reasons_after("[a]<think>\n") is True and reasons_after("[a]<think>\n\n</think>\n\n") is False
    assert reasons_after("what is <think>?\n[a]") is None
