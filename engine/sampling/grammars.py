"""Grammars: which tokens may continue an answer, by the library llguidance (optional: requirements-grammar.txt)."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from common.errors import refuse
from models.checkpoints.reasoning import CLOSE, OPEN
from models.checkpoints.tokenizer import JsonTokenizer, Tokenizer

# JSON as Python's json.dumps writes it. With free whitespace no token would be certain, and some models never stop.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# A tenth of the library's limit: the first mask of `(a{1000}){1000}` then takes 0.05 s instead of 1.5 s.
MOST_FUEL = 100_000


class Grammar:
    """The state of a grammar after the tokens of an answer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy())

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, such as a limit of the library; empty if it can."""
        return " ".join(self._matcher.get_error().partition("<state>")[0].split())

    def advance(self, tokens: Sequence[int]) -> None:
        """Move past tokens of the answer. After an end token, further ones change nothing."""
        for token in tokens:
            if self._matcher.stop_reason() != "EndOfSentence":
                self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Return the tokens of the text that follows in any case; the grammar may allow other splits of it."""
        return self._matcher.compute_ff_tokens()

    def fill(self, bits: Tensor, drafts: Sequence[int]) -> None:
        """Set in `bits [T, n_bytes]`, on the host, a bit for each token that may follow 0, 1, ... of T - 1 drafts.

        Masks after a draft that the grammar excludes, or after the end, stay as they are: verification stops before.
        """
        ahead = self._matcher.deep_copy()  # microseconds; an error after a draft that is rejected goes with it
        for mask, draft in zip_longest(bits, drafts):
            ahead.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
            if draft is None or not ahead.try_consume_tokens([draft]):
                return


class Grammars:
    """Starts grammars over the tokens of a model with `n_ids` ids, whose answers end with one of `ends`."""

    def __init__(self, tokenizer: Tokenizer, n_ids: int, ends: Collection[int]) -> None:
        what, fix = "a grammar needs llguidance and a tokenizer.json", "pip install -r requirements-grammar.txt"
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer
        except ImportError:
            refuse("this Python", f"no llguidance: {fix}", "llguidance", what, fix)
        if not isinstance(tokenizer, JsonTokenizer):
            refuse("the checkpoint", "a tokenizer.model", "a tokenizer.json", what, "add it")
        self._has_tags = CLOSE in tokenizer.pieces()
        self._matcher, self._tokenizer = LLMatcher, LLTokenizer(tokenizer.definition(), n_ids, [*ends])
        self._limits = LLParserLimits(initial_lexer_fuel=MOST_FUEL)

    def start(self, kind: str, text: str, reasons: bool | None = False) -> Grammar:
        """Return a grammar at the beginning of an answer. kind: "json_schema", "regex", or "lark" as llguidance has it.
        reasons: the answer follows reasoning, in which all text is allowed and which has begun (True), or which may
        begin (None). Errors: ConfigError with what the library says."""
        form = {"overrides": JSON_FORM} if kind == "json_schema" else {}
        try:
            made = getattr(self._matcher, f"grammar_from_{kind}")(text, **form)
            made = made if reasons is False else self._after_reasoning(made, has_begun=bool(reasons))
            matcher = self._matcher(self._tokenizer, made, log_level=0, limits=self._limits)
        except ValueError as error:
            matcher, why = None, str(error)
        if matcher is None or (why := Grammar(matcher).error):
            refuse("a grammar", why, "what it can use", f"llguidance cannot use the {kind}", "correct it")
        return Grammar(matcher)

    def _after_reasoning(self, made: str, has_begun: bool) -> str:
        """Return a grammar that continues reasoning, or else may begin with some, and then follows `made`."""
        if self._has_tags:  # to the library, tokens of this form have a name in place of a text
            begin, thought = OPEN, f"thought: /(?s:.*)/ {CLOSE} /\\n{{0,2}}/"
        else:
            begin, thought = f'"{OPEN}"', f'thought: free /\\n{{0,2}}/\nfree[suffix="{CLOSE}"]: /(?s:.*)/'
        lark = f"start: {'thought' if has_begun else f'({begin} thought)?'} @answer\n{thought}"
        (answer,) = json.loads(made)["grammars"] if made.startswith("{") else [{"lark_grammar": made}]
        return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]})


def call_grammar(tools: Mapping[str, Any], is_hermes: bool, has_tokens: bool = False) -> str:
    """Return the "lark" grammar of an answer that calls a tool, as Hermes and Qwen write calls, or else Llama 3. tools:
    the JSON schema of arguments by name. has_tokens: the tags around a call are tokens, as in Qwen's vocabulary."""
    name = "arguments" if is_hermes else "parameters"
    lines = []
    for i, (tool, schema) in enumerate(tools.items()):
        begin = json.dumps(f'{{"name": {json.dumps(tool)}, "{name}": ')
        # A schema of its own for each tool: references in it begin at its root.
        given = json.dumps((schema or {"type": "object"}) | {"x-guidance": JSON_FORM})
        lines += [f'call{i}: {begin} arguments{i} "}}"', f"arguments{i}: %json {given}"]
    calls = " | ".join(f"call{i}" for i in range(len(tools)))
    tags = [tag if has_tokens else f'"{tag}"' for tag in ("<tool_call>", "</tool_call>")]
    before, after = (f'{tags[0]} "\\n" ', f' "\\n" {tags[1]}') if is_hermes else ("", "")
    return "\n".join([f"start: {before}({calls}){after}", *lines])


class Masks:
    """The tokens that may follow the rows of a batch and their drafts.

    grammars: of each row, or None. applies: True once the masks of this round, or of its drafts so far, are set.
    """

    def __init__(self, n_rows: int, n_ids: int, device: str | torch.device) -> None:
        self.grammars: Sequence[Grammar | None] = ()
        self.applies, self._device = False, device
        self._n_rows, self._n_bytes = n_rows, -(-n_ids // 32) * 4  # llguidance fills words of 32 bits
        self._masks: dict[int, Tensor] = {}  # `[B, T, n_bytes]` by T: they stay in place, for captured rounds

    def fill(self, drafts: Sequence[Sequence[int]]) -> None:
        """Set the masks after each row's text and after each of its drafts."""
        n_positions = len(drafts[0]) + 1
        masks = torch.full((self._n_rows, n_positions, self._n_bytes), 255, dtype=torch.uint8)
        for bits, grammar, of_row in zip(masks, self.grammars, drafts, strict=False):
            if grammar is not None:
                grammar.fill(bits, of_row)
        if n_positions not in self._masks:
            self._masks[n_positions] = masks.to(self._device)
        self._current = self._masks[n_positions].copy_(masks)
        self.applies = True

    def masked(self, logits: Tensor, start: int) -> Tensor:
        """Return `logits [B, T, V]` with -inf where a token may not follow `start`, `start` + 1, ... drafts."""
        if not self.applies:
            return logits
        masks = self._current[: len(logits), start : start + logits.shape[1], :, None]
        bits = masks >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
        return logits.masked_fill((bits == 0).flatten(2)[..., : logits.shape[-1]], -math.inf)

    def force(self, tokens: Tensor, probs: Tensor | None, lengths: Tensor | None) -> list[int]:
        """Put the tokens that grammars force in the place of each row's first drafts; return the rows that have any."""
        rows = []
        for row, grammar in enumerate(self.grammars):
            if grammar is not None and (forced := grammar.forced()[: tokens.shape[1]]):
                n = len(forced)
                rows.append(row)
                tokens[row, :n] = torch.tensor(forced, device=tokens.device)
                if probs is not None:
                    probs[row, :n] = one_hot(tokens[row, :n], probs.shape[-1]).to(probs.dtype)
                if lengths is not None:
                    lengths[row].clamp_(min=n)
        return rows
