"""generate(): the one decode loop. Without a drafter it is plain autoregressive decoding."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.drafters import Drafter
from engine.requests import FinishReason, Request, make_requests
from engine.runner import ModelRunner, finite_rows
from engine.sampling import SamplingParams, greedy
from engine.stats import Round, Stats
from engine.verification import verify_greedy
from kv_cache.errors import ConfigError


class Progress(Protocol):
    """Told of tokens as they are prefilled and emitted."""

    def prefilled(self, n_tokens: int) -> None: ...
    def emitted(self, n_tokens: int) -> None: ...


@dataclass(frozen=True)
class GenerateOutput:
    """`tokens[i]`: the new tokens of prompt i, a stop token included. `errors[i]`: why it ended early, or None."""

    tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    errors: list[str | None]
    stats: Stats


class _Slot:
    """One row of the batch. An idle slot stays parked at its last length, where its writes harm nobody."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.length = 0
        self.current = 0


@torch.inference_mode()
def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    drafter: Drafter | None = None,
    sampling: SamplingParams | None = None,
    verification: str = "auto",
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
    phase: Callable[[str], AbstractContextManager[object]] | None = None,
) -> GenerateOutput:
    """Continue every prompt; any number of prompts of any lengths runs through the cache's rows.

    Rows are independent: each has its own length, accepted count, stop tokens and limit, and the slot
    of a finished row is refilled from the waiting prompts. The output is that of plain decoding.

    Args:
        runner: the target and its cache, whose `max_batch` is the number of slots.
        prompts: token ids of each prompt.
        max_new_tokens: tokens to emit per prompt, one number or one a prompt.
        drafter: proposes `gamma` tokens a round; None is the autoregressive baseline.
        sampling: greedy, which is all that SamplingParams admits for now.
        verification: "greedy", or "auto", which is greedy at temperature 0.
        stop_tokens: ids that end a row, one list or one list a prompt; the stop token is kept.
        progress: told of tokens as they come.
        phase: a context manager factory around "draft", "verify" and "accept", for timing.

    Errors: ConfigError, before anything runs, if a prompt is empty, has ids outside the vocabulary,
    or if prompt + max_new_tokens + gamma + 1 exceeds the model's context or the cache. A row whose
    logits are not finite ends with the reason in `errors`; the other rows go on.
    """
    if verification not in ("auto", "greedy"):
        raise ConfigError(
            "unknown verification mode",
            where="verification (--verification)",
            seen=verification,
            required="auto or greedy",
            fix="use auto",
        )
    gamma = drafter.gamma if drafter else 0
    requests = make_requests(runner, prompts, max_new_tokens, stop_tokens, gamma)
    if drafter:
        longest = max((len(request.prompt) + request.limit for request in requests), default=0)
        drafter.check(runner.cache, longest + gamma + 1)
    phase = phase or (lambda name: nullcontext())
    slots = [_Slot() for _ in range(runner.cache.max_batch)]
    for row in range(len(requests), len(slots)):
        runner.release_row(row)  # never admitted, it idles at position 0
    waiting = deque(requests)
    rounds: list[Round] = []
    prefill_seconds = 0.0

    while True:
        started = time.perf_counter()
        for row, slot in enumerate(slots):
            while slot.request is None and waiting:
                _admit(runner, drafter, row, slot, waiting.popleft(), progress)
        busy = [slot for slot in slots if slot.request]
        prefill_seconds += time.perf_counter() - started
        if not busy:
            break

        started = time.perf_counter()
        drafts, num_accepted, next_token, finite = _round(runner, drafter, slots, phase)
        emitted = 0
        for row, slot in enumerate(slots):
            if slot.request:
                block = [*drafts[row][: num_accepted[row]], next_token[row]]
                emitted += _commit(slot, slot.request, block, gamma, finite[row])
        lengths = torch.tensor([slot.length for slot in slots], device=runner.device)
        runner.cache.rollback(lengths)
        if drafter:
            drafter.rollback(lengths)
        rounds.append(Round(time.perf_counter() - started, len(busy), emitted))
        if progress:
            progress.emitted(emitted)

    return GenerateOutput(
        tokens=[request.tokens for request in requests],
        finish_reasons=[request.finish_reason for request in requests],
        errors=[request.error for request in requests],
        stats=Stats(tuple(request.counts for request in requests), tuple(rounds), prefill_seconds),
    )


def _admit(
    runner: ModelRunner,
    drafter: Drafter | None,
    row: int,
    slot: _Slot,
    request: Request,
    progress: Progress | None,
) -> None:
    """Prefill a prompt into a free slot and emit its first token; the slot stays free if that ends it."""
    prefilled = runner.prefill_row(row, request.prompt, progress.prefilled if progress else None)
    slot.length = len(request.prompt)
    if prefilled.bad_position is not None:
        request.fail(prefilled.bad_position)
        return
    token = int(greedy(prefilled.logits))
    request.extend([token])
    if progress:
        progress.emitted(1)
    if request.finish_reason is None:
        slot.request, slot.current = request, token
        if drafter:
            drafter.admit(row, slot.length)


def _round(
    runner: ModelRunner,
    drafter: Drafter | None,
    slots: Sequence[_Slot],
    phase: Callable[[str], AbstractContextManager[object]],
) -> tuple[list[list[int]], list[int], list[int], list[list[bool]]]:
    """Draft, verify, accept. Per row: the drafts, how many were accepted, the next token, finite logits."""
    gamma = drafter.gamma if drafter else 0
    lengths = torch.tensor([slot.length for slot in slots], device=runner.device)
    current = torch.tensor([slot.current for slot in slots], device=runner.device)
    extent = max(slot.length for slot in slots) + gamma + 1

    with phase("draft"):
        drafts = drafter.propose(current, lengths, extent) if drafter else current.new_empty(len(slots), 0)
    with phase("verify"):
        block = torch.cat([current[:, None], drafts], dim=1)
        positions = lengths[:, None] + torch.arange(gamma + 1, device=runner.device)
        cache = drafter.verification_cache if drafter else None
        logits = runner.step(block, positions, extent, cache)
    with phase("accept"):
        verdict = verify_greedy(drafts, logits)
        finite = finite_rows(logits)
        columns = (verdict.num_accepted[:, None], verdict.next_token[:, None], drafts, finite)
        rows = torch.cat(columns, dim=1).tolist()  # the round's one host sync
    drafts_end = 2 + gamma
    return (
        [row[2:drafts_end] for row in rows],
        [row[0] for row in rows],
        [row[1] for row in rows],
        [[bool(flag) for flag in row[drafts_end:]] for row in rows],
    )


def _commit(slot: _Slot, request: Request, block: list[int], drafted: int, finite: list[bool]) -> int:
    """Cut a row's accepted block at its first stop token or limit, then set its length, then count."""
    num_accepted = len(block) - 1
    bad = next((i for i, ok in enumerate(finite[: len(block)]) if not ok), None)
    kept = request.extend(block if bad is None else block[:bad])
    request.counts.add_round(drafted, num_accepted, kept)
    if bad is not None and request.finish_reason is None:
        request.fail(slot.length + bad)
    if request.finish_reason is None:
        slot.length += kept
        slot.current = block[-1]
    else:
        slot.request = None
    return kept
