"""Stop strings: where a text that grows ends, however it is cut into pieces."""

from collections.abc import Sequence


class Stops:
    """keeps: whether a text ends behind its stop string, or before it; then what may become one is held back."""

    def __init__(self, stops: Sequence[str], keeps: bool) -> None:
        self._stops, self._keeps = stops, keeps
        self._longest = max(map(len, stops), default=0)
        # The end of the text, if a stop string may have begun in it.
        self._tail = ""

    def add(self, text: str) -> tuple[str, bool]:
        """What can be shown, and whether the text has ended: by the first whole stop string, of several the longest."""
        n_shown, text = len(self._tail) if self._keeps else 0, self._tail + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._tail = ""
            return text[n_shown : end if self._keeps else start], True
        begins = range(max(0, len(text) - self._longest + 1), len(text))
        at = next((i for i in begins if any(stop.startswith(text[i:]) for stop in self._stops)), len(text))
        self._tail = text[at:]
        return text[n_shown:] if self._keeps else text[:at], False

    def rest(self) -> str:
        """What was held back, of a text that has ended otherwise."""
        held, self._tail = "" if self._keeps else self._tail, ""
        return held
