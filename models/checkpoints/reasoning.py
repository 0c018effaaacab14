"""Reasoning in a model's text: Qwen3, SmolLM3 and DeepSeek-R1 write it between tags, before their answer."""

from collections.abc import Collection

TAGS = OPEN, CLOSE = "<think>", "</think>"


def reasons_after(prompt: str) -> bool | None:
    """Return True if a text that follows the prompt begins within reasoning, False if it has none because the prompt
    closes it, and None if it may begin with the opening tag."""
    end = prompt.rstrip()
    return True if end.endswith(OPEN) else False if end.endswith(CLOSE) else None


def certain_end(text: str, marks: Collection[str]) -> int:
    """Return the end of the part of a growing text that holds no beginning of a mark that further text may complete."""
    first, longest = {mark[:1] for mark in marks}, max(map(len, marks), default=0)
    starts = (i for i in range(max(0, len(text) - longest), len(text)) if text[i] in first)
    return next((i for i in starts if any(mark.startswith(text[i:]) for mark in marks)), len(text))


def parted(text: str, begins: bool | None, is_last: bool = False) -> tuple[str, str | None]:
    """Return the reasoning and the answer in a growing text, without the tags and the line ends after them. The answer
    is None where reasoning goes on, or may begin; text that may begin a tag is left out until `is_last`.

    begins: True if the text begins within reasoning, None if it may begin with some.
    """
    if begins is None:
        begun = text.lstrip()
        if len(begun) < len(OPEN) and OPEN.startswith(begun) and not is_last:
            return "", None
        begins, text = begun.startswith(OPEN), begun.removeprefix(OPEN) if begun.startswith(OPEN) else text
    if not begins:
        return "", text
    reasoning, closed, answer = text.partition(CLOSE)
    if not (closed or is_last):
        reasoning = reasoning[: certain_end(reasoning, [CLOSE])]
    return reasoning.lstrip("\n"), answer.lstrip("\n") if closed or is_last else None
