"""What a route asks for, its prompt tokenised beside the event loop, and the bounds of both."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.session import Session
from models.checkpoints.chat_template import ChatTemplate, NoChatTemplateError
from serving.answers import TOO_LONG, invalid
from serving.flags import Limits
from serving.schemas import Decoding

LONGEST_STOP = 256


@dataclass(frozen=True)
class Wanted:
    """What a route asks for. encode: makes the prompt, of texts of n_chars characters. of_prompt, of_length: what the
    route calls the prompt and the number of new tokens; within: what stands before the names of `own`. most_unasked:
    new tokens where the client names no number."""

    own: Decoding
    encode: Callable[[], list[Any]]
    n_chars: int
    max_new_tokens: int | None = None
    of_prompt: str = "inputs"
    of_length: str = "max_tokens"
    within: str = ""
    keeps_stop: bool = False
    logprobs: bool = False
    most_unasked: int = sys.maxsize


def require(*checks: tuple[bool, str, str], kind: str = "validation") -> None:
    """Of each check whether it fails, the name of the parameter, and what to say. Raises Failure of the first."""
    for fails, param, says in checks:
        if fails:
            raise invalid(param, says, kind)


class Prompts:
    """max_total: tokens that a row has room for; max_input: those of a prompt. specials: control tokens' names."""

    def __init__(self, session: Session, limits: Limits) -> None:
        assert session.tokenizer is not None
        self.tokenizer, self._limits = session.tokenizer, limits
        self.max_total = session.plan.capacity - session.plan.gamma - 1
        self.max_input = min(limits.max_input_length or self.max_total, self.max_total - 1)
        self.specials = {index: text for text, index in self.tokenizer.control_tokens().items()}
        self._vocab_size = session.plan.target.config.vocab_size
        self._most_chars = self.max_input * max(len(piece) for piece in self.tokenizer.pieces() if piece)
        # One thread: a tokenizer is switched while it encodes a conversation.
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self.template: ChatTemplate | None = None
        with suppress(NoChatTemplateError):
            self.template = session.plan.target.chat_template()

    def conversation(self, messages: Sequence[dict[str, str]], param: str) -> Callable[[], list[int]]:
        """What tokenises it in the model's chat template. Raises Failure."""
        template = self.template
        if template is None:
            raise invalid(param, "the model has no chat template: use /v1/completions or /generate")
        return lambda: template.encode(messages)

    def encode(self, wanted: Wanted) -> "asyncio.Future[list[Any]]":
        """Its prompt, tokenised beside the event loop. Raises Failure."""
        says = f"has {wanted.n_chars} characters; this server takes {self._most_chars}"
        require((wanted.n_chars > self._most_chars, wanted.of_prompt, says), kind=TOO_LONG)
        return asyncio.get_running_loop().run_in_executor(self._thread, wanted.encode)

    def places(self, text: str, add_bos: bool) -> list[tuple[int, int, int]]:
        """Token ids and their places. Raises Failure."""
        # First without places: nothing else runs while those are made into Python's objects.
        self._check_length(len(self.tokenizer.encode(text, add_bos)), "inputs")
        return self.tokenizer.places(text, add_bos)

    def check(self, wanted: Wanted) -> None:
        """Raises Failure for what cannot be had behind any prompt."""
        limits, stops, of_stops = self._limits, wanted.own.stops, f"{wanted.within}stop"
        length, most, n_stops = wanted.max_new_tokens or 0, limits.max_new_tokens, limits.max_stop_sequences
        plain = limits.no_plain_requests and not wanted.own.speculate
        require(
            (length > most, wanted.of_length, f"is {length}; this server gives {most}"),
            (len(stops) > n_stops, of_stops, f"has {len(stops)} strings; this server takes {n_stops}"),
            (not all(stops), of_stops, "has an empty string"),
            (len(max(stops, key=len, default="")) > LONGEST_STOP, of_stops, f"has more than {LONGEST_STOP} characters"),
            (plain, f"{wanted.within}speculate", "is false; this server has no plain rounds on demand"),
        )

    def _check_length(self, n_tokens: int, param: str) -> None:
        says = f"has {n_tokens} tokens; this server takes {self.max_input}"
        require((n_tokens > self.max_input, param, says), kind=TOO_LONG)

    def limit(self, wanted: Wanted, prompt: Sequence[int]) -> int:
        """New tokens behind this prompt. Raises Failure."""
        n_prompt, of_prompt, room = len(prompt), wanted.of_prompt, self.max_total - len(prompt)
        self._check_length(n_prompt, of_prompt)
        highest, n_ids = max(prompt, default=0), self._vocab_size
        limit = wanted.max_new_tokens or min(room, self._limits.max_new_tokens, wanted.most_unasked)
        require(
            (n_prompt == 0, of_prompt, "is empty"),
            (highest >= n_ids, of_prompt, f"has the token id {highest}; those of this model are below {n_ids}"),
        )
        says = f"is {limit}; behind {n_prompt} prompt tokens there is room for {room}"
        require((limit > room, wanted.of_length, says), kind=TOO_LONG)
        return limit
