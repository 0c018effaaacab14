"""Markov: drafts what has most often followed the last few tokens in texts that were counted beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from common.errors import ConfigError, flag
from engine.drafters.base import Guess, HostDrafter, Shown
from engine.drafters.config import HostDrafterConfig, Parts
from engine.drafters.ngram_table import NGramTable

if TYPE_CHECKING:
    from engine.runner import ModelRunner


class Markov(HostDrafter):
    """Its table stays as it is; a row whose random numbers drew any of its texts has no drafts (see `NGramCache`).
    Errors: ConfigError if gamma is negative.
    """

    def __init__(self, runner: ModelRunner, gamma: int, table: NGramTable) -> None:
        super().__init__(runner, gamma)
        self._table = table

    def continued(self, shown: Shown) -> Guess:
        return Guess() if shown.draws in self._table.drawn else self._table.continued(shown.text, self.gamma)


@dataclass(frozen=True, kw_only=True)
class MarkovConfig(HostDrafterConfig):
    """What most often followed the last tokens in other texts."""

    name: ClassVar[str] = "markov"
    needs_option: ClassVar[str | None] = "markov_table"
    markov_table: str | None = None
    """what reproduce/markov_table.py counted, or a file of --ngram_cache"""

    def check(self) -> None:
        super().check()
        if self.markov_table is None or not Path(self.markov_table).is_file():
            seen, fix = self.markov_table or "not given", "make one: python reproduce/markov_table.py"
            raise ConfigError("there is no table to draft from", flag("markov_table"), seen, "a file of n-grams", fix)

    def build(self, parts: Parts) -> Markov:
        return Markov(parts.runner, parts.gamma, NGramTable.load(Path(str(self.markov_table)), parts.runner.vocab_size))
