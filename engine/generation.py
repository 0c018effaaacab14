"""generate(): submit all prompts to a decoder, and step until they are done."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.decoding import Decoder
from engine.drafters import Drafter
from engine.requests import FinishReason, make_requests
from engine.runner import ModelRunner, not_finite
from engine.sampling.distribution import SamplingParams
from engine.stats import RoundStats, Stats


@dataclass(frozen=True)
class GenerateOutput:
    """The outputs of all prompts, in their order.

    tokens: the new tokens, a stop token included. finish_reasons: None where a controller ended the decode before the
    prompt was done. errors: why a prompt ended early, or None.
    """

    tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    errors: list[str | None]
    stats: Stats

    def require_finite(self, where: str) -> None:
        """Raise UserError naming rows and positions if any row ended because its logits were not finite."""
        if broken := [error for error in self.errors if error]:
            raise not_finite(where, "; ".join(broken[:8]))


class Generation:
    """The prompts of a `generate` call, decoded in parts: `run` goes on where the last `run` ended."""

    def __init__(
        self,
        runner: ModelRunner,
        prompts: Iterable[Iterable[int]],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[int] | None = None,
        numbered_from: int = 0,
        stop_tokens: Iterable[int] | Iterable[Iterable[int]] = (),
        **decoder_options: Any,
    ) -> None:
        self.decoder, self.rounds, self.done = Decoder(runner, **decoder_options), list[RoundStats](), False
        self.requests = make_requests(prompts, max_new_tokens, stop_tokens, sampling, request_ids, numbered_from)
        for request in self.requests:
            self.decoder.submit(request)

    @property
    def n_unfinished(self) -> int:
        """Requests that have not ended."""
        return sum(request.finish_reason is None for request in self.requests)

    def run(self, n_tokens: float = math.inf) -> None:
        """Step until all rows together have emitted `n_tokens` tokens, or there is nothing left to do."""
        while not self.done and sum(len(request.tokens) for request in self.requests) < n_tokens:
            if (round_ := self.decoder.step()) is not None:
                self.rounds.append(round_)
            elif not self.decoder.is_prefilling:
                self.done = True

    @property
    def output(self) -> GenerateOutput:
        """The tokens, reasons and counts so far."""
        requests, decoder = self.requests, self.decoder
        prefill_seconds = decoder.prefill_seconds, decoder.draft_prefill_seconds
        stats = Stats(tuple(request.counts for request in requests), (tuple(self.rounds),), *prefill_seconds)
        errors = [request.error and f"row {request.index}: {request.error}" for request in requests]
        reasons = [request.finish_reason for request in requests]
        return GenerateOutput([request.tokens for request in requests], reasons, errors, stats)


def generate(
    runner: ModelRunner,
    prompts: Iterable[Iterable[int]],
    *,
    max_new_tokens: int | Sequence[int],
    drafter: Drafter | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    verification: str = "auto",
    stop_tokens: Iterable[int] | Iterable[Iterable[int]] = (),
    **options: Any,
) -> GenerateOutput:
    """Continue every prompt, any number of them of any lengths; return their tokens and counts.

    Args:
        prompts: token ids; generators are read to their end.
        max_new_tokens, sampling (None: greedy), stop_tokens (which are kept): a single value, or a value
            per prompt.
        drafter, verification: see `Decoder`.
        options: other arguments of `Decoder`, and `request_ids`, which key each prompt's random numbers next to its
            seed (default: its index). In coupled mode a prompt with the same id and seed gets the same tokens,
            wherever it stands in the batch.

    Raises:
        ConfigError: before anything runs, as `Decoder.submit`, or if two prompts share request id and seed.
    """
    options |= {"drafter": drafter, "sampling": sampling, "verification": verification, "stop_tokens": stop_tokens}
    generation = Generation(runner, prompts, max_new_tokens=max_new_tokens, **options)
    generation.run()
    return generation.output
