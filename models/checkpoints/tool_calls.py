"""Calls of tools in a model's text, as models of Hermes, Qwen and Llama 3 write them."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field

# What stands before a call. Llama 3 also begins an answer with a call's JSON, and puts `;` between several.
MARKS = ("<tool_call>", "<|python_tag|>")
MARK = re.compile(rf"({'|'.join(map(re.escape, MARKS))})\s*")
JSON, CLOSING = re.compile(r"[\s;]*(?=\{)"), re.compile(r"\s*(</tool_call>\s*)?")
DECODER = json.JSONDecoder(strict=False)  # models write line ends in texts as they are


@dataclass
class ToolCallParser:
    """Separates calls from the rest of a growing text. names: tools; a call of another tool is text. most: calls beyond
    that many are dropped. found: the calls, once the text has ended, each with `name` and `arguments` in JSON."""

    names: Collection[str] = ()
    most: int | None = None
    found: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._text, self._n_sent = "", 0

    def add(self, text: str, is_last: bool = False) -> str:
        """Return the text that is no part of a call. Text from the first mark on waits until `is_last`, and so does
        text that may begin a mark."""
        if not self.names:
            return text
        self._text += text
        if is_last:
            rest, calls = parse(self._text, self.names)
            self.found = calls[: self.most]
        elif self._n_sent == 0 and self._text.lstrip()[:1] in ("", "{"):
            rest = ""
        else:
            starts, known = range(self._n_sent, len(self._text)), self._text
            cut = (i for i in starts if any(mark.startswith(known[i : i + len(mark)]) for mark in MARKS))
            rest = known[: next(cut, len(known))]
        sent, self._n_sent = rest[self._n_sent :], len(rest)
        return sent


def parse(text: str, names: Collection[str]) -> tuple[str, list[dict[str, str]]]:
    """Return a text without its calls of tools, and the calls. What does not parse as a call stays in the text."""
    rest, calls, at, mark = "", list[dict[str, str]](), 0, JSON.match(text)
    while mark := mark or MARK.search(text, at):
        if found := _call_at(text, mark.end(), names):
            rest, at = rest + text[at : mark.start()], found[1]
            calls.append(found[0])
            mark = JSON.match(text, at)
        else:
            rest, at, mark = rest + text[at : mark.end()], mark.end(), None
    return rest + text[at:], calls


def _call_at(text: str, at: int, names: Collection[str]) -> tuple[dict[str, str], int] | None:
    """Return the call at a place in a text, and the place after it; None if there is none."""
    try:
        value, end = DECODER.raw_decode(text, at)
        name, arguments = value["name"], value["arguments" if "arguments" in value else "parameters"]
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # refuses half a character
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if name not in names or not isinstance(arguments, dict):
        return None
    closing = CLOSING.match(text, end)
    return {"name": name, "arguments": written}, closing.end() if closing else end
