"""generate(): the one decode loop. Without a drafter it is plain autoregressive decoding."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.errors import ConfigError, UserError
from engine.contention import Usage
from engine.drafters import Drafter
from engine.modes import Drafts, Rows, resolve_mode, start_round
from engine.pacing import Choice, Fixed, Pacing
from engine.requests import FinishReason, Request, make_requests
from engine.round import Called, Captured, RoundBuffers, rounds_of
from engine.runner import ModelRunner, finite_rows
from engine.sampling import LawShape, SamplingParams
from engine.stats import Round, Stats
from engine.timing import synchronize


class Progress(Protocol):
    """Told of tokens as they are prefilled and emitted, and of every prompt that is done."""

    def prefilled(self, n_tokens: int) -> None: ...
    def emitted(self, n_tokens: int) -> None: ...
    def finished(self, request: Request) -> None: ...


@dataclass(frozen=True)
class GenerateOutput:
    """`tokens[i]`: the new tokens of prompt i, a stop token included. `errors[i]`: why it ended early, or None.

    `finish_reasons[i]` is None where a pacing ended the decode before the prompt was done. `usage`: of the
    processors, where that was watched.
    """

    tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    errors: list[str | None]
    stats: Stats
    usage: Usage | None = None

    def require_finite(self, where: str) -> None:
        """Raise UserError naming rows and positions if any row ended because its logits were not finite."""
        if broken := [error for error in self.errors if error]:
            raise UserError(
                "the model's logits are not finite",
                where=where,
                seen="; ".join(broken[:8]),
                required=f"finite logits in all {len(self.errors)} rows",
                fix="check the checkpoint (convert again), or use a wider --dtype (float32)",
            )


class _Slot:
    """One row of the batch. An idle slot stays parked at its last length, where its writes harm nobody."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.length = 0
        self.current = 0
        self.sampling = SamplingParams()
        self.request_id = 0
        # The length up to which each drafter, by its index, has followed this row; absent: never told of it.
        self.followed: dict[int, int] = {}


@torch.inference_mode()
def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    drafter: Drafter | None = None,
    pacing: Pacing | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    verification: str = "auto",
    request_ids: Sequence[int] | None = None,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
    phase: Callable[[str], AbstractContextManager[object]] | None = None,
) -> GenerateOutput:
    """Continue every prompt; any number of prompts of any lengths runs through the cache's rows.

    Rows are independent: each has its own length, accepted count, stop tokens and limit, and the slot
    of a finished row is refilled from the waiting prompts. In the greedy and the coupled mode the output
    is that of plain decoding in that mode; in the rejection mode it has the distribution of plain decoding.

    Args:
        runner: the target and its cache, whose `max_batch` is the number of slots.
        prompts: token ids of each prompt.
        max_new_tokens: tokens to emit per prompt, one number or one a prompt.
        drafter: proposes `gamma` tokens a round; None is the autoregressive baseline.
        pacing: decides before each round what drafts and how far, in place of one drafter in every round, or
            that no round follows.
        sampling: one for all prompts, or one a prompt; None is greedy.
        verification: "greedy", "rejection" (speculative sampling), "coupled" (sampled tokens that depend
            on seed, request id and text alone), or "auto": greedy at temperature 0, else rejection.
        request_ids: what keys each prompt's random numbers beside its seed; its index if None. A prompt
            that keeps id and seed keeps its tokens (coupled mode), wherever it stands in the batch.
        stop_tokens: ids that end a row, one list or one list a prompt; the stop token is kept.
        progress: told of tokens as they come.
        phase: a context manager factory around "resume", "draft", "verify" and "accept" of every
            round, for timing.

    Errors: ConfigError, before anything runs, if a prompt is empty, has ids outside the vocabulary,
    if prompt + max_new_tokens + gamma + 1 exceeds the model's context or the cache, if the mode cannot
    verify such sampling, or if two prompts share request id and seed. A row whose logits are not finite
    ends with the reason in `errors`; the other rows go on.
    """
    if pacing is not None and drafter is not None:
        raise ConfigError(
            "a pacing brings its own drafters",
            where="generate: drafter, pacing",
            seen="both",
            required="one of them",
            fix="leave out drafter",
        )
    pacing = pacing or Fixed(drafter)
    requests = make_requests(runner, prompts, max_new_tokens, stop_tokens, pacing.max_gamma, sampling, request_ids)
    mode = resolve_mode(verification, [request.sampling for request in requests])
    longest = max((len(request.prompt) + request.limit for request in requests), default=0)
    for each in pacing.drafters:
        each.check(runner, longest + pacing.max_gamma + 1)
    phase = phase or (lambda name: nullcontext())
    slots = [_Slot() for _ in range(runner.cache.max_batch)]
    for row in range(len(requests), len(slots)):
        runner.release_row(row)  # never admitted, it idles at position 0
        slots[row].sampling = requests[0].sampling if requests else SamplingParams()
    waiting = deque(requests)
    shape = LawShape.of([request.sampling for request in requests])
    buffers, run = rounds_of(runner, pacing.drafters, mode, shape)
    rounds: list[Round] = []
    prefill_seconds = draft_prefill_seconds = 0.0

    while True:
        started = time.perf_counter()
        n_waiting = len(waiting)
        for row, slot in enumerate(slots):
            while slot.request is None and waiting:
                _admit(runner, mode, row, slot, waiting.popleft(), progress)
        if len(waiting) < n_waiting or not rounds:
            buffers.set_rows([slot.sampling for slot in slots], [slot.request_id for slot in slots])
            buffers.set_state([slot.length for slot in slots], [slot.current for slot in slots])
        busy = [slot for slot in slots if slot.request]
        choosing = time.perf_counter()
        choice = _choose(pacing) if busy else None
        choice_seconds = time.perf_counter() - choosing
        if choice is not None and choice.drafter is not None:
            # What a drafter does with a prompt is no part of a round, however late it meets it.
            draft_prefill_seconds += _introduce(runner, pacing, choice.drafter, slots, progress)
        prefill_seconds += time.perf_counter() - started - choice_seconds
        if choice is None:
            break

        started = time.perf_counter() - choice_seconds  # choosing is part of the round
        with phase("resume"):
            if choice.drafter is not None:
                _catch_up(pacing.drafters[choice.drafter], choice.drafter, slots)
        extent = runner.cache.capacity if run.captures else max(slot.length for slot in slots) + choice.gamma + 1
        outcomes = _round(runner, pacing, choice, mode, buffers, run, extent, phase)
        emitted, accepted = 0, []
        for slot, outcome in zip(slots, outcomes, strict=True):
            if request := slot.request:
                emitted += _commit(slot, request, outcome)
                accepted.append(len(outcome.block) - 1)
                _tell_if_finished(request, progress)
                if choice.drafter is not None:
                    slot.followed[choice.drafter] = slot.length
        buffers.set_state([slot.length for slot in slots], [slot.current for slot in slots])
        _roll_back(runner, pacing, choice, buffers, run)
        pacing.observe(choice, accepted)
        rounds.append(Round(time.perf_counter() - started, len(busy), emitted, choice))
        if progress:
            progress.emitted(emitted)

    return GenerateOutput(
        tokens=[request.tokens for request in requests],
        finish_reasons=[request.finish_reason for request in requests],
        errors=[request.error for request in requests],
        stats=Stats(
            tuple(request.counts for request in requests), tuple(rounds), prefill_seconds, draft_prefill_seconds
        ),
    )


def _admit(runner: ModelRunner, mode: str, row: int, slot: _Slot, request: Request, progress: Progress | None) -> None:
    """Prefill a prompt into a free slot and emit its first token; the slot stays free if that ends it."""
    prefilled = runner.prefill_row(row, request.prompt, progress.prefilled if progress else None)
    slot.length, slot.sampling, slot.request_id = len(request.prompt), request.sampling, request.id
    slot.followed = {}
    if prefilled.bad_position is not None:
        request.fail(prefilled.bad_position)
        _tell_if_finished(request, progress)
        return
    # The first token ends a round without drafts, whose last known token is the prompt's.
    last = torch.tensor([slot.length - 1], device=runner.device)
    rows = Rows.of([slot.sampling], [slot.request_id], runner.device)
    first = start_round(mode, rows, last, 0, runner.model)

    def next_token() -> Tensor:
        return first.judge(Drafts(last.new_empty(1, 0)), prefilled.logits[None, None]).next_token

    token = int(runner.ranks.decided(next_token, 1))
    request.extend([token])
    if progress:
        progress.emitted(1)
    _tell_if_finished(request, progress)
    if request.finish_reason is None:
        slot.request, slot.current = request, token


def _choose(pacing: Pacing) -> Choice | None:
    """What the pacing chooses. Errors: ConfigError if its drafter has no such gamma."""
    choice = pacing.choose()
    if choice is None:
        return None
    most = 0 if choice.drafter is None else pacing.drafters[choice.drafter].gamma
    if not 0 <= choice.gamma <= most:
        raise ConfigError(
            "a round drafts more than its drafter can",
            where=f"generate: pacing ({type(pacing).__name__})",
            seen=choice,
            required=f"a gamma of 0 to {most}",
            fix="build the drafter with the largest gamma that is chosen",
        )
    return choice


def _introduce(
    runner: ModelRunner, pacing: Pacing, index: int, slots: Sequence[_Slot], progress: Progress | None
) -> float:
    """Tell a drafter of prompts that it does not know; returns the seconds until every rank is done with them."""
    started = time.perf_counter()
    unknown = [
        (row, slot, slot.request) for row, slot in enumerate(slots) if slot.request and index not in slot.followed
    ]
    for row, slot, request in unknown:
        pacing.drafters[index].admit(row, request.id, request.prompt, progress.prefilled if progress else None)
        slot.followed[index] = len(request.prompt)
    if unknown:
        synchronize(runner.device)
        runner.ranks.gathered(None)
    return time.perf_counter() - started


def _catch_up(drafter: Drafter, index: int, slots: Sequence[_Slot]) -> None:
    """Tell a drafter what it missed of rows behind their prompts."""
    for row, slot in enumerate(slots):
        if slot.request and slot.followed[index] != slot.length:
            drafter.resume(row, slot.request.committed, slot.followed[index])
            slot.followed[index] = slot.length


def _tell_if_finished(request: Request, progress: Progress | None) -> None:
    if progress and request.finish_reason:
        progress.finished(request)


@dataclass(frozen=True)
class _Outcome:
    """A row's round: how many tokens were drafted, the accepted ones and the target's own, finite logits."""

    drafted: int
    block: list[int]
    finite: list[int]


def _round(
    runner: ModelRunner,
    pacing: Pacing,
    choice: Choice,
    mode: str,
    buffers: RoundBuffers,
    run: Called | Captured,
    extent: int,
    phase: Callable[[str], AbstractContextManager[object]],
) -> list[_Outcome]:
    """Draft, verify, accept."""
    gamma, drafter = choice.gamma, None if choice.drafter is None else pacing.drafters[choice.drafter]
    lengths, current = buffers.lengths, buffers.current
    verification = start_round(mode, buffers.rows, lengths, gamma, runner.model)

    def draft() -> Drafts:
        if drafter is None:
            return Drafts(current.new_empty(len(current), 0))
        return drafter.propose(current, lengths, extent, verification, gamma)

    def verify() -> tuple[Tensor, Tensor]:
        block = torch.cat([current[:, None], drafts.tokens], dim=1)
        positions = lengths[:, None] + torch.arange(gamma + 1, device=runner.device)
        return block, runner.step(block, positions, extent, drafter.verification_cache if drafter else None)

    def decide() -> Tensor:
        verdict = verification.judge(drafts, logits)
        drafted = torch.full_like(lengths, gamma) if drafts.lengths is None else drafts.lengths
        counts = torch.stack([drafted, verdict.num_accepted, verdict.next_token], dim=1)
        return torch.cat([counts, drafts.tokens, finite_rows(logits)], dim=1)

    with phase("draft"):
        drafts = draft() if drafter is None else run(("draft", choice), draft)
    with phase("verify"):
        block, logits = run(("verify", choice), verify)
    with phase("accept"):
        decided = run(("accept", choice), lambda: runner.ranks.decided(decide, len(lengths), 3 + gamma + gamma + 1))
        packed = decided.tolist()  # the round's one read from the device
    runner.ranks.require_same(lambda: f"a round from positions {lengths.tolist()}", lambda: (lengths, block, decided))
    return [
        _Outcome(n_drafted, [*rest[:num_accepted], next_token], rest[gamma:])
        for n_drafted, num_accepted, next_token, *rest in packed
    ]


def _roll_back(
    runner: ModelRunner, pacing: Pacing, choice: Choice, buffers: RoundBuffers, run: Called | Captured
) -> None:
    """Forget what the round wrote behind the lengths that it left; other drafters took no part in it."""

    def rollback() -> None:
        runner.cache.rollback(buffers.lengths)
        if choice.drafter is not None:
            pacing.drafters[choice.drafter].rollback(buffers.lengths)

    run(("rollback", choice), rollback)


def _commit(slot: _Slot, request: Request, outcome: _Outcome) -> int:
    """Cut a row's accepted block at its first stop token or limit, then set its length, then count."""
    block = outcome.block
    bad = next((i for i, ok in enumerate(outcome.finite[: len(block)]) if not ok), None)
    kept = request.extend(block if bad is None else block[:bad])
    request.counts.add_round(outcome.drafted, len(block) - 1, kept)
    if bad is not None and request.finish_reason is None:
        request.fail(slot.length + bad)
    if request.finish_reason is None:
        slot.length += kept
        slot.current = block[-1]
    else:
        slot.request = None
    return kept
