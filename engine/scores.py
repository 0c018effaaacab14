"""The log-probabilities that requests ask for: of their prompts' tokens, and of the tokens that they get."""

from collections.abc import Sequence

from torch import Tensor

from engine.requests import Request
from engine.runner import ModelRunner
from engine.sampling.distribution import Logprob, logprobs_of

SCORED = 128  # positions of a prompt whose logits `[n, V]` are in memory at a time


def score_prompt(runner: ModelRunner, request: Request, start: int, hidden: Tensor) -> None:
    """Append log-probabilities of the prompt's tokens after positions `start` on, by `hidden [n, dim]`."""
    assert request.prompt_logprobs is not None
    del request.prompt_logprobs[start:]  # of a prefill that was interrupted
    following = request.prompt[start + 1 : start + 1 + len(hidden)]
    for first in range(0, len(following), SCORED):
        tokens = following[first : first + SCORED]
        logits = runner.model.logits(hidden[first : first + len(tokens)])
        if runner.ranks.leads:
            request.prompt_logprobs += logprobs_of([tokens], logits[None], [request.n_top])[0]


def scores_of(
    runner: ModelRunner, requests: Sequence[Request | None], blocks: Sequence[list[int]], logits: Tensor
) -> list[list[Logprob]]:
    """Return log-probabilities of each request's block by `logits [B, T, V]`: on the leader, and for requests that want
    them."""
    wants = [runner.ranks.leads and request is not None and request.logprobs is not None for request in requests]
    wanted = [block if is_wanted else [] for block, is_wanted in zip(blocks, wants, strict=True)]
    return logprobs_of(wanted, logits, [request.n_top if request else 0 for request in requests])
