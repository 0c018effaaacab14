"""Reasoning in a model's text: Qwen3, SmolLM3 and DeepSeek-R1 write it between tags, before their answer."""

TAGS = OPEN, CLOSE = "<think>", "</think>"


def reasons_after(prompt: str) -> bool | None:
    """Return True if a text that follows the prompt begins within reasoning, False if it has none because the prompt
    closes it, and None if it may begin with the opening tag."""
    end = prompt.rstrip()
    return True if end.endswith(OPEN) else False if end.endswith(CLOSE) else None


class ReasoningParser:
    """Separates reasoning from the answer in a growing text, without the tags and the line ends after them.

    is_open: True within reasoning, None where it may begin, False within an answer."""

    def __init__(self, is_open: bool | None = False) -> None:
        self.is_open, self._held, self._skips_line_ends = is_open, "", is_open is True

    def add(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Return what the text adds to the reasoning and to the answer. Text that may begin a tag waits for more, until
        `is_last`."""
        self._held += text
        if self.is_open is None and not self._begin(is_last):
            return "", ""
        reasoning = ""
        if self.is_open:
            reasoning, closed, rest = self._held.partition(CLOSE)
            if not closed:
                starts = range(len(reasoning) if is_last else max(0, len(reasoning) - len(CLOSE)), len(reasoning))
                cut = next((i for i in starts if CLOSE.startswith(reasoning[i:])), len(reasoning))
                reasoning, self._held = reasoning[:cut], reasoning[cut:]
                return self._stripped(reasoning), ""
            reasoning = self._stripped(reasoning)
            self.is_open, self._held, self._skips_line_ends = False, rest, True
        answer, self._held = self._held, ""
        return reasoning, self._stripped(answer)

    def _begin(self, is_last: bool) -> bool:
        """Return whether the text has enough characters to tell if it begins with reasoning."""
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self.is_open, self._held, self._skips_line_ends = True, begun.removeprefix(OPEN), True
        elif is_last or not OPEN.startswith(begun):
            self.is_open = False
        return self.is_open is not None

    def _stripped(self, text: str) -> str:
        if self._skips_line_ends:
            text = text.lstrip("\n")
            self._skips_line_ends = not text
        return text
