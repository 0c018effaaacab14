"""Chooses before every round the drafter and gamma that pay best, by measured costs and the acceptance so far."""

from collections.abc import Mapping, Sequence
from operator import mul

from bench.auto.costs import Costs, interpolating, tokens_per_round
from engine.controller import PLAIN, RoundChoice
from engine.drafters import Drafter
from engine.stats import AcceptanceRate, verified_positions

# The acceptance rate that is expected without evidence, and its weight in draft positions: high, so that it is tried.
PRIOR_ALPHA, PRIOR_WEIGHT = 0.95, 1.0
# The largest weight, in draft positions, of the acceptance while costs were measured. With drafters of other kinds it
# is larger and does not fade: else kinds that were worse are tried again and again.
MOST_MEASURED, MOST_MEASURED_OF_KINDS = 4.0, 16.0
# Evidence keeps this share of its weight from round to round, since texts change.
MEMORY = 0.96
# A drafter that comes back has to pay for catching up within this share of the plain steps that it missed.
PAID_WITHIN = 1 / 3
# Another drafter has to promise this much more, since a change costs something.
WORTH_A_CHANGE = 1.03


class Arm:
    """A drafter to choose, and what is known of it.

    name: of its kind and of its policy. cells: its costs with each number of rows after each context; full_batches,
    those with all rows by context. has_kinds: True next to drafters of other kinds.
    ms, saved_ms: by gamma, the ms of a round in each cell, and those that guesses from text can save.
    verified, accepted: discounted counts of draft positions, and lasting, what both fade to. missed: tokens of a row
    that came from rounds without it.
    """

    def __init__(
        self,
        drafter: Drafter,
        name: tuple[str, str],
        cells: Sequence[Costs],
        full_batches: Sequence[Costs],
        gammas: Sequence[int],
        has_kinds: bool,
    ) -> None:
        self.drafter, self.name, self.costs, self.missed = drafter, name, full_batches[-1], 0.0
        largest = min(drafter.gamma, *(cost.at[-1] for cost in full_batches))
        can_save = drafter.skips_model is not None
        drafted = [gamma for gamma in gammas if 0 < gamma <= largest]
        self.ms = {gamma: [cell.round_ms(gamma) for cell in cells] for gamma in drafted}
        self.saved_ms = {gamma: [can_save * cell.drafts_ms(gamma) for cell in cells] for gamma in drafted}
        rate = self.costs.acceptance or AcceptanceRate(PRIOR_ALPHA, 0.0)
        self.verified = min(rate.n, MOST_MEASURED_OF_KINDS if has_kinds else MOST_MEASURED)
        self.accepted = self.verified * rate.value
        self.lasting = (self.verified, self.accepted) if has_kinds else (0.0, 0.0)

    @property
    def alpha(self) -> float:
        """The expected acceptance rate."""
        return (self.accepted + PRIOR_WEIGHT * PRIOR_ALPHA) / (self.verified + PRIOR_WEIGHT)

    @property
    def catch_up(self) -> float:
        """The ms of catching up as a share of the steps that have to pay for them."""
        n_run = 0 if self.drafter.is_written_through else self.missed
        ms = self.costs.catch_up_ms(n_run)
        return ms / (PAID_WITHIN * self.missed * self.costs.plain_ms) if self.missed else 0.0

    def fade(self) -> None:
        counts = zip((self.verified, self.accepted), self.lasting, strict=True)
        self.verified, self.accepted = (least + MEMORY * (n - least) for n, least in counts)


class Adaptive:
    """A `Controller` that takes the plain step, or the drafter and gamma, with the largest value of tokens less ms.

    costs: `costs[c][n][i]` of drafter i while n rows decode after c tokens, largest budget first; interpolated between
    the n that were measured at every c. gammas: gammas to choose among, if they were measured. names: the name of each
    drafter's kind and of its policy; None if drafters differ only in their budgets.

    A drafter's expected acceptance rate combines discounted counts of verified and accepted draft positions with a
    prior. It is at most the rate of the same policy with a larger budget, since the best of several small counts is
    mostly the luckiest. The prior is optimistic, so that speculation is tried again once the evidence against it has
    faded (optimistic initial values: Sutton and Barto, Reinforcement Learning, 2018, section 2.6). Ranks with the same
    costs choose alike.

    Next to text drafters, the ms of a model's drafts are multiplied by the discounted share of drafted rounds in which
    it ran: if every row has a guess from text, it does not.

    A token is worth the ms that it would take in the best round with the rows that are about to join: a round that
    ends before they join leaves smaller batches behind, whose tokens cost more each.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: Mapping[int, Mapping[int, Sequence[Costs]]],
        gammas: Sequence[int],
        names: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        self.drafters, self.max_gamma = tuple(drafters), max(gammas)
        self._contexts = sorted(costs)
        # With little time, few rows or some gammas were not measured at every context.
        self._rows = sorted(set.intersection(*(set(by_rows) for by_rows in costs.values())))
        cells = [costs[context][n] for context in self._contexts for n in self._rows]
        full_batches = [by_rows[self._rows[-1]] for _, by_rows in sorted(costs.items())]
        names = names or [("", "")] * len(drafters)
        has_kinds = len({kind for kind, _ in names}) > 1
        self._plain_ms = [cell[0].plain_ms for cell in cells]
        by_drafter = zip(drafters, names, zip(*cells, strict=True), zip(*full_batches, strict=True), strict=True)
        self._arms = [Arm(*known, gammas, has_kinds) for known in by_drafter]
        self._choices = [PLAIN, *(RoundChoice(i, gamma) for i, arm in enumerate(self._arms) for gamma in arm.ms)]
        self._last, self._skipped = self._arms[0], 0.0

    def choose(self, n_busy: int, n_joining: int = 0, context: float = 0.0) -> RoundChoice:
        # Plain Python: for so few numbers, calls of numpy take longer.
        tokens, n_all = self._expected_tokens(), n_busy + n_joining
        now = self._round_ms(n_busy, context)
        joined = self._round_ms(n_all, context) if n_joining else now
        ms_per_token = 1 / (n_all * max(n / ms for n, ms in zip(tokens, joined, strict=True)))
        values = [n_busy * n * ms_per_token - ms for n, ms in zip(tokens, now, strict=True)]
        return self._choices[values.index(max(values))]

    def _expected_tokens(self) -> list[float]:
        """Return the expected tokens of a row by each choice, less the price of catching up and of a change."""
        tokens, least = [1.0], dict[tuple[str, str], float]()
        for arm in self._arms:
            least[arm.name] = alpha = min(arm.alpha, least.get(arm.name, arm.alpha))
            share = (1 - arm.catch_up) / (1 if arm is self._last else WORTH_A_CHANGE)
            tokens += [share * tokens_per_round(alpha, gamma) for gamma in arm.ms]
        return tokens

    def _round_ms(self, n_rows: int, context: float) -> list[float]:
        """Return the expected ms of a round of each choice."""
        by_rows = interpolating(n_rows, self._rows)
        weights = [weight * other for weight in interpolating(context, self._contexts) for other in by_rows]
        ms = [sum(map(mul, weights, self._plain_ms))]
        for arm in self._arms:
            for gamma, whole in arm.ms.items():
                saved = self._skipped * sum(map(mul, weights, arm.saved_ms[gamma]))
                ms.append(sum(map(mul, weights, whole)) - saved)
        return ms

    def observe(self, choice: RoundChoice, accepted: Sequence[int]) -> None:
        emitted = 1 + sum(accepted) / max(1, len(accepted))
        for arm in self._arms:
            arm.fade()
            arm.missed += emitted
        if choice.drafter is None:
            return
        self._last = arm = self._arms[choice.drafter]
        arm.missed = 0.0
        if (skips := arm.drafter.skips_model) is not None:
            self._skipped = MEMORY * self._skipped + (1 - MEMORY) * skips
        arm.verified += sum(verified_positions(choice.gamma, accepted))
        arm.accepted += sum(accepted)
