"""NGramCache: drafts by n-grams of all prompts and answers so far, which all rows share and a file keeps."""

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.errors import DataError, UserError, require_at_least
from common.jsonl import require_appendable
from common.process import LEADER
from common.say import say
from engine.drafters.base import RowUpdate
from engine.drafters.config import BuildInputs, Trait
from engine.drafters.markov import NGramTable
from engine.drafters.text_drafter import Guess, HostDrafter, HostDrafterConfig
from engine.runner import ModelRunner


class NGramCache(HostDrafter):
    """Guesses by all prompts and answers of all rows. path: a file that is loaded if it exists, and saved when the
    drafter is freed or the program ends; a file that cannot be used is noted, and left as it is.

    In rejection mode a guess must not depend on a row's random numbers, and so not on texts that these drew before, or
    draw in another row. So only the first request of a seed and id learns and drafts. Texts of other requests are
    independent of its numbers, but its guesses depend on them: a seed keeps the distribution of the tokens in that
    mode, not the tokens. Errors: ConfigError if max_ngram is below 1.
    """

    def __init__(
        self, runner: ModelRunner, gamma: int, max_ngram: int = 3, size: int = 1 << 18, path: Path | None = None
    ) -> None:
        super().__init__(runner, gamma)
        require_at_least("max_ngram", max_ngram, 1)
        self._size, self._table = size, NGramTable(max_ngram, size)
        # The number of learnt tokens of each row; None where it may not learn.
        self._learnt: dict[int, int | None] = {}
        if path is not None and self._ranks.leads:
            try:
                if path.is_file() and path.stat().st_size:
                    self._table = NGramTable.load(path, runner.vocab_size, size)
                    self._table.order = max_ngram
            except DataError as error:  # the file may be another program's: it is not written either
                say(f"note: drafts begin without earlier n-grams, and the file stays as it is: {error}")
                return
            if self._ranks.first == LEADER:  # only one replica saves
                weakref.finalize(self, _save, self._table, path, runner.vocab_size)

    def continued(self, update: RowUpdate) -> Guess:
        drawn = self._table.drawn
        if update.n_seen == 0:
            if len(drawn) >= self._size:
                self._table.forget()
                self._learnt = dict.fromkeys(self._learnt)
            self._learnt[update.row] = None if update.noise_key in drawn else 0
            if update.noise_key is not None:
                drawn.add(update.noise_key)
        if (learnt := self._learnt[update.row]) is None:
            return Guess()
        self._table.learn(update.tokens, learnt)
        self._learnt[update.row] = len(update.tokens)
        return self._table.continued(update.tokens, self.gamma)


def _save(table: NGramTable, path: Path, vocab_size: int) -> None:
    try:
        table.save(path, vocab_size)
    except UserError as error:  # a finalizer has no caller
        say(f"note: {error}")


@dataclass(frozen=True, kw_only=True)
class NGramCacheConfig(HostDrafterConfig):
    """The tokens that most often followed the last tokens in any row so far."""

    name: ClassVar[str] = "cache"
    max_ngram: int = 3
    ngram_cache: str | None = None
    ngram_cache_size: int = 1 << 18

    @property
    def traits(self) -> Trait:
        return Trait.SHARES_TEXTS | (Trait.SAVES_TEXTS if self.ngram_cache else Trait.NONE)

    @property
    def longest_match(self) -> int:
        return self.max_ngram

    def check(self) -> None:
        super().check()
        require_at_least("max_ngram", self.max_ngram, 1)
        require_at_least("ngram_cache_size", self.ngram_cache_size, 1)
        require_appendable(self.ngram_cache, "ngram_cache")

    def build(self, inputs: BuildInputs, gamma: int) -> NGramCache:
        path = Path(self.ngram_cache) if self.ngram_cache else None
        return NGramCache(inputs.runner, gamma, self.max_ngram, self.ngram_cache_size, path)
