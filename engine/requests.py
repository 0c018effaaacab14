"""Requests: one prompt with its limits, the tokens emitted for it so far, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from common.errors import ConfigError
from engine.runner import ModelRunner
from engine.sampling import SamplingParams
from engine.stats import Counts

FinishReason = Literal["length", "stop", "error"] | None


@dataclass
class Request:
    """A prompt on its way through the batch. `index` is its place among the prompts, `id` keys its noise."""

    index: int
    id: int
    prompt: list[int]
    limit: int
    stop_tokens: frozenset[int]
    sampling: SamplingParams
    counts: Counts
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = None
    error: str | None = None

    def extend(self, block: Sequence[int]) -> int:
        """Emit `block` up to its first stop token or the length limit; returns how many were emitted."""
        for count, token in enumerate(block, start=1):
            self.tokens.append(token)
            if token in self.stop_tokens:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.limit:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(block)

    @property
    def committed(self) -> list[int]:
        """The text whose KV the target's cache holds: all but the last token."""
        return [*self.prompt, *self.tokens[:-1]]

    def fail(self, position: int) -> None:
        """End the request at `position`, whose logits are not finite."""
        self.finish_reason = "error"
        self.error = f"row {self.index}: logits at position {position} are NaN or infinite"


def make_requests(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    stop_tokens: Sequence[int] | Sequence[Sequence[int]],
    gamma: int,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    request_ids: Sequence[int] | None = None,
) -> list[Request]:
    """Check every prompt against the vocabulary, the context and the cache; errors as `generate` says."""
    n_prompts = len(prompts)
    limits = [max_new_tokens] * n_prompts if isinstance(max_new_tokens, int) else list(max_new_tokens)
    stops = _stops_per_prompt(stop_tokens, n_prompts)
    shared = SamplingParams() if sampling is None else sampling
    samplings = [shared] * n_prompts if isinstance(shared, SamplingParams) else list(shared)
    ids = list(range(n_prompts)) if request_ids is None else list(request_ids)
    per_prompt: dict[str, Sequence[object]] = {
        "max_new_tokens": limits,
        "stop_tokens": stops,
        "sampling": samplings,
        "request_ids": ids,
    }
    for name, given in per_prompt.items():
        if len(given) != n_prompts:
            raise _refuse(f"{name} given per prompt does not match the prompts", name, len(given), n_prompts)
    _check_ids(ids, samplings)
    requests = []
    for index, (prompt, limit, stop) in enumerate(zip(prompts, limits, stops, strict=True)):
        check_prompt(runner, index, prompt, limit, gamma)
        counts = Counts.of_gamma(gamma)
        requests.append(Request(index, ids[index], list(prompt), limit, frozenset(stop), samplings[index], counts))
    return requests


def _check_ids(ids: Sequence[int], samplings: Sequence[SamplingParams]) -> None:
    """Ids are 32-bit words of the random numbers' counter; two samples must not share their numbers."""
    owner: dict[tuple[int, int], int] = {}
    for index, (request_id, sampling) in enumerate(zip(ids, samplings, strict=True)):
        where = f"prompt {index}: request_ids"
        if not isinstance(request_id, Integral) or not 0 <= request_id < 2**32:
            raise _refuse("a request id is out of range", where, request_id, "an integer, 0 <= id < 2**32")
        if sampling.greedy:
            continue
        first = owner.setdefault((request_id, sampling.seed), index)
        if first != index:
            seen = f"id {request_id} and seed {sampling.seed}, as prompt {first}"
            raise _refuse("two requests would share their random numbers", where, seen, "another id or seed")


def check_prompt(runner: ModelRunner, index: int, prompt: Sequence[int], limit: int, gamma: int) -> None:
    """Raise ConfigError unless `prompt` can be continued by `limit` tokens at that gamma."""
    where = f"prompt {index}"
    vocab_size = runner.model.config.vocab_size
    if not prompt:
        raise _refuse("a prompt is empty", where, "0 tokens", "at least 1 token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        outside = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ConfigError(
            "a token id is outside the vocabulary",
            where=where,
            seen=outside,
            required=f"0 <= id < {vocab_size}",
            fix="encode the prompt with the model's own tokenizer",
        )
    if limit < 1:
        raise _refuse("nothing to generate", f"{where}: max_new_tokens", limit, ">= 1")
    needed = len(prompt) + limit + gamma + 1
    rooms = (
        ("the model's context", runner.model.config.max_context),
        ("the KV cache", runner.cache.max_block),
    )
    for name, room in rooms:
        if needed > room:
            raise ConfigError(
                f"prompt + new tokens + gamma + 1 exceeds {name}",
                where=where,
                seen=f"{len(prompt)} + {limit} + {gamma} + 1 = {needed} tokens",
                required=f"<= {room}",
                fix=f"shorten the prompt (--prefix_len) by {needed - room} tokens or generate fewer (--gen_len)",
            )


def _stops_per_prompt(stop_tokens: Sequence[int] | Sequence[Sequence[int]], n_prompts: int) -> list[list[int]]:
    shared = [int(token) for token in stop_tokens if isinstance(token, Integral)]
    if len(shared) == len(stop_tokens):
        return [shared] * n_prompts
    if shared:
        raise _refuse("stop_tokens mixes ids and lists", "stop_tokens", stop_tokens, "ids only, or lists only")
    return [list(row) for row in stop_tokens if not isinstance(row, int)]


def _refuse(what: str, where: str, seen: object, required: object) -> ConfigError:
    return ConfigError(what, where=where, seen=seen, required=required, fix="correct the call to generate()")
