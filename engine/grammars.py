"""Grammars: which tokens may continue an answer, by the library llguidance (optional: requirements-grammar.txt)."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from common.errors import CheckpointError, ConfigError
from models.checkpoints.tokenizer import JsonTokenizer, Tokenizer

# JSON as Python's json.dumps writes it. With free whitespace no token would be certain, and some models never stop.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarSpec(NamedTuple):
    """The text of a grammar: a JSON schema, a regular expression of Rust, or llguidance's Lark."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Grammar:
    """The state of a grammar behind the tokens of an answer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, such as a limit of the library; empty if it can."""
        return " ".join(self._matcher.get_error().partition("<state>")[0].split())

    def advance(self, tokens: Sequence[int]) -> None:
        """Move behind tokens of the answer. Behind an end token, further ones change nothing."""
        for token in tokens:
            if self._matcher.stop_reason() != "EndOfSentence":
                self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Return the tokens that follow in any case, as the tokenizer would split their text."""
        return self._matcher.compute_ff_tokens()

    def fill(self, masks: Tensor, drafts: Sequence[int]) -> None:
        """Set the bits of `masks [T, n_bytes]` uint8, on the host, where mask i is of the tokens that may follow i
        drafts. Masks behind a draft that the grammar excludes stay as they are: verification rejects that draft."""
        ahead = self._matcher.deep_copy()  # microseconds; an error behind a draft that is rejected goes with it
        for mask, draft in zip_longest(masks, drafts[: len(masks) - 1]):
            ahead.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
            if draft is None or not ahead.try_consume_tokens([draft]):
                return


class Grammars:
    """Starts grammars over the tokens of a model with `n_ids` ids, whose answers end with one of `ends`. Errors:
    ConfigError without the library; CheckpointError for a SentencePiece tokenizer."""

    def __init__(self, tokenizer: Tokenizer, n_ids: int, ends: Collection[int]) -> None:
        try:
            import llguidance
        except ImportError:
            what, fix = "grammars need the package llguidance", "pip install -r requirements-grammar.txt"
            raise ConfigError(what, "this Python", f"not installed: {fix}", "llguidance", fix) from None
        if not isinstance(tokenizer, JsonTokenizer):
            what, fix = "grammars need a tokenizer.json", "add the model's tokenizer.json to the checkpoint"
            raise CheckpointError(what, "the checkpoint", "a SentencePiece tokenizer.model", "tokenizer.json", fix)
        self._matcher = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(tokenizer.definition(), n_ids, [*ends])

    def start(self, spec: GrammarSpec) -> Grammar:
        """Return the grammar at the beginning of an answer. Errors: ConfigError with what the library says."""
        if spec.kind == "json_schema":
            text = self._matcher.grammar_from_json_schema(spec.text, overrides=JSON_FORM)
        else:
            text = getattr(self._matcher, f"grammar_from_{spec.kind}")(spec.text)
        grammar = Grammar(self._matcher(self._tokenizer, text, log_level=0))
        if grammar.error:
            fix = "correct it, or write it in the parts that llguidance has"
            raise ConfigError("a grammar cannot be used", spec.kind, grammar.error, "a grammar of llguidance", fix)
        return grammar


class Masks:
    """The tokens that may follow the rows of a batch and their drafts, as bits in tensors that stay in place.

    grammars: of each row, or None for a row without. applies: False while drafts are drawn that the masks do not follow.
    """

    applies = True

    def __init__(self, n_rows: int, n_positions: int, n_ids: int, device: str | torch.device) -> None:
        n_bytes = -(-n_ids // 32) * 4  # llguidance fills words of 32 bits
        self._host = torch.full((n_rows, n_positions, n_bytes), 255, dtype=torch.uint8)
        self._masks = self._host.to(device)
        self._bits = 2 ** torch.arange(8, dtype=torch.uint8, device=device)
        self.grammars: Sequence[Grammar | None] = [None] * n_rows

    def first(self, n: int) -> Masks:
        """Return the masks of the first n rows, in the same tensors."""
        fewer = copy.copy(self)
        fewer._host, fewer._masks = self._host[:n], self._masks[:n]
        return fewer

    def fill(self, drafts: Sequence[Sequence[int]]) -> None:
        """Set the masks behind each row's text and drafts."""
        self._host.fill_(255)
        for masks, grammar, of_row in zip(self._host, self.grammars, drafts, strict=True):
            if grammar is not None:
                grammar.fill(masks, of_row)
        self._masks.copy_(self._host)

    def masked(self, logits: Tensor, start: int) -> Tensor:
        """Return `logits [B, T, V]` with -inf where a token may not follow `start`, `start` + 1, ... drafts."""
        if not self.applies:
            return logits
        masks = self._masks[:, start : start + logits.shape[1], :, None]
        excluded = ((masks & self._bits) == 0).flatten(2)[..., : logits.shape[-1]]
        return logits.masked_fill(excluded, -math.inf)


class MaskedDraws:
    """Draws by a verification, with masks that follow the drafts; these are read from the device."""

    def __init__(self, verification: Any, masks: Masks) -> None:
        self._verification, self._masks, self._drafts = verification, masks, list[Tensor]()

    def draw(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        if i > 0:
            self._masks.fill(torch.stack(self._drafts, dim=1).tolist())
        token, probs = self._verification.draw(logits, i)
        self._drafts.append(token)
        return token, probs
