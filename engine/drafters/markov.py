"""Markov: drafts the tokens that most often followed the last few tokens in other texts, by an `NGramTable`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.errors import DataError, refuse
from common.jsonl import parse_json
from engine.drafters.base import RowUpdate
from engine.drafters.config import BuildInputs
from engine.drafters.text_drafter import Guess, HostDrafter, HostDrafterConfig
from engine.runner import ModelRunner
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


class Markov(HostDrafter):
    """Guesses by a fixed table. In rejection mode it must not hold texts that the requests' random numbers drew."""

    def __init__(self, runner: ModelRunner, gamma: int, table: NGramTable) -> None:
        super().__init__(runner, gamma)
        self._table = table

    def continued(self, update: RowUpdate) -> Guess:
        return self._table.continued(update.tokens, self.gamma)


@dataclass(frozen=True, kw_only=True)
class MarkovConfig(HostDrafterConfig):
    """The tokens that most often followed the last tokens in other texts."""

    name: ClassVar[str] = "markov"
    markov_table: str

    def check(self) -> None:
        super().check()
        if not Path(self.markov_table).is_file():
            what, fix = "there is no table to draft from", "make one: python -m reproduce.markov_table"
            refuse("markov_table", self.markov_table, "a file of n-grams", what, fix)

    def build(self, inputs: BuildInputs, gamma: int) -> Markov:
        return Markov(inputs.runner, gamma, NGramTable.load(Path(self.markov_table), inputs.runner.vocab_size))
