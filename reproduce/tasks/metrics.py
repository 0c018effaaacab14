"""Scores of answers, from 0 to 1: functions of an answer, the right ones, and the classes or options to choose among.

share is RULER's (arXiv 2404.06654). f1, one_class and numbers are LongBench's (arXiv 2308.14508), and the others, with
f1, InfiniteBench's (arXiv 2402.13718).
"""

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from string import punctuation

LETTERS = "ABCD"


def share(answer: str, right: Sequence[str], choices: Sequence[str]) -> float:
    """Return the share of the right strings that the answer contains, in any case."""
    return fmean(each.lower() in answer.lower() for each in right)


def f1(answer: str, right: Sequence[str], choices: Sequence[str]) -> float:
    """Return the F1 of the answer's words against the nearest right answer's, without case, punctuation, articles."""

    def words(text: str) -> Counter[str]:
        bare = text.lower().translate(str.maketrans("", "", punctuation))
        return Counter(word for word in bare.split() if word not in ("a", "an", "the"))

    pairs = [(words(answer), words(each)) for each in right]
    return max(2 * (a & b).total() / ((a + b).total() or 1) for a, b in pairs)


def one_class(answer: str, right: Sequence[str], choices: Sequence[str]) -> float:
    """Return 1 over the number of classes in the answer if the right one is among them. A class whose name is part of
    the right one's does not count."""

    def score(expected: str) -> float:
        found = [each for each in choices if each in answer and (each == expected or each not in expected)]
        return 1 / len(found) if expected in found else 0.0

    return max(map(score, right))


def numbers(answer: str, right: Sequence[str], choices: Sequence[str]) -> float:
    """Return the share of the answer's numbers that are the right answer's."""
    found, expected = (re.findall(r"\d+", text) for text in (answer, right[0]))
    return found.count(expected[0]) / len(found) if found and expected else 0.0


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


METRICS = {each.__name__: each for each in (share, f1, one_class, numbers, first_number, last_number, word, choice)}
