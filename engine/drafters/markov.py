"""Markov: drafts the tokens that most often followed the last few tokens in other texts, by an `NGramTable`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.errors import refuse
from engine.drafters.base import RowUpdate
from engine.drafters.config import BuildInputs
from engine.drafters.ngram_table import NGramTable
from engine.drafters.text_drafter import Guess, HostDrafter, HostDrafterConfig
from engine.runner import ModelRunner


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
