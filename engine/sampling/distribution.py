"""The distribution of the next token: edited logits -> temperature -> min-p -> joint top-k and top-p -> typical-p.

Target and draft go through the same functions. Greedy is a separate mode, not a small temperature:
its distribution is a point mass on the lowest id among the largest logits.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from numbers import Integral, Real
from operator import index as as_integer
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from common.errors import flag, refuse
from engine.sampling.noise import triton_kernels
from models.kernels.build import use_kernel

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e6
ALL = 2**63 - 1  # the number of ids that pass where there is no top-k
WHOLE = 2.0**62  # the mass of all ids
MOST_BANS, LONGEST_BAN = 128, 16  # sequences that a request may exclude, and the tokens of each
PIECE = 64  # ids whose largest score is found at once
DIGIT = 11  # bits that each step of the search for the last kept value looks at


@dataclass(frozen=True)
class SamplingParams:
    """The rule that chooses a request's next token.

    temperature: divides the logits; 0 is greedy. top_k: keep the k likeliest ids; 0 keeps all. top_p: keep the
    likeliest ids until their mass reaches top_p; 1 keeps all. The two filters are joint: both look at the unfiltered
    distribution at that temperature, and an id has to pass both; ties go to the lowest id. seed: keys the random
    numbers, equally on every machine, in every batch and with every drafter.

    min_p: exclude ids less likely than this share of the likeliest, before the other filters. typical_p: of what these
    keep, keep the ids whose surprise is closest to the entropy until their mass reaches typical_p (Meister et al. 2023,
    arXiv 2202.00666); 1 keeps all.

    The other fields edit the logits before the temperature, greedy decoding included. logit_bias: a mapping of ids to
    numbers that are added. repetition_penalty: divides positive and multiplies negative logits of ids of prompt and
    answer (Keskar et al. 2019, arXiv 1909.05858). frequency_penalty, presence_penalty: subtracted for each occurrence
    of an id in the answer, and once for an id that occurs. min_tokens: the answer's first tokens, which are no stop
    token. bad_words: sequences of ids that the answer does not contain. An excluded id is drawn only where all others
    are excluded, too.

    Errors: ConfigError naming a field that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # kept as pairs
    bad_words: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        temperatures = f"0 (greedy), or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}"
        lengths, sequences = range(1, LONGEST_BAN + 1), f"at most {MOST_BANS} sequences of 1 to {LONGEST_BAN} ids"
        checks = (
            ("temperature", Real, lambda x: x == 0 or MIN_TEMPERATURE <= x <= MAX_TEMPERATURE, temperatures),
            ("top_k", Integral, lambda k: 0 <= k < 2**63, "an integer, 0 (every token) <= top_k < 2**63"),
            ("top_p", Real, lambda p: 0 < p <= 1, "0 < top_p <= 1 (every token)"),
            ("seed", Integral, lambda seed: 0 <= seed < 2**63, "an integer, 0 <= seed < 2**63"),
            ("min_p", Real, lambda p: 0 <= p <= 1, "0 (every token) <= min_p <= 1"),
            ("typical_p", Real, lambda p: 0 < p <= 1, "0 < typical_p <= 1 (every token)"),
            ("repetition_penalty", Real, lambda x: 0.01 <= x <= 100, "0.01 to 100; 1 changes nothing"),
            ("presence_penalty", Real, lambda x: -2 <= x <= 2, "-2 to 2"),
            ("frequency_penalty", Real, lambda x: -2 <= x <= 2, "-2 to 2"),
            ("min_tokens", Integral, lambda n: 0 <= n < 2**31, "an integer, 0 <= min_tokens < 2**31"),
            ("logit_bias", tuple, lambda bias: all(abs(x) <= 100 for _, x in bias), "-100 to 100 by id"),
            ("bad_words", tuple, lambda bans: len(bans) <= MOST_BANS and {*map(len, bans)} <= {*lengths}, sequences),
        )
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        try:
            object.__setattr__(self, "logit_bias", tuple((as_integer(id_), float(x)) for id_, x in bias))
            object.__setattr__(self, "bad_words", tuple(tuple(map(as_integer, ids)) for ids in self.bad_words))
        except (TypeError, ValueError) as error:
            what, required = "biases or bans cannot be read", "numbers by token id; lists of token ids"
            refuse("SamplingParams.logit_bias or .bad_words", error, required, what, "name token ids as integers")
        for name, kind, fits, required in checks:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
                where = f"SamplingParams.{name} ({flag(name)})"
                refuse(where, repr(value), required, f"{name} is out of range", f"choose another {name}")
            if kind is Integral:  # numpy's integers have no bit_length
                object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def edits(self) -> bool:
        """True if the logits are edited before the temperature."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or self.min_tokens > 0 or bool(self.logit_bias or self.bad_words)

    @property
    def ids(self) -> list[int]:
        """The ids that biases and bans name."""
        return [*dict(self.logit_bias), *chain(*self.bad_words)]

    @cached_property
    def needs(self) -> Filters:
        """The filtering steps that this distribution needs."""
        most_kept = self.top_k or (1 if self.greedy else ALL)
        others = self.min_p > 0, self.typical_p < 1, self.edits
        return Filters(self.top_k > 0, self.top_p < 1, self.greedy, most_kept, *others)


class Filters(NamedTuple):
    """The filtering steps that any of some rows need; a row that does not need a step is not changed by it.

    most_kept: the largest top-k of a row; `ALL` if a sampled row has no top-k.
    """

    any_top_k: bool = False
    any_top_p: bool = False
    any_greedy: bool = False
    most_kept: int = 0
    any_min_p: bool = False
    any_typical_p: bool = False
    any_edits: bool = False

    @classmethod
    def of(cls, rows: Iterable[SamplingParams]) -> Filters:
        return cls._make(map(max, zip(cls(), *(row.needs for row in rows), strict=True)))

    @property
    def adds_up(self) -> bool:
        """True if PyTorch adds up a row's probabilities on a CPU, in another order for a single row than for more."""
        return self.any_typical_p or (self.any_top_p and _kernel() is None)

    def __or__(self, other: Filters) -> Filters:
        return Filters._make(map(max, self, other))


NO_FILTERS = Filters()


class Distribution(NamedTuple):
    """The sampling parameters of a batch's rows as tensors `[B]`; a row without filters excludes nothing."""

    filters: Filters
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParams], device: str | torch.device = "cpu", filters: Filters | None = None
    ) -> Distribution:
        """Return the distribution of some rows; `filters` may be those of further rows, too."""
        top_p = [row.top_p if row.top_p < 1 else math.inf for row in rows]
        typical_p = [row.typical_p if row.typical_p < 1 else math.inf for row in rows]
        floats = [[row.temperature for row in rows], top_p, [row.min_p for row in rows], typical_p]
        top_k = torch.tensor([row.top_k or ALL for row in rows], device=device)
        return cls(filters or Filters.of(rows), top_k, *torch.tensor(floats, dtype=torch.float64, device=device))

    def first(self, n: int) -> Distribution:
        """Return the first n rows, in the same tensors."""
        return Distribution(self.filters, *(x[:n] for x in self[1:]))

    def copy_(self, other: Distribution) -> None:
        """Copy the values of other rows with the same filters, in place."""
        for x, new in zip(self[1:], other[1:], strict=True):
            x.copy_(new)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities `[B, ..., V]`, -inf where an id is excluded; float64 for float64 logits, else
        float32."""
        return self._filtered(logits).log_softmax(dim=-1)

    def probs(self, logits: Tensor) -> Tensor:
        """Return probabilities in the shape and dtype of `logprobs`."""
        return self._filtered(logits).softmax(dim=-1)

    def _filtered(self, logits: Tensor) -> Tensor:
        """Return scaled logits with -inf where a filter excludes an id."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        temperature = _like(self.temperature, logits)
        # The largest is subtracted first: any temperature then scales towards -inf, never to inf - inf.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=MIN_TEMPERATURE)
        if self.filters.any_min_p:
            scaled = scaled.masked_fill(scaled < _like(self.min_p, scaled).log(), -math.inf)
        if self.filters.any_top_k or self.filters.any_top_p:
            if not scaled.is_cpu and (kernels := triton_kernels()):
                scaled = kernels.run(kernels.plan_filter(scaled, self.top_k, self.top_p))
            elif scaled.is_cpu and scaled.dtype == torch.float32 and (run := _kernel()):
                scaled = run(scaled, self.top_k, self.top_p)
            else:
                scaled = scaled.masked_fill(~self.kept(scaled), -math.inf)
        if self.filters.any_typical_p:
            logprobs = scaled.log_softmax(dim=-1)
            entropy = torch.special.entr(logprobs.exp()).sum(dim=-1, keepdim=True)
            limit = _like(self.typical_p, scaled, torch.float64) * WHOLE
            typical = _before(-(logprobs + entropy).abs(), _masses(scaled, scaled), limit)
            scaled = scaled.masked_fill(~typical, -math.inf)
        if self.filters.any_greedy:
            point = torch.full_like(scaled, -math.inf).scatter_(-1, argmax(logits)[..., None], 0.0)
            scaled = torch.where(temperature == 0, point, scaled)
        return scaled

    def kept(self, scaled: Tensor) -> Tensor:
        """Return which ids pass both filters: the likeliest, and among equals the lowest. `scaled [B, ..., V]` are
        scaled logits, the largest of each row 0."""
        top_k, top_p = _like(self.top_k, scaled, torch.int64), _like(self.top_p, scaled, torch.float64) * WHOLE
        if self.filters.most_kept == ALL:
            kept = torch.ones_like(scaled).bool()
            if self.filters.any_top_p:
                kept = _before(scaled, _masses(scaled, scaled), top_p)
            return kept & _before(scaled, torch.ones_like(scaled).long(), top_k) if self.filters.any_top_k else kept
        descending = scaled.topk(min(self.filters.most_kept, scaled.shape[-1]), dim=-1).values
        kept = (torch.arange(descending.shape[-1], device=scaled.device) < top_k).expand_as(descending)
        if self.filters.any_top_p:
            mass = _masses(descending, scaled)
            kept = kept & (mass.cumsum(dim=-1) - mass < top_p)
        n = kept.sum(dim=-1, keepdim=True)
        threshold = descending.gather(-1, n - 1)
        above = scaled > threshold
        tied = scaled == threshold
        return above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= n - above.sum(dim=-1, keepdim=True)))


Filter: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def filtered_by(library: ctypes.CDLL) -> Filter:
    """Return a function that puts -inf in the place of what `Distribution.kept` leaves out, by the C++ kernel."""
    kernel = library.foretoken_filter
    kernel.argtypes, kernel.restype = [*[c_int64] * 3, *[c_void_p] * 4, c_int], None

    def run(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        scaled, top_k, limit = scaled.contiguous(), top_k.contiguous(), top_p * WHOLE
        out, n_rows, n_ids = torch.empty_like(scaled), scaled.shape[0], scaled.shape[-1]
        read = top_k.data_ptr(), limit.data_ptr(), scaled.data_ptr()
        kernel(n_rows, math.prod(scaled.shape[1:-1]), n_ids, *read, out.data_ptr(), torch.get_num_threads())
        return out

    return run


@functools.cache
def _kernel() -> Filter | None:
    """Return the function that filters by the C++ kernel; None if that cannot be built."""
    return use_kernel("filter", filtered_by, "PyTorch applies top-k and top-p")


def _masses(values: Tensor, scaled: Tensor) -> Tensor:
    """Return the mass of each of some scaled `values` of a row as an integer: sums do not depend on their order."""
    log_sum = scaled.double().logsumexp(dim=-1, keepdim=True)
    return ((values.double() - log_sum).exp_() * WHOLE).long()


def _before(scaled: Tensor, mass: Tensor, limit: Tensor) -> Tensor:
    """Return which ids have less than `limit [B, ..., 1]` of the mass (int64) before them: in likelier ids, and in
    lower ids that are as likely. The last value kept is found without a sort, digit by digit, by each digit's mass."""
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
    return (key < last) | (tied & (before + (mass * tied).cumsum(dim=-1) - mass < limit))


def logits_to_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution of the next token: `[..., V] -> [..., V]`, float64 for float64 logits, else float32."""
    return Distribution.of([params], logits.device).probs(logits[None])[0]


def argmax(scores: Tensor) -> Tensor:
    """Return the id of the largest score: `[..., V] -> [...]` int64; ties go to the lowest id.

    On a CPU the largest score of each PIECE is found first: PyTorch 2.13 vectorises amax, but not argmax.
    """
    if scores.device.type != "cpu" or scores.shape[-1] % PIECE:
        return scores.argmax(dim=-1)
    pieces = scores.unflatten(-1, (-1, PIECE))
    first = pieces.amax(dim=-1).argmax(dim=-1)
    return first * PIECE + pieces.take_along_dim(first[..., None, None], dim=-2).squeeze(-2).argmax(dim=-1)


class Logprob(NamedTuple):
    """The log-probability of a token, and the likeliest ids at its position with theirs, the likeliest first."""

    value: float
    top: list[tuple[int, float]]


def logprobs_of(blocks: Sequence[Sequence[int]], logits: Tensor, n_top: Sequence[int]) -> list[list[Logprob]]:
    """Return the log-probabilities of each row's tokens, at most T of them, and of its `n_top` likeliest ids, by its
    `logits [B, T, V]` at temperature 1 without filters. All are read from the device at once."""
    index = [(row, i, token) for row, block in enumerate(blocks) for i, token in enumerate(block)]
    if not index:
        return [[] for _ in blocks]
    row, i, token = torch.tensor(index, device=logits.device).T
    chosen = logits[row, i].float()
    log_sum = chosen.logsumexp(dim=-1, keepdim=True)
    values = chosen.gather(1, token[:, None]) - log_sum
    if most := min(max(n_top), chosen.shape[-1]):
        top = chosen.topk(most)
        values = torch.cat([values.double(), top.indices, top.values - log_sum], dim=1)
    read = iter(values.tolist())

    def next_logprob(n: int) -> Logprob:
        value, *rest = next(read)
        return Logprob(value, [*zip(map(int, rest[:most]), rest[most:], strict=True)][:n])

    return [[next_logprob(n) for _ in block] for block, n in zip(blocks, n_top, strict=True)]


def _like(per_row: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `per_row [B]` shaped to broadcast against `x [B, ..., V]`."""
    return per_row.to(dtype or x.dtype).reshape(-1, *[1] * (x.dim() - 1))
