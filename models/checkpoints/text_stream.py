"""Decode a growing list of token ids to whole characters: a character may be spread over several tokens."""

from collections.abc import Sequence

from models.checkpoints.tokenizer import Tokenizer

# After this many tokens without a complete end, the certain part of their text is returned: it may never be complete.
MOST_PENDING = 16
# Bytes of a character, and so tokens, at most; an incomplete character is in the last three tokens.
LONGEST_CHARACTER = 4
INCOMPLETE = LONGEST_CHARACTER - 1


class TextStream:
    """The text of a row's new tokens. Each token is decoded together with the tokens before it, because some tokenizers
    drop a space at the beginning of a text. before: tokens that the text continues, which end a character."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._done = list(before)
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the characters that this token completes; none while the last character is incomplete."""
        self._pending.append(token)
        text, n_done = self.rest(), len(self._pending)
        if not text or text.endswith("\ufffd"):
            if n_done < MOST_PENDING:
                return ""
            text, n_done = self._certain(text)
        self._done, self._pending = self._pending[:n_done] if text else self._done, self._pending[n_done:]
        return text

    def rest(self) -> str:
        """Return the text of tokens whose last character is incomplete."""
        return self._text(self._pending)

    def _certain(self, text: str) -> tuple[str, int]:
        """Return the beginning of `text` that no further token can change, and its number of tokens."""
        parts = ((self._text(self._pending[:n]), n) for n in range(len(self._pending) - INCOMPLETE, 0, -1))
        return next(((part, n) for part, n in parts if text.startswith(part)), (text, len(self._pending)))

    def _text(self, pending: list[int]) -> str:
        return self._tokenizer.decode([*self._done, *pending])[len(self._tokenizer.decode(self._done)) :]
