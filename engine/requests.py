"""Requests: a prompt with its limits, the tokens emitted for it so far, and why it ended."""

from collections.abc import Collection, Iterable, Sequence, Sized
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral
from operator import index as as_integer
from typing import Any, Literal, NamedTuple

from torch import Tensor

from common.errors import flag, refuse
from engine.runner import ModelRunner
from engine.sampling.distribution import Logprob, SamplingParams
from engine.sampling.grammars import Grammar
from engine.stats import Counts, RowRound

FIX = "correct the Request, or the call to generate()"
FinishReason = Literal["length", "stop", "error", "cancelled"] | None


class Outcome(NamedTuple):
    """A round's outcome in a row.

    block: the accepted drafts and the target's token. finite: 1 for each position whose logits are finite.
    """

    drafts: list[int]
    block: list[int]
    finite: list[int]


@dataclass(eq=False)
class Request:
    """A prompt that a decoder continues by at most `limit` tokens, the stop token included, and its result so far.

    limit: 0 only with prompt_logprobs. id: keys its random numbers with the seed, 0 <= id < 2**32. index: its name in
    messages. speculate: False for plain rounds while it decodes. group: requests of a group have the same prompt, which
    runs once if they decode at the same time. prediction: tokens that drafters may look matches up in. grammar: rules
    that the answer follows, in their first state, or None. Errors: ConfigError naming a field that is not of integers,
    or out of range.

    logprobs, prompt_logprobs: lists that a decode adds log-probabilities to, on the rank that decides, or None: the
    model's at temperature 1 and without filters, of each new token, and of the prompt's tokens after the first; then
    the whole prompt runs. n_top: likeliest ids in each of them.

    text: the prompt and `tokens` once it is submitted, a list that grows, so that a round copies neither. started:
    seconds of `time.perf_counter` when it got a row, 0 before. n_reused: tokens of the prompt that its row held.
    n_predicted: draft tokens of its last draft that were copied from its prediction.
    """

    prompt: Sequence[int]
    limit: int
    stop_tokens: Collection[int] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    id: int = 0
    index: int = 0
    speculate: bool = True
    group: int | None = None
    prediction: Sequence[int] = ()
    grammar: Grammar | None = None
    _: KW_ONLY
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    n_top: int = 0
    tokens: list[int] = field(default_factory=list, init=False)
    text: list[int] = field(default_factory=list, init=False, repr=False)
    counts: Counts = field(default_factory=Counts, init=False)
    finish_reason: FinishReason = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    n_reused: int = field(default=0, init=False)
    n_predicted: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.index = self._integers("index", [self.index])[0]
        self.limit, self.id = self._integers("limit", [self.limit])[0], self._integers("id", [self.id])[0]
        self.prompt = self._integers("prompt", self.prompt)
        self.prediction = self._integers("prediction", self.prediction)
        self.stop_tokens = frozenset(self._integers("stop_tokens", self.stop_tokens))
        if self.grammar is not None and not self.stop_tokens:
            refuse(f"prompt {self.index}: stop_tokens", "none", "at least one, to end what its grammar ends")
        if not 0 <= self.id < 2**32:  # a word of the random numbers' counter
            refuse(f"prompt {self.index}: id", self.id, "0 <= id < 2**32", "a request id is out of range", FIX)

    def _integers(self, name: str, values: Iterable[Any]) -> list[int]:
        """Return integers of Python for integers of any library."""
        try:
            return [*map(as_integer, values)]
        except TypeError:
            refuse(f"prompt {self.index}: {name}", values, "integers")

    @property
    def length(self) -> int:
        """The number of tokens whose entries the target's cache holds: all but the last emitted token."""
        return len(self.text) - 1

    def noise_key(self, mode: str) -> tuple[int, int] | None:
        """Return the seed and id that key its random numbers in rejection mode, where no guess may depend on them."""
        return (self.sampling.seed, self.id) if mode == "rejection" and not self.sampling.greedy else None

    def emit(self, block: Sequence[int]) -> int:
        """Emit `block` up to its first stop token or the length limit; return how many were emitted."""
        kept = block[: self.limit - len(self.tokens)]
        if (stop := next((i for i, token in enumerate(kept) if token in self.stop_tokens), None)) is not None:
            kept = kept[: stop + 1]
            self.finish_reason = "stop"
        elif len(self.tokens) + len(kept) == self.limit:
            self.finish_reason = "length"
        self.tokens += kept
        self.text += kept
        if self.grammar is not None:
            self.grammar.advance(kept)
            if self.grammar.error:
                self.finish_reason, self.error = "error", f"the grammar cannot go on: {self.grammar.error}"
        return len(kept)

    def commit(self, outcome: Outcome) -> RowRound:
        """Emit and count a round's block, up to logits that are not finite; return the row's part in the round."""
        block, start, n_before = outcome.block, self.length, len(self.tokens)
        finite = outcome.finite[: len(block)]
        bad = None if all(finite) else finite.index(0)
        kept = self.emit(block[:bad])
        part = self.counts.add_round(len(outcome.drafts), len(block) - 1, kept, n_before)
        if bad is not None and self.finish_reason is None:
            self.fail(start + bad)
        return part._replace(request=self.id)

    def fail(self, position: int) -> None:
        """End the request at `position`, whose logits are not finite."""
        self.finish_reason = "error"
        self.error = f"logits at position {position} are NaN or infinite"


@dataclass(frozen=True)
class VerifiedRow:
    """A request's draft tokens in a round, and the log-probabilities by which the target verified them.

    start: the position of the first draft in the text. part: how many of the drafts were verified, and accepted of
    these; the others follow a rejection, a stop token or a limit. logprobs: the target's after 0, 1, ... of n drafts,
    `[n + 1, V]`. draft_logprobs: those that each draft was drawn from, `[n, V]`; None if it was not drawn. Both are of
    the request's distribution; in rounds of greedy requests alone, of temperature 1. float32 or better, on the device.
    """

    request: Request
    start: int
    drafts: list[int]
    part: RowRound
    logprobs: Tensor
    draft_logprobs: Tensor | None


class Progress:
    """Callbacks of a decoder, which do nothing here: tokens that are prefilled, and a round's emitted tokens of all
    rows; before these, for each row, a round's outcome and how many tokens of its block were kept; and every request
    that ends by itself. If it `observes`, alike on all ranks, each row's verified drafts, too, on the rank that
    decides; rounds are then not captured."""

    observes = False

    def verified(self, row: VerifiedRow) -> None: ...
    def prefilled(self, n_tokens: int) -> None: ...
    def decoded(self, request: Request, outcome: Outcome, n_kept: int) -> None: ...
    def emitted(self, n_tokens: int) -> None: ...
    def finished(self, request: Request) -> None: ...


def make_requests(
    prompts: Iterable[Iterable[int]],
    max_new_tokens: int | Sequence[int],
    stop_tokens: Iterable[int] | Iterable[Iterable[int]] = (),
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    request_ids: Sequence[int] | None = None,
    numbered_from: int = 0,
) -> list[Request]:
    """Make a request of each prompt. Limits, stop tokens and sampling are a single value, or a value per prompt.
    Errors: ConfigError if there are not as many values as prompts, or samples would share their noise."""
    sampling = SamplingParams() if sampling is None else sampling
    prompts, stops = list(prompts), list[Any](stop_tokens)
    n_prompts, is_flat = len(prompts), all(isinstance(stop, Integral) for stop in stops)
    columns: dict[str, Sequence[Any]] = {
        "max_new_tokens": max_new_tokens if isinstance(max_new_tokens, Sized) else [max_new_tokens] * n_prompts,
        "stop_tokens": [stops] * n_prompts if is_flat else stops,
        "sampling": [sampling] * n_prompts if isinstance(sampling, SamplingParams) else sampling,
        "request_ids": range(numbered_from, numbered_from + n_prompts) if request_ids is None else request_ids,
    }
    for name, values in columns.items():
        if len(values) != n_prompts:
            what = f"{name} given per prompt does not match the prompts"
            refuse(f"generate(): {name}", len(values), n_prompts, what, FIX)
    requests: list[Request] = []
    owner: dict[tuple[int, int], int] = {}
    each = zip(prompts, *columns.values(), strict=True)
    for index, (prompt, limit, stop, params, request_id) in enumerate(each, numbered_from):
        requests.append(Request(prompt, limit, stop, params, request_id, index))
        first = index if params.greedy else owner.setdefault((request_id, params.seed), index)
        if first != index:
            seen = f"id {request_id} and seed {params.seed}, as prompt {first}"
            what = "two requests would share their random numbers"
            refuse(f"prompt {index}: request_ids", seen, "another id or seed", what, FIX)
    return requests


def check_prompt(
    runner: ModelRunner, index: int, prompt: Sequence[int], limit: int, gamma: int, others: Sequence[int] = ()
) -> None:
    """Raise ConfigError unless `prompt` can be continued by `limit` tokens at that gamma. others: further ids, which
    have to be in the vocabulary."""
    where, vocab_size = f"prompt {index}", runner.model.config.vocab_size
    if not prompt:
        refuse(where, "0 tokens", "at least 1 token", "a prompt is empty", FIX)
    if min(*prompt, *others, 0) < 0 or max(*prompt, *others, 0) >= vocab_size:
        outside = next(token for token in (*prompt, *others) if not 0 <= token < vocab_size)
        fix = "encode texts with the model's tokenizer, and name its ids in biases and bans"
        refuse(where, outside, f"0 <= id < {vocab_size}", "a token id is outside the vocabulary", fix)
    if limit < 1:
        refuse(f"{where}: max_new_tokens", limit, ">= 1", "nothing to generate", FIX)
    needed = len(prompt) + limit + gamma + 1
    for name, room in (
        ("the model's context", runner.model.config.max_context),
        ("the KV cache", runner.cache.max_block),
    ):
        if needed > room:
            seen = f"{len(prompt)} + {limit} + {gamma} + 1 = {needed} tokens"
            shorter = f"shorten the prompt ({flag('prefix_len')}) by {needed - room} tokens"
            fix = f"{shorter} or generate fewer ({flag('gen_len')})"
            refuse(where, seen, f"<= {room}", f"prompt + new tokens + gamma + 1 exceeds {name}", fix)
