"""The distribution of the next token: logits -> temperature -> joint top-k and top-p -> probabilities.

Target and draft go through the same functions. Greedy is a mode of its own, not a small temperature:
its distribution is a point mass on the lowest id among the largest logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from common.errors import ConfigError, flag
from engine.noise import triton_kernels

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e6
ALL = 2**63 - 1  # of a vocabulary
WHOLE = 2.0**62  # the mass of all ids
DIGIT = 11  # bits of a value that a search for the last one kept looks at together


@dataclass(frozen=True)
class SamplingParams:
    """How one request's next token is chosen.

    temperature: divides the logits; 0 is greedy. top_k: keep the k likeliest ids; 0 keeps all. top_p: keep the
    likeliest ids until their mass reaches top_p; 1 keeps all. The two filters are joint: both look at the unfiltered
    distribution at that temperature, and an id has to pass both; ties go to the lowest id. seed: the random numbers'
    key, the same for every machine, batch and drafter. Errors: ConfigError naming the field that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = f"0 (greedy), or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}"
        heat, top_p = self.temperature, self.top_p
        fits = _is_number(heat) and (heat == 0 or MIN_TEMPERATURE <= heat <= MAX_TEMPERATURE)
        checks = (
            ("temperature", fits, bounds, "use 0 for greedy decoding, 0.6 to 1 for usual sampling"),
            ("top_k", _is_int63(self.top_k), "an integer, 0 <= top_k < 2**63", "use 0 to keep every token"),
            ("top_p", _is_number(top_p) and 0 < top_p <= 1, "0 < top_p <= 1", "use 1 to keep every token"),
            ("seed", _is_int63(self.seed), "an integer, 0 <= seed < 2**63", "use a smaller non-negative integer"),
        )
        for name, good, required, fix in checks:
            if not good:
                where = f"SamplingParams.{name} ({flag(name)})"
                raise ConfigError(f"{name} is out of range", where, repr(getattr(self, name)), required, fix)
        for name in ("top_k", "seed"):  # numpy's integers have no bit_length
            object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    @cached_property
    def needs(self) -> Filters:
        """The steps that this distribution takes."""
        most_kept = self.top_k or (1 if self.greedy else ALL)
        return Filters(self.top_k > 0, self.top_p < 1, self.greedy, most_kept)


class Filters(NamedTuple):
    """Which steps the distributions of some rows take at all; a step too many changes none. most_kept: the largest
    top-k of a row; `ALL` where a sampled row has none."""

    any_top_k: bool = False
    any_top_p: bool = False
    any_greedy: bool = False
    most_kept: int = 0

    @classmethod
    def of(cls, rows: Iterable[SamplingParams]) -> Filters:
        return cls._make(map(max, zip(cls(), *(row.needs for row in rows), strict=True)))

    def __or__(self, other: Filters) -> Filters:
        """Those of both."""
        return Filters._make(map(max, self, other))


@dataclass(frozen=True)
class Distribution:
    """The sampling parameters of a batch's rows as tensors `[B]`; those of rows that do not filter exclude nothing."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    filters: Filters

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParams], device: str | torch.device = "cpu", filters: Filters | None = None
    ) -> Distribution:
        """`filters` may be those of more rows than these."""
        top_p = [row.top_p if row.top_p < 1 else math.inf for row in rows]
        return cls(
            torch.tensor([row.temperature for row in rows], dtype=torch.float64, device=device),
            torch.tensor([row.top_k or ALL for row in rows], device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            filters or Filters.of(rows),
        )

    def first(self, n: int) -> Distribution:
        """Of the first rows, in the same tensors."""
        return Distribution(self.temperature[:n], self.top_k[:n], self.top_p[:n], self.filters)

    def copy_(self, other: Distribution) -> None:
        """Take over the values of other rows of the same filters, in place."""
        for name in ("temperature", "top_k", "top_p"):
            getattr(self, name).copy_(getattr(other, name))

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[B, ..., V]`, -inf where an id is excluded; float64 for float64 logits, else float32."""
        return self._filtered(logits).log_softmax(dim=-1)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities, shape and dtype as `logprobs`."""
        return self._filtered(logits).softmax(dim=-1)

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """Scaled logits, the largest of them 0, with -inf where a filter excludes an id."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        temperature = _like(self.temperature, logits)
        # The largest is subtracted first: any temperature then scales towards -inf, never to inf - inf.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=MIN_TEMPERATURE)
        if self.filters.any_top_k or self.filters.any_top_p:
            if not scaled.is_cpu and (kernels := triton_kernels()):
                scaled = kernels.run(kernels.plan_filter(scaled, self.top_k, self.top_p))
            else:
                scaled = scaled.masked_fill(~self.kept(scaled), -math.inf)
        if self.filters.any_greedy:
            point = torch.full_like(scaled, -math.inf).scatter_(-1, greedy(logits)[..., None], 0.0)
            scaled = torch.where(temperature == 0, point, scaled)
        return scaled

    def kept(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return which ids of `scaled [B, ..., V]`, scaled logits of which the largest is 0, pass both filters: the
        likeliest of each row, lowest ids first among equals."""
        top_k, top_p = _like(self.top_k, scaled, torch.int64), _like(self.top_p, scaled, torch.float64) * WHOLE

        def masses(values: torch.Tensor) -> torch.Tensor:
            """Return each id's mass as an integer, so that sums do not depend on their order."""
            log_sum = scaled.double().logsumexp(dim=-1, keepdim=True)
            return ((values.double() - log_sum).exp_() * WHOLE).long()

        if self.filters.most_kept == ALL:
            kept = _before(scaled, masses(scaled), top_p) if self.filters.any_top_p else torch.ones_like(scaled).bool()
            return kept & _before(scaled, torch.ones_like(scaled).long(), top_k) if self.filters.any_top_k else kept
        descending = scaled.topk(min(self.filters.most_kept, scaled.shape[-1]), dim=-1).values
        kept = (torch.arange(descending.shape[-1], device=scaled.device) < top_k).expand_as(descending)
        if self.filters.any_top_p:
            mass = masses(descending)
            kept = kept & (mass.cumsum(dim=-1) - mass < top_p)
        n = kept.sum(dim=-1, keepdim=True)
        threshold = descending.gather(-1, n - 1)
        above = scaled > threshold
        tied = scaled == threshold
        return above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= n - above.sum(dim=-1, keepdim=True)))


def _before(scaled: torch.Tensor, mass: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return which ids of a row have less than `limit [B, ..., 1]` of the mass, int64, before them, in likelier ids and
    in lower ones as likely. Finds the last value kept without a sort, digit by digit, by the mass of each digit."""
    bits = 8 * scaled.element_size() - 1
    # Nothing is above 0: in the order of these integers, the likeliest come first.
    key = scaled.view(torch.int64 if bits == 63 else torch.int32).long() & (1 << bits) - 1
    last = before = torch.zeros_like(limit, dtype=torch.int64)
    for shift in reversed(range(0, bits, DIGIT)):
        digit = key >> shift & (1 << DIGIT) - 1
        each = mass.new_zeros(*mass.shape[:-1], 1 << min(DIGIT, bits - shift)).scatter_add_(-1, digit, mass)
        sums = before + each.cumsum(dim=-1) - each
        at = ((sums < limit).sum(dim=-1, keepdim=True) - 1).clamp(min=0)  # where a mass is NaN, there may be none
        last, before, mass = last | at << shift, sums.gather(-1, at), mass * (digit == at)
    tied = key == last
    return (key < last) | (tied & (before + (tied.cumsum(dim=-1) - 1) * mass < limit))


def logits_to_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution of the next token: `[..., V] -> [..., V]`, float64 for float64 logits, else float32."""
    return Distribution.of([params], logits.device).probs(logits[None])[0]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit's id: `[..., V] -> [...]` int64; ties go to the lowest id, as argmax promises."""
    return logits.argmax(dim=-1)


def logprobs_of(blocks: Sequence[Sequence[int]], logits: torch.Tensor) -> list[list[float]]:
    """Return the log-probabilities of each row's tokens by its `logits [B, T, V]`, T or fewer, at temperature 1 without
    filters; all are read from the device at once."""
    places = [(row, i, token) for row, block in enumerate(blocks) for i, token in enumerate(block)]
    row, i, token = torch.tensor(places, device=logits.device).T
    chosen = logits[row, i].float()
    values = (chosen.gather(1, token[:, None])[:, 0] - chosen.logsumexp(dim=-1)).cpu()
    return [part.tolist() for part in values.split([*map(len, blocks)])]


def is_integer(value: object) -> bool:
    """True for Python's and numpy's integers; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_int63(value: Any) -> bool:
    return is_integer(value) and 0 <= value < 2**63


def _like(per_row: torch.Tensor, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`per_row [B]` shaped to broadcast against `x [B, ..., V]`."""
    return per_row.to(dtype or x.dtype).reshape(-1, *[1] * (x.dim() - 1))
