"""Multiplications that a language model completes: problems by seed, their prompts, and the check of an answer."""

import random
import re

from models.checkpoints.tokenizer import Tokenizer

NUMBERS = range(1, 100)
# Solved in every prompt, and never drawn as problems.
SHOTS = ((7, 8), (23, 4), (16, 31))
# New tokens, enough for a tokenizer with a token for each digit: a blank, the four digits of 9801, and the line's end.
LONGEST_ANSWER = 8
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")

Problem = tuple[int, int]


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


def line_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of all tokens that end a line."""
    return [index for index in range(len(tokenizer.pieces())) if "\n" in tokenizer.decode([index])]
