"""Text to token ids and back, with a checkpoint's tokenizer.json or tokenizer.model."""

import re
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from tokenizers import Tokenizer as Backend

from common.errors import refuse_checkpoint

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


class JsonTokenizer:
    """A Hugging Face tokenizer.json; its post-processor adds BOS."""

    def __init__(self, path: Path) -> None:
        self._backend = Backend.from_file(str(path))
        self._backend.no_padding()
        self._backend.no_truncation()

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Return token ids, after BOS if `add_bos` and if the model's tokenizer has one."""
        # The fast form makes no offsets into the text, which for a book take more memory than the ids.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_bos)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without control tokens and ids that have no token."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def pieces(self) -> list[str | None]:
        """Return each id's token as the tokenizer's file writes it; None for an id without a token."""
        n_ids = max(self._backend.get_vocab().values()) + 1
        return [self._backend.id_to_token(index) for index in range(n_ids)]

    def definition(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return self._backend.to_str()

    def control_tokens(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: index for index, token in added if token.special}

    def encode_chat(self, text: str, control: bool) -> list[int]:
        """Return token ids without BOS. control: the text of a control token becomes that token, not plain text."""
        self._backend.encode_special_tokens = not control
        try:
            return self.encode(text, add_bos=False)
        finally:
            self._backend.encode_special_tokens = False


class SentencePieceTokenizer:
    """A SentencePiece tokenizer.model (Llama 2, Mistral) with JsonTokenizer's methods."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._backend = SentencePieceProcessor(model_file=str(path))

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        return self._backend.encode(text, add_bos=add_bos and self._backend.bos_id() >= 0)

    def decode(self, ids: Sequence[int]) -> str:
        n_tokens = self._backend.vocab_size()
        return str(self._backend.decode([index for index in ids if index < n_tokens]))

    def pieces(self) -> list[str | None]:
        return [self._backend.id_to_piece(index) for index in range(self._backend.vocab_size())]

    def control_tokens(self) -> dict[str, int]:
        ids = range(self._backend.vocab_size())
        return {self._backend.id_to_piece(index): index for index in ids if self._backend.is_control(index)}

    def encode_chat(self, text: str, control: bool) -> list[int]:
        ids = self.control_tokens() if control else {}
        parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
        encoded = ([ids[part]] if part in ids else self.encode(part, add_bos=False) for part in parts if part)
        return [*chain.from_iterable(encoded)]


Tokenizer: TypeAlias = JsonTokenizer | SentencePieceTokenizer


def load_tokenizer(checkpoint_dir: str | Path, names: Collection[str] = TOKENIZER_FILES) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder from a file among `names`, tokenizer.json if both are there. Raises
    CheckpointError if it is missing or damaged."""
    paths = (Path(checkpoint_dir) / name for name in TOKENIZER_FILES if name in names)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        refuse_checkpoint(Path(checkpoint_dir), "no tokenizer", f"a folder with {' or '.join(TOKENIZER_FILES)}")
    backend = JsonTokenizer if path.suffix == ".json" else SentencePieceTokenizer
    try:
        return backend(path)
    except Exception as error:  # both libraries raise plain Exception or RuntimeError on bad files
        required = "a tokenizer.json of Hugging Face, or a SentencePiece tokenizer.model"
        refuse_checkpoint(path, str(error)[:200], required)
