"""Token ids -> text as it grows, in whole characters: one may be spread over several tokens."""

from models.checkpoints.tokenizer import Tokenizer


class TextStream:
    """The text of a row's new tokens. A few tokens before each one are decoded with it: some tokenizers drop a space
    at the beginning of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The characters that this token completes; none while the last of them is incomplete."""
        self._held.append(token)
        text = self.rest()
        if not text or text.endswith("\ufffd"):
            return ""
        self._shown, self._held = self._held, []
        return text

    def rest(self) -> str:
        """What waits for tokens that do not come."""
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._held])[len(before) :]
