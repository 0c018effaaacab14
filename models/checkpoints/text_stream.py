"""Decode token ids to text as it grows, in whole characters: a character may be spread over several tokens."""

from models.checkpoints.tokenizer import Tokenizer

# Tokens without a complete end after which the certain part of their text is shown, or they would be kept for ever.
MOST_HELD = 16
# A character has at most four bytes: an incomplete one is in the last three tokens.
INCOMPLETE = 3


class TextStream:
    """Text of a row's new tokens. A few tokens before each new one are decoded with it: some tokenizers drop a space at
    the beginning of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """Return the characters that this token completes; none while the last of them is incomplete."""
        self._held.append(token)
        text, n_shown = self.rest(), len(self._held)
        if not text or text.endswith("\ufffd"):
            if n_shown < MOST_HELD:
                return ""
            text, n_shown = self._certain(text)
        self._shown, self._held = self._held[:n_shown] if text else self._shown, self._held[n_shown:]
        return text

    def rest(self) -> str:
        """Return the text of tokens that wait for more."""
        return self._text(self._held)

    def _certain(self, text: str) -> tuple[str, int]:
        """Return the beginning of `text` that no further token can change, and its number of tokens."""
        parts = ((self._text(self._held[:n]), n) for n in range(len(self._held) - INCOMPLETE, 0, -1))
        return next(((part, n) for part, n in parts if text.startswith(part)), (text, len(self._held)))

    def _text(self, held: list[int]) -> str:
        return self._tokenizer.decode([*self._shown, *held])[len(self._tokenizer.decode(self._shown)) :]
