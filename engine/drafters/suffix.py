"""Suffix: drafts the tokens that followed the longest suffix of a row's text where it occurred before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

from common.errors import refuse, require_at_least
from engine.drafters.base import RowUpdate
from engine.drafters.config import BuildInputs, Trait
from engine.drafters.ngram_table import NGramTable
from engine.drafters.text_drafter import Guess, HostDrafter, HostDrafterConfig
from engine.runner import ModelRunner

# The number of suffixes ending at a token whose last end is recorded.
N_RECORDED = 16
# Prompts whose answers are kept, and tokens of the longest context in these (the default of --text_match).
N_PROMPTS, ORDER = 32, 8


@dataclass(eq=False, slots=True)
class _State:
    """Substrings that end at the same positions; the longest has `length` tokens.

    first, end: the text's length where they first and last ended. link: the state of the longest suffix that ends
    elsewhere, too. following: states by the next token.
    """

    length: int = 0
    first: int = 0
    end: int = 0
    link: _State | None = None
    following: dict[int, _State] = field(default_factory=dict)


class SuffixAutomaton:
    """All substrings of a text that grows after `begin` (Blumer et al. 1985), in O(1) a token, amortised.

    repeated: the length of the text's longest suffix that occurs in it before, and the text's length where that last
    ended, or earlier if more suffixes than N_RECORDED end with it; 0 and 0 if no suffix occurs before. first: the
    text's length where it first ended.
    """

    def __init__(self, begin: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self.repeated, self.first = (0, 0), 0
        self._root = self._last = _State()
        for token in begin:
            self.append(token)
        self.n_begin = len(self.text)

    def append(self, token: int) -> None:
        self.text.append(token)
        self._last = self._added(token, self._last)
        state = self._last.link or self._root
        self.repeated, self.first = (state.length, state.end), state.first
        for _ in range(N_RECORDED):
            if state.link is None:
                break
            state.end, state = len(self.text), state.link

    def _added(self, token: int, state: _State | None) -> _State:
        whole = _State(len(self.text), len(self.text), len(self.text), self._root)
        while state and token not in state.following:
            state.following[token], state = whole, state.link
        if state is None:
            return whole
        found = state.following[token]
        if found.length > state.length + 1:  # its shorter substrings end here, too: they get a new state
            longer, found = found, _State(state.length + 1, found.first, found.end, found.link, dict(found.following))
            longer.link = found
            while state and state.following.get(token) is longer:
                state.following[token], state = found, state.link
        whole.link = found
        return whole


class AnswerTable(NGramTable):
    """Counts of the tokens in answers to a prompt; beyond `size` contexts, the older half is dropped. drawn: the random
    numbers (`Request.noise_key`) that drew any of the answers."""

    def __init__(self, size: int) -> None:
        super().__init__(ORDER)
        self.drawn, self._size = set[tuple[int, int]](), size

    def learn(self, text: Sequence[int], known: int = 0) -> None:
        super().learn(text, known)
        if len(self._followers) > self._size:
            n_old = len(self._followers) - self._size // 2
            self._followers = dict(islice(self._followers.items(), n_old, None))


class Suffix(HostDrafter):
    """Copies from where the suffix occurred last; at the end of the text, the copy begins again.

    The request's prediction, or else `text`, stands before the row's text; it is preferred if the suffix occurs in it,
    too. In rejection mode neither may depend on the request's random numbers.

    keep_answers: the most contexts that are kept of the answers to each of the N_PROMPTS latest prompts, also while
    they grow (after arXiv 2411.04975). A guess by the answers to a row's prompt is preferred to a shorter match. In
    rejection mode a guess must not depend on texts that the row's random numbers drew, before or in another row. So
    only the first request of a prompt, seed and id shares them. Texts of other requests are independent of its numbers,
    but its guesses depend on them: a seed keeps the distribution of the tokens in that mode, not the tokens.
    """

    def __init__(self, runner: ModelRunner, gamma: int, text: Sequence[int] = (), keep_answers: int = 0) -> None:
        super().__init__(runner, gamma)
        self._rows: dict[int, SuffixAutomaton] = {}
        self._text, self._size = text, keep_answers
        self._kept = dict[int, AnswerTable]()  # by the hash of a prompt
        self._answers: dict[int, tuple[AnswerTable, int]] = {}  # by row, with the number of its tokens that were learnt

    def continued(self, update: RowUpdate) -> Guess:
        copied, kept = self._copied(update), self._by_answers(update) if self._size else Guess()
        return kept if kept.n_matched >= copied.n_matched and not copied.is_predicted else copied

    def _by_answers(self, update: RowUpdate) -> Guess:
        if update.n_seen == 0:
            n_prompt, key = update.verified.start or len(update.tokens), update.noise_key
            prompt = hash(tuple(update.tokens[:n_prompt]))
            table = self._kept.pop(prompt, None)
            # A row keeps the table that it began with; new requests get a table that knows no drawn numbers yet.
            if table is None or len(table.drawn) >= self._size:
                table = AnswerTable(self._size)
            self._kept[prompt] = table
            if len(self._kept) > N_PROMPTS:
                del self._kept[next(iter(self._kept))]
            if key is not None and (key in table.drawn or update.verified):
                table = AnswerTable(self._size)  # of this row alone
            table.drawn |= {key} if key else set()
            self._answers[update.row] = table, n_prompt
        table, n_learnt = self._answers[update.row]
        table.learn(update.tokens, n_learnt)
        self._answers[update.row] = table, len(update.tokens)
        return table.continued(update.tokens, self.gamma)

    def _copied(self, update: RowUpdate) -> Guess:
        if update.n_seen == 0:
            before = update.prediction or self._text
            self._rows[update.row] = SuffixAutomaton(token for token in before if 0 <= token < self._n_ids)
        known = self._rows[update.row]
        for token in update.tokens[len(known.text) - known.n_begin :]:
            known.append(token)
        (n_matched, end), n_text = known.repeated, len(known.text)
        if n_matched and known.first < known.n_begin:
            copied = known.text[known.first : min(known.n_begin, known.first + self.gamma)]
            return Guess(copied, n_matched, is_predicted=bool(update.prediction))
        return Guess([known.text[end + i % (n_text - end)] for i in range(self.gamma)] if n_matched else (), n_matched)


@dataclass(frozen=True, kw_only=True)
class SuffixConfig(HostDrafterConfig):
    """Copies from the row's text, after the longest match of any length."""

    name: ClassVar[str] = "suffix"
    draft_text: str | None = None
    keep_answers: int = 0

    @property
    def traits(self) -> Trait:
        return Trait.READS_PREDICTIONS | (Trait.SHARES_TEXTS if self.keep_answers else Trait.NONE)

    def check(self) -> None:
        super().check()
        require_at_least("keep_answers", self.keep_answers, 0)
        if self.draft_text is not None and not Path(self.draft_text).is_file():
            refuse("draft_text", self.draft_text, "a file of text", "no text to draft from", "correct its name")

    def build(self, inputs: BuildInputs, gamma: int) -> Suffix:
        text = Path(self.draft_text).read_text("utf-8-sig", "replace") if self.draft_text else ""
        tokens = inputs.tokenizer.encode(text, add_bos=False) if text and inputs.tokenizer else ()
        return Suffix(inputs.runner, gamma, tokens, self.keep_answers)
