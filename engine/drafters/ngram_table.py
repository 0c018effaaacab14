"""NGramTable: counts of the tokens that followed contexts of a few tokens, and guesses by them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from common.errors import DataError
from common.jsonl import parse_json
from engine.drafters.text_drafter import Guess
from models.checkpoints.manifest import atomic_path

VERSION = 2


class NGramTable:
    """Counts of the tokens that followed contexts of 1 to `order` tokens."""

    def __init__(self, order: int) -> None:
        self.order = order
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}

    def learn(self, text: Sequence[int], known: int = 0) -> None:
        """Count the tokens of a text after the first `known`, which were counted before."""
        for end in range(known, len(text)):
            for start in range(max(0, end - self.order), end):
                counts = self._followers.setdefault(tuple(text[start:end]), {})
                counts[text[end]] = counts.pop(text[end], 0) + 1  # the latest comes last

    def continued(self, text: Sequence[int], n_tokens: int) -> Guess:
        """Guess, token by token, the most frequent follower of the longest known context; among equals the latest."""
        tokens: list[int] = []
        context, n_matched = tuple(text[-self.order :]), 0
        while len(tokens) < n_tokens:
            ends = (context[start:] for start in range(len(context)))
            if (known := next((end for end in ends if self._followers.get(end)), None)) is None:
                break
            counts, n_matched = self._followers[known], n_matched or len(known)
            tokens.append(max(reversed(counts), key=counts.__getitem__))
            context = (*context, tokens[-1])[-self.order :]
        return Guess(tokens, n_matched)

    def save(self, path: Path, vocab_size: int) -> None:
        """Write the table to a file. Errors: CheckpointError if it cannot be written."""
        grams = [[*context, [*pair]] for context, counts in self._followers.items() for pair in counts.items()]
        content = {"version": VERSION, "vocab_size": vocab_size, "order": self.order}
        with atomic_path(path) as partial:
            partial.write_text(json.dumps(content | {"grams": grams}))

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> NGramTable:
        """Read a table. Errors: DataError for a file that `save` did not write, or for another vocabulary."""
        required = f"n-grams of version {VERSION}, of a vocabulary of {vocab_size} ids"
        try:
            content = parse_json(path.read_bytes())
            if (content["version"], content["vocab_size"]) != (VERSION, vocab_size):
                raise ValueError(f"version {content['version']}, {content['vocab_size']} ids")
            table = cls(int(content["order"]))
            for *context, (token, count) in content["grams"]:
                if not all(0 <= int(part) < vocab_size for part in (*context, token)):
                    raise ValueError(f"token ids {[*context, token]}")
                table._followers.setdefault(tuple(context), {})[token] = int(count)
            return table
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            fix = "replace the file: reproduce/markov_table.py makes one"
            raise DataError("a file of n-grams cannot be used", path, repr(error), required, fix) from None
