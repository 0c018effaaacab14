"""The intake of requests: their limits, checks, token ids and grammars."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from tyro.conf import arg

from bench.session import Session
from common.errors import UserError
from engine.drafters.config import Trait
from engine.sampling.distribution import LONGEST_BAN
from engine.sampling.grammars import Grammar, Grammars, call_grammar
from models.checkpoints.chat_template import ChatTemplate, NoChatTemplateError
from models.checkpoints.reasoning import reasons_after
from models.checkpoints.tool_calls import MARKS
from serving.answers import TOO_LONG, invalid, require
from serving.schemas import Calls, ChatCompletion, GenerationSpec, Prediction, joined

LONGEST_OPENING = 16  # tokens at the end of a prompt, among which it opens or closes reasoning
Prompt = str | Sequence[int] | Sequence[dict[str, Any]]  # a text, token ids, or a conversation


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a request is refused."""

    max_queue: int = 64  # samples that wait for a row; a request for further ones is answered with 429
    max_input_length: Annotated[int | None, arg(help_behavior_hint="(default: what a row has room for)")] = None
    """tokens of a prompt"""
    max_new_tokens: int = 2048  # tokens that a request may ask for
    max_stop_sequences: int = 8  # stop strings of a request
    max_body_bytes: int = 2_000_000  # of a request
    request_seconds: float = 600  # seconds that a request may take, waiting included
    no_plain_requests: bool = False
    """refuse `"speculate": false`, which makes all rounds plain while such a request runs"""


class Intake:
    """Checks the bodies of requests, and turns them into token ids, limits and grammars.

    max_total: tokens that a row has room for. max_input: tokens that a prompt may have. defaults: values of fields that
    a request does not give; a length among them is cut to the room that is there. ends: ids that end an answer.
    specials: names of ids without text. Methods raise Failure for a request that cannot be answered."""

    def __init__(self, session: Session, verification: str, limits: Limits, defaults: Mapping[str, Any]) -> None:
        assert session.tokenizer is not None
        self.tokenizer, self._plan, self._n_ranks = session.tokenizer, session.plan, session.ranks.size
        self._verification, self.limits, target = verification, limits, session.plan.target.source
        self.max_total = self._plan.target.capacity - self._plan.gamma - 1
        self.max_input = min(limits.max_input_length or self.max_total, self.max_total - 1)
        self._longest = min(limits.max_new_tokens, defaults.get("max_tokens", limits.max_new_tokens))
        self.defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
        self.template: ChatTemplate | None = None
        with suppress(NoChatTemplateError):
            self.template = target.chat_template()
        self._has_reasoning = self.template is not None and self.template.has_reasoning
        self.ends, self._n_ids = target.end_tokens, target.config.vocab_size
        pieces = self.tokenizer.pieces()
        self._has_call_tokens = MARKS[0] in pieces
        # Ids that no token has are named as by vLLM.
        self.specials = {i: f"token_id:{i}" for i in range(self._n_ids) if i >= len(pieces) or pieces[i] is None}
        self.specials |= {id_: name for name, id_ in self.tokenizer.control_tokens().items()}

    def check(self, spec: GenerationSpec, prompt: Prompt, calls: Calls) -> None:
        """Refuse a request that is wrong whatever its prompt is."""
        limits, within, n_ids = self.limits, spec.WITHIN, self._n_ids
        n_new, n_stops, highest = spec.max_tokens or 0, len(spec.stop), max(spec.logit_bias, default=0)
        most, most_stops = min(limits.max_new_tokens, self.max_total - 1), limits.max_stop_sequences
        require(n_new <= most, spec.length_field, f"is {n_new}; this server gives {most}")
        require(n_stops <= most_stops, f"{within}stop", f"has {n_stops} strings; this server takes {most_stops}")
        is_allowed = spec.speculate or not limits.no_plain_requests
        require(is_allowed, f"{within}speculate", "is false; this server has no plain rounds on demand")
        require(highest < n_ids, f"{within}logit_bias", f"has the token id {highest}; the model has {n_ids}")
        if spec.grammar is not None or calls.required:
            field = "tool_choice" if calls.required else spec.GRAMMAR
            require(self._n_ranks == 1, field, "needs a server on a single rank")
            require(not spec.ignore_eos, f"{within}ignore_eos", "is true; an answer ends where its grammar does")
        require(len(prompt), spec.PROMPT, "is empty")
        has_template = self.template is not None or not isinstance(prompt[0], dict)
        require(has_template, spec.PROMPT, "the model has no chat template: use /v1/completions or /generate")

    def encode(self, prompt: Any, calls: Calls) -> list[int]:
        """Return the token ids of a prompt. Errors: UserError."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if self.template is not None and isinstance(prompt[0], dict):
            return self.template.encode(prompt, calls.variables, calls.offered or None)
        return list(prompt)

    def limit(self, spec: GenerationSpec, prompt: Sequence[int]) -> int:
        """Return the most new tokens after a prompt."""
        n, room, n_ids = len(prompt), self.max_total - len(prompt), self._n_ids
        require(n <= self.max_input, spec.PROMPT, f"has {n} tokens; this server takes {self.max_input}", TOO_LONG)
        highest = max(prompt, default=0)
        require(highest < n_ids, spec.PROMPT, f"has the token id {highest}; those of this model are below {n_ids}")
        longest = min(room, self._longest, spec.DEFAULT_LENGTH)
        limit, least = longest if spec.max_tokens is None else spec.max_tokens, spec.min_tokens
        says = f"is {limit}; after {n} prompt tokens there is room for {room}"
        require(limit <= room, spec.length_field, says, TOO_LONG)
        require(least <= limit, f"{spec.WITHIN}min_tokens", f"is {least}; the answer has at most {limit} tokens")
        return limit

    def reasons(self, spec: GenerationSpec, prompt: Sequence[int]) -> bool | None:
        """Return whether an answer begins within reasoning; None if it may begin with some."""
        if not (self._has_reasoning and isinstance(spec, ChatCompletion)):
            return False
        end = prompt[-LONGEST_OPENING:]
        return reasons_after("".join(self.specials.get(id_) or self.tokenizer.decode([id_]) for id_ in end))

    def shared(
        self, spec: GenerationSpec, calls: Calls, reasons: bool | None
    ) -> tuple[Grammar | None, list[list[int]], list[int]]:
        """Return what all samples of a request share: grammar, bans and the tokens of a prediction. reasons: as for
        `Grammars.start`."""
        grammar, prediction, constraint = None, getattr(spec, "prediction", None), spec.grammar
        if tools := {function.name: function.parameters for function in calls.required}:
            assert self.template is not None
            constraint = "lark", call_grammar(tools, self.template.is_hermes, self._has_call_tokens)
        if constraint is not None:
            kind, text = constraint
            try:
                grammar = self._grammars.start(kind, text, reasons)
            except UserError as error:
                raise invalid("tool_choice" if tools else spec.GRAMMAR, f"{error.what}: {error.seen}") from None
        return grammar, self._bans(spec), self._predicted(spec, prediction) if prediction else []

    def _predicted(self, spec: GenerationSpec, prediction: Prediction) -> list[int]:
        """Return the tokens of a predicted text, which drafts may read."""
        is_read = any(Trait.READS_PREDICTIONS in draft.config.traits for draft in self._plan.candidates)
        # It may be an earlier answer, and guesses must not depend on the request's random numbers.
        is_seeded = spec.samples and "seed" in spec.model_fields_set and self._verification == "rejection"
        says = "is not taken with a seed by a server with --verification rejection"
        require(not (is_read and is_seeded), "prediction", says)
        tokens = self.tokenizer.encode(joined(prediction.content), add_bos=False)
        n, most = len(tokens), self.max_total
        require(n <= most or not is_read, "prediction", f"has {n} tokens; this server takes {most}")
        return tokens[:most]

    def _bans(self, spec: GenerationSpec) -> list[list[int]]:
        """Return the token ids of `bad_words`, as tokenised alone and after a space."""
        forms = [form for word in spec.bad_words for form in (word, f" {word.lstrip()}")]
        bans = [self.tokenizer.encode(form, add_bos=False) for form in dict.fromkeys(forms)]
        longest, says = max(map(len, bans), default=0), f"tokens; at most {LONGEST_BAN} fit"
        require(longest <= LONGEST_BAN, f"{spec.WITHIN}bad_words", f"has a string of {longest} {says}")
        return [ids for ids in bans if ids and max(ids) < self._n_ids]

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self._n_ids, self.ends)
