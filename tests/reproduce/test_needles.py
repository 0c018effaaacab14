"""Needles: prompts of the length asked for, with facts that stand early, which the answers repeat."""

import re

import pytest

from reproduce.helpers.batches import KINDS, LATEST, needles

TEXTS = [[1] * 2400, [2] * 2100, [3] * 2250]


def encode(text: str) -> list[int]:
    """A token for each character, none of them one of the texts'."""
    return [ord(character) for character in text]


@pytest.mark.parametrize("kind", KINDS)
def test_needles_stand_early_and_answers_repeat_them(kind):
    n_told, n_asked = KINDS[kind]
    prompts, answers = needles(kind, TEXTS, encode, 99)
    assert [len(prompt) for prompt in prompts] == [2400, 2100, 2250] and len({*map(len, answers)}) == 1
    for prompt, answer, own in zip(prompts, answers, (1, 2, 3), strict=True):
        text, said = ("".join(map(chr, tokens)) for tokens in (prompt, answer))
        told = re.findall(r"magic codes for (\w+) is: (\w{16})", text)
        question = text[text.index("What are all") :]
        asked = re.findall(r"\w+", re.findall("text for (.*)[?]", question)[0].replace(" and ", " "))
        assert len(told) == n_told and len(asked) == n_asked and question.endswith("They are: ")
        assert prompt[0] == own and text.rindex("One of the special") < LATEST * len(prompt) + 90 * n_told
        right = ", ".join(f"{key}: {dict(told)[key]}" for key in asked) + "."
        assert right.startswith(said) and len(right) - len(said) < 8
    assert needles(kind, TEXTS, encode, 7)[1] == [answer[:7] for answer in answers]
    assert needles(kind, TEXTS, encode, 99) == (prompts, answers) != needles(kind, TEXTS, encode, 99, seed=1)
