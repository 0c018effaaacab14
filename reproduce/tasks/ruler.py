"""Texts of RULER (arXiv 2404.06654). A text is its context, what the question names, and right answers."""

import random
from collections.abc import Sequence
from itertools import cycle, islice
from string import ascii_uppercase

NOISE = ("The rain is soft.", "The field is wide.", "The stone is grey.", "On we walk.", "Out and home once more.")
Text = tuple[str, str, list[str]]


def hidden(rng: random.Random, facts: Sequence[str], sentences: Sequence[str], n: int) -> str:
    """Return `n` of the sentences with the facts between them, in their order."""
    start = rng.randrange(len(sentences))
    text = [*islice(cycle(sentences), start, start + n)]
    for place, fact in zip(sorted(rng.choices(range(n + 1), k=len(facts)), reverse=True), facts[::-1], strict=True):
        text.insert(place, fact)
    return " ".join(text)


def needles(
    rng: random.Random, words: Sequence[str], haystack: Sequence[str], n: int, n_key: int, n_value: int, n_queried: int
) -> Text:
    """Hide `n_value` numbers for each of `n_key` words in `n` sentences of the haystack, and query those of `n_queried`
    words."""
    keys, numbers = rng.sample(words, n_key), rng.sample(range(10**6, 10**7), n_key * n_value)
    pairs = [(key, str(number)) for key, number in zip(keys * n_value, numbers, strict=True)]
    facts = [f"The secret number for {key} is {number}." for key, number in pairs]
    queried = keys[:n_queried]
    text = hidden(rng, rng.sample(facts, len(facts)), haystack, n)
    return text, " and ".join(queried), [number for key, number in pairs if key in queried]


def variables(rng: random.Random, words: Sequence[str], haystack: Sequence[str], n: int, n_variable: int) -> Text:
    """Hide a chain of assignments in `n` sentences: of a number to a variable, and of each variable to the next."""
    names = ["".join(rng.choices(ascii_uppercase, k=5)) for _ in range(n_variable)]
    number = str(rng.randrange(10**4, 10**5))
    values = [number, *(f"VAR {name}" for name in names[:-1])]
    facts = [f"VAR {name} = {value}." for name, value in zip(names, values, strict=True)]
    return hidden(rng, facts, haystack, n), number, names


def common_words(
    rng: random.Random, words: Sequence[str], haystack: Sequence[str], n: int, n_common: int, repeats: Sequence[int]
) -> Text:
    """List `n_common` words repeats[0] times, and `n` others, if there are as many, repeats[1] times."""
    chosen = rng.sample(words, min(n_common + n, len(words)))
    every = chosen[:n_common] * repeats[0] + chosen[n_common:] * repeats[1]
    listed = rng.sample(every, len(every))
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), str(n_common), chosen[:n_common]


TEXTS = {each.__name__: each for each in (needles, variables, common_words)}
