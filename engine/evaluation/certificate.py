"""The production-precision certificate: low-precision output differs from plain decoding only at near-ties.

Nothing here speculates. Write z for the logits of 1-token forwards and z' for the logits of (gamma + 1)-token forwards
of the same text. If, up to a shift of all logits, no entry of z' is further than eps from z, an argmax b of z' that is
not the argmax a of z has z[a] - z[b] <= 2 eps. So eps is measured on forced text, and 2 eps bounds emitted tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from common.errors import refuse
from engine.runner import ModelRunner, not_finite
from engine.sampling.distribution import Distribution, SamplingParams, argmax
from engine.sampling.noise import Stream, gumbel
from kv_cache import KVCache
from kv_cache.entries import LARGEST
from models import Transformer

# The share of calibrated positions that may flip, by the model's dtype; well above the default model's share
# (docs/lossless.md).
MAX_FLIP_SHARE = {torch.float64: 0.0, torch.float32: 0.002, torch.bfloat16: 0.05, torch.float16: 0.05}
# For a float32 model over 8-bit entries.
MAX_FLIP_SHARE |= dict.fromkeys(LARGEST, 0.02)


@dataclass(frozen=True)
class Calibration:
    """The distance of 1-token and (gamma + 1)-token forwards, over `positions` forced tokens.

    eps: the largest difference of a logit, after the shift of all logits that makes it smallest: a shift changes no
    choice. flips: positions where the two have another argmax. max_flip_share: the share of positions where rounding
    explains that.
    """

    eps: float
    flips: int
    positions: int
    max_flip_share: float

    @property
    def trusted(self) -> bool:
        """False if the two disagree more often than rounding explains: then eps measures an error in forwards of
        several tokens, and a bound of 2 eps would excuse anything."""
        return self.flips <= self.max_flip_share * self.positions


@dataclass(frozen=True)
class Replay:
    """The scores of plain decoding (see `_scores`) at each emitted token `[B, n]`.

    gap: the top score less the second. deficit: the top score less the emitted token's. flipped: True if plain decoding
    chooses another token.
    """

    gap: Tensor
    deficit: Tensor
    flipped: Tensor


@dataclass(frozen=True)
class Certificate:
    """Counts over the emitted tokens. A near-tie has a gap of at most 2 eps; a flip with a larger deficit lies outside.
    largest_gap_at_flip: the largest deficit; None without a flip."""

    rows: int
    tokens: int
    near_ties: int
    flips: int
    flips_outside_near_ties: int
    largest_gap_at_flip: float | None

    @property
    def holds(self) -> bool:
        return self.flips_outside_near_ties == 0


@torch.inference_mode()
def calibrate(
    model: Transformer, cache: KVCache, prompts: Sequence[Sequence[int]], forced: Tensor, block: int
) -> Calibration:
    """Compare forwards of `block` = gamma + 1 tokens with 1-token forwards at the same positions of the same text.

    The whole text runs twice after the prompts, each time over the entries that its forwards have left: a unit in the
    last place makes another 8-bit entry, and these add up. The first logits `[B, n, V]` are kept in the host's memory.
    cache: with a row for each prompt, which is filled anew. forced: `[B, n]` int64 on the cache's device, the text
    after each prompt, in whole blocks. Errors: UserError if a logit is not finite.
    """
    n_tokens = forced.shape[1]
    assert n_tokens % block == 0 and n_tokens > 0
    runner = ModelRunner(model, cache)
    lengths, _ = _prefill_anew(runner, prompts)
    columns = []
    at_once = [logits.cpu() for logits in _forced_logits(runner, lengths, forced, block)]
    for logits, kept in zip(_forced_logits(runner, lengths, forced, 1), at_once, strict=True):
        single, blocks = logits.to(torch.promote_types(model.dtype, torch.float32)), kept.to(cache.device)
        difference = blocks.to(single.dtype) - single
        apart = (difference.amax(dim=-1) - difference.amin(dim=-1)) / 2
        columns.append((apart, argmax(single) != argmax(blocks)))
    worst, flipped = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    _require_finite(worst, lengths, "calibration")
    in_8_bits = model.dtype == torch.float32 and cache.keys.dtype in LARGEST
    return Calibration(
        eps=float(worst.max()),
        flips=int(flipped.sum()),
        positions=worst.numel(),
        max_flip_share=MAX_FLIP_SHARE[cache.keys.dtype if in_8_bits else model.dtype],
    )


@torch.inference_mode()
def replay(
    model: Transformer,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    emitted: Tensor,
    sampling: SamplingParams | None = None,
) -> Replay:
    """Compare plain decoding, in a cache filled anew, with `emitted` tokens `[B, n]` (int64, on the cache's device).
    Each step runs the emitted token, so that after a difference the comparison goes on from the emitted prefix.

    sampling: None or temperature 0 is greedy; otherwise the coupled mode's choices, row b being request b. Errors:
    ConfigError if it filters (whether an id passes is a near-tie of another kind) or edits logits; UserError if a score
    is not finite.
    """
    sampling = sampling or SamplingParams()
    if sampling != SamplingParams(sampling.temperature, seed=sampling.seed):
        what, fix = "the certificate covers neither filters nor edits", "certify with a temperature alone"
        refuse("certificate: sampling", sampling, "a temperature and a seed", what, fix)
    runner = ModelRunner(model, cache)
    lengths, first = _prefill_anew(runner, prompts)
    columns = []
    for i, logits in enumerate(chain([first], _forced_logits(runner, lengths, emitted[:, :-1], 1))):
        scores = _scores(logits, lengths + i, sampling)
        top, second = scores.topk(2, dim=-1).values.unbind(dim=-1)
        deficit = top - scores.gather(1, emitted[:, i : i + 1])[:, 0]
        columns.append((top - second, deficit, argmax(scores) != emitted[:, i]))
    gap, deficit, flipped = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    _require_finite(deficit, lengths, "reference")
    return Replay(gap.cpu(), deficit.cpu(), flipped.cpu())


def certify(seen: Replay, eps: float) -> Certificate:
    """Compare every deficit with `2 * eps`, with eps in the unit of the scores: logits over the temperature."""
    at_flips = seen.deficit[seen.flipped]
    return Certificate(
        rows=len(seen.flipped),
        tokens=seen.flipped.numel(),
        near_ties=int((seen.gap <= 2 * eps).sum()),
        flips=len(at_flips),
        flips_outside_near_ties=int((at_flips > 2 * eps).sum()),
        largest_gap_at_flip=float(at_flips.max()) if len(at_flips) else None,
    )


def _scores(logits: Tensor, positions: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the scores whose argmax is the token at `positions [B]`, `[B, V] -> [B, V]`, in float32 or better."""
    if sampling.greedy:
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = Distribution.of([sampling] * len(logits), logits.device).logprobs(logits)
    request = torch.arange(len(logits), device=logits.device)
    seed = torch.full_like(request, sampling.seed)
    return logprobs + gumbel(seed, request, positions, Stream.COUPLED, logits.shape[-1], logprobs.dtype)


def _prefill_anew(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Fill every row with its prompt; return their lengths `[B]`, and the logits `[B, V]` after each."""
    assert len(prompts) == runner.max_batch
    logits = []
    for row, prompt in enumerate(prompts):
        runner.cache.reset_row(row)
        logits.append(runner.prefill(row, prompt).logits)
    return torch.tensor([len(prompt) for prompt in prompts], device=runner.device), torch.stack(logits)


def _forced_logits(runner: ModelRunner, lengths: Tensor, text: Tensor, width: int) -> Iterator[Tensor]:
    """Yield the logits `[B, V]` after each token of `text [B, n]` after the prompts, `width` tokens at once."""
    runner.cache.rollback(lengths)
    longest = int(lengths.max())
    for start in range(0, text.shape[1], width):
        positions = lengths[:, None] + start + torch.arange(width, device=runner.device)
        view = runner.cache.view(extent=longest + start + width)
        yield from runner.step(text[:, start : start + width], positions, view).unbind(1)


def _require_finite(values: Tensor, lengths: Tensor, where: str) -> None:
    """Raise UserError unless all `values [B, n]` are finite: NaN would pass as no flip, infinity as any."""
    if bad := (~torch.isfinite(values)).nonzero().tolist():
        row, index = bad[0]
        seen = f"row {row}, the token at position {int(lengths[row]) + index}, and {len(bad) - 1} more"
        raise not_finite(f"{where} of a certificate", seen)
