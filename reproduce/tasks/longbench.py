"""Metrics of LongBench (arXiv 2308.14508): functions of an answer, the right ones, and all classes."""

import re
from collections import Counter
from collections.abc import Sequence
from string import punctuation


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


METRICS = {each.__name__: each for each in (f1, one_class, numbers)}
