"""Metrics of InfiniteBench (arXiv 2402.13718): functions of an answer, the right ones, and the options."""

import re
from collections.abc import Sequence

from reproduce.tasks.longbench import f1

LETTERS = "ABCD"


def first_number(answer: str, right: Sequence[str], choices: Sequence[str]) -> float:
    """Return 1 if the answer's first number is right, with zeros before it, but without .0 behind it."""
    found = re.findall(r"\d+(?:\.\d+)?", answer)
    return float(bool(found) and found[0].removesuffix(".0") == right[0].removesuffix(".0"))


def last_number(answer: str, right: Sequence[str], choices: Sequence[str]) -> float:
    """Return 1 if the answer's last number is right."""
    return float(re.findall(r"-?\d+", answer)[-1:] == [*right[:1]])


def word(answer: str, right: Sequence[str], choices: Sequence[str]) -> float:
    """Return 1 if a right word is among the answer's, in any case."""
    return float(not {*re.findall(r"[\w-]+", answer.upper())}.isdisjoint(each.upper() for each in right))


def choice(answer: str, right: Sequence[str], choices: Sequence[str]) -> float:
    """Return 1 if the first letter of an option that stands alone, and is no article, is the right one's, or else if
    the answer begins with the right option. right: the option, its letter, or both."""
    letters = [LETTERS[choices.index(each)] if each in choices else each for each in right]
    found = re.search(r"\b(?:[B-D]|A(?! [a-z]))\b", answer)
    return float(found[0] in letters if found else answer.strip().startswith((*right,)))


METRICS = {each.__name__: each for each in (first_number, last_number, word, choice, f1)}
