"""Calls of tools in a model's text, as models of Hermes, Qwen and Llama 3 write them."""

import json
import re
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

# What stands before a call. Llama 3 also begins an answer with a call's JSON, and puts `;` between several.
MARKS = ("<tool_call>", "<|python_tag|>")
MARK = re.compile(rf"({'|'.join(map(re.escape, MARKS))})\s*")
JSON, CLOSING = re.compile(r"[\s;]*(?=\{)"), re.compile(r"\A\s*(</tool_call>\s*)?")
DECODER = json.JSONDecoder(strict=False)  # models write line ends in texts as they are
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
# What may stand between calls, a call up to its arguments, and pieces of JSON outside of strings and in them.
NEXT = re.compile(r"\s*(</tool_call>\s*)?[\s;]*(?=\{)")
HEAD = re.compile(r'\s*(\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*)\{')
OUTSIDE = re.compile(r'\s+|[][{}:,"]|[^][\s{}:,"]+(?=[][\s{}:,"])')
INSIDE = re.compile(r'"|[^"\\]+|\\(?:[^u]|u(?:[dD][89abAB]..\\u....|(?![dD][89abAB])....))', re.DOTALL)


@dataclass
class ToolCallParser:
    """Separates calls from the rest of a growing text. names: tools; a call of another tool is text. most: calls beyond
    that many are dropped. found: the calls, once the text has ended, each with `name` and `arguments` in JSON. parts:
    what the last text added to calls, as they are written if the name is first, also to text that proves to be no
    call."""

    names: Collection[str] = ()
    most: int | None = None
    found: list[dict[str, str]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._text, self._n_sent, self._n_begun, self._n_complete = "", 0, 0, 0
        self._coming = self._parts()

    def add(self, text: str, is_last: bool = False) -> str:
        """Return the text that is no part of a call. Text from the first mark on waits until `is_last`, and so does
        text that may begin a mark."""
        if not self.names:
            return text
        self._text += text
        self.parts = [*iter(lambda: next(self._coming, None), None)]
        if is_last:
            rest, calls = parse(self._text, self.names)
            self.found = calls[: self.most]
            for index, call in enumerate(self.found[self._n_complete :], start=self._n_begun):
                self.parts += [added(index, call["name"]), added(index, arguments=call["arguments"])]
        elif self._n_sent == 0 and self._text.lstrip()[:1] in ("", "{"):
            rest = ""
        else:
            starts, known = range(self._n_sent, len(self._text)), self._text
            cut = (i for i in starts if any(mark.startswith(known[i : i + len(mark)]) for mark in MARKS))
            rest = known[: next(cut, len(known))]
        sent, self._n_sent = rest[self._n_sent :], len(rest)
        return sent

    def _parts(self) -> Iterator[dict[str, Any] | None]:
        """Yield parts of calls, and None to wait for more text. Ends at what is no call by `parse`."""
        end = 0
        with suppress(ValueError):
            while (index := self._n_begun) != self.most:
                begins = NEXT if end else JSON
                while not (mark := begins.match(self._text, end) or MARK.search(self._text, max(end, self._n_sent))):
                    yield None
                while not (head := HEAD.match(self._text, mark.end())):  # for ever, where the name is not first
                    yield None
                if (name := DECODER.decode(head[2])) not in self.names:
                    return
                self._n_begun += 1
                yield added(index, name)
                for written in self._written(head.end(1)):
                    yield added(index, arguments=written) if written else None
                while not (call := _call_at(self._text, head.start(1), self.names)):
                    yield None
                self._n_complete, end = self._n_begun, call[1]

    def _written(self, at: int) -> Iterator[str]:
        """Yield a JSON object as json.dumps writes it, and "" to wait for more text. Errors: ValueError."""
        depth, is_inside, written = 0, False, ""
        while not written or depth:
            if not (piece := (INSIDE if is_inside else OUTSIDE).match(self._text, at)):
                yield written
                written = ""
                continue
            at, found = piece.end(), piece[0]
            if found == '"':
                is_inside = not is_inside
            elif is_inside:
                found = ENCODER.encode(DECODER.decode(f'"{found}"'))[1:-1]
            elif found in "[]{}:,":
                depth += (found in "[{") - (found in "]}")
                found += " " * (found in ":,")
            else:
                found = found.strip() and ENCODER.encode(DECODER.decode(found))
            found.encode()  # refuses half a character
            written += found
        yield written


def added(index: int, name: str = "", arguments: str = "") -> dict[str, Any]:
    """Return a part of a call as in a stream of OpenAI's: where it begins, its name, and then text of its arguments."""
    head = {"id": f"call_{uuid.uuid4().hex}", "type": "function"} if name else {}
    return {"index": index, **head, "function": ({"name": name} if name else {}) | {"arguments": arguments}}


def parse(text: str, names: Collection[str]) -> tuple[str, list[dict[str, str]]]:
    """Return a text without its calls of tools, and the calls. What does not parse as a call stays in the text."""
    rest, calls, at, mark = "", list[dict[str, str]](), 0, JSON.match(text)
    while mark := mark or MARK.search(text, at):
        if found := _call_at(text, mark.end(), names):
            rest, at = rest + text[at : mark.start()], len(text) - len(CLOSING.sub("", text[found[1] :]))
            calls.append(found[0])
            mark = JSON.match(text, at)
        else:
            rest, at, mark = rest + text[at : mark.end()], mark.end(), None
    return rest + text[at:], calls


def _call_at(text: str, at: int, names: Collection[str]) -> tuple[dict[str, str], int] | None:
    """Return the call at a place in a text, and the place after its JSON; None if there is none."""
    try:
        value, end = DECODER.raw_decode(text, at)
        name, arguments = value["name"], value["arguments" if "arguments" in value else "parameters"]
        written = ENCODER.encode(arguments)
        written.encode()  # refuses half a character
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if name not in names or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": written}, end
