"""Chooses before every round the drafter and gamma that pay best, by measured costs and the acceptance so far."""

from collections.abc import Mapping, Sequence
from itertools import product
from operator import mul

from bench.auto.costs import Costs, interpolating, tokens_per_round
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice
from engine.stats import AcceptanceRate, verified_positions

# The acceptance rate that is expected without evidence, and its weight in draft positions: high, so that it is tried.
PRIOR_ALPHA, PRIOR_WEIGHT = 0.95, 1.0
# The largest weight, in draft positions, of the acceptance while costs were measured. Beside drafters of other kinds it
# is larger and does not fade: else kinds that were worse are tried again and again.
MOST_MEASURED, MOST_MEASURED_OF_KINDS = 4.0, 16.0
# Evidence keeps this share of its weight from round to round, since texts change.
MEMORY = 0.96
# A drafter that comes back has to pay for catching up within this share of the plain steps that it missed.
PAID_WITHIN = 1 / 3
# Another drafter has to promise this much more, since a change costs something.
WORTH_A_CHANGE = 1.03


class Adaptive:
    """A `Pacing` that takes the plain step, or the drafter and gamma, with the largest value of tokens less ms.

    costs: `costs[c][n][i]` of drafter i while n rows decode behind c tokens, largest budget first; interpolated between
    the n that were measured at every c. gammas: gammas to choose among, if they were measured. names: the name of each
    drafter's kind and of its policy; None if drafters differ only in their budgets.

    A drafter's expected acceptance rate combines discounted counts of verified and accepted draft positions with a
    prior. It is at most the rate of the same policy with a larger budget, since the best of several small counts is
    mostly the luckiest. The prior is optimistic, so that speculation is tried again once the evidence against it has
    faded (optimistic initial values: Sutton and Barto, Reinforcement Learning, 2018, section 2.6). Ranks with the same
    costs choose alike.

    Beside text drafters, the ms of a model's drafts are multiplied by the discounted share of drafted rounds in which
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
        self.drafters, self._names = tuple(drafters), names or [("", "")] * len(drafters)
        self.max_gamma = max(gammas)
        self._contexts = sorted(costs)
        # With little time, few rows or some gammas were not measured at every context.
        self._rows = sorted(set.intersection(*(set(by_rows) for by_rows in costs.values())))
        full_batch = costs[self._contexts[-1]][self._rows[-1]]
        largest = [min(by_rows[self._rows[-1]][i].at[-1] for by_rows in costs.values()) for i in range(len(drafters))]
        cells = [costs[context][n] for context in self._contexts for n in self._rows]
        drafted = [(i, gamma) for i, gamma in product(range(len(drafters)), gammas) if 0 < gamma <= largest[i]]
        self._choices = [PLAIN, *(Choice(i, gamma) for i, gamma in drafted)]
        # Ms of a round of each choice at each context and number of rows, and those that guesses from text can save.
        rounds = [[cell[i].round_ms(gamma) for cell in cells] for i, gamma in drafted]
        can_save = [drafter.skips_model is not None for drafter in drafters]
        drafts = [[can_save[i] * cell[i].drafts_ms(gamma) for cell in cells] for i, gamma in drafted]
        self._ms = [[cell[0].plain_ms for cell in cells], *rounds]
        self._saved_ms = [[0.0] * len(cells), *drafts]
        measured = [drafter.acceptance or AcceptanceRate(PRIOR_ALPHA, 0.0) for drafter in full_batch]
        has_kinds = len({kind for kind, _ in self._names}) > 1
        most = MOST_MEASURED_OF_KINDS if has_kinds else MOST_MEASURED
        self._verified = [min(rate.n, most) for rate in measured]
        self._accepted = [n * rate.value for n, rate in zip(self._verified, measured, strict=True)]
        # What these counts fade to.
        self._lasting = [[has_kinds * n for n in counts] for counts in (self._verified, self._accepted)]
        self._last_drafter, self._skipped = 0, 0.0
        self._full_batch, self._missed = full_batch, [0.0] * len(drafters)

    def choose(self, n_busy: int, n_joining: int = 0, context: float = 0.0) -> Choice:
        # Plain Python: for so few numbers, calls of numpy take longer.
        tokens, n_all = self._expected_tokens(), n_busy + n_joining
        now = self._round_ms(n_busy, context)
        joined = self._round_ms(n_all, context) if n_joining else now
        ms_per_token = 1 / (n_all * max(n / ms for n, ms in zip(tokens, joined, strict=True)))
        values = [n_busy * n * ms_per_token - ms for n, ms in zip(tokens, now, strict=True)]
        return self._choices[values.index(max(values))]

    def _expected_tokens(self) -> list[float]:
        """Return the expected tokens of a row by each choice, less the price of catching up and of a change."""
        alphas: list[float] = []
        least: dict[tuple[str, str], float] = {}
        for name, accepted, verified in zip(self._names, self._accepted, self._verified, strict=True):
            alpha = (accepted + PRIOR_WEIGHT * PRIOR_ALPHA) / (verified + PRIOR_WEIGHT)
            least[name] = min(alpha, least.get(name, alpha))
            alphas.append(least[name])
        shares = [1 - self._catch_up(i) for i in range(len(alphas))]
        shares = [x if i == self._last_drafter else x / WORTH_A_CHANGE for i, x in enumerate(shares)]
        drafted = [shares[i] * tokens_per_round(alphas[i], gamma) for i, gamma in self._choices if i is not None]
        return [1.0, *drafted]

    def _round_ms(self, n_rows: int, context: float) -> list[float]:
        """Return the expected ms of a round of each choice."""
        by_rows = interpolating(n_rows, self._rows)
        weights = [weight * other for weight in interpolating(context, self._contexts) for other in by_rows]
        ms, saved = ([sum(map(mul, weights, each)) for each in table] for table in (self._ms, self._saved_ms))
        return [each - self._skipped * other for each, other in zip(ms, saved, strict=True)]

    def _catch_up(self, drafter: int) -> float:
        """Return the ms of catching up as a share of the steps that have to pay for them."""
        missed, costs = self._missed[drafter], self._full_batch[drafter]
        n_run = 0 if self.drafters[drafter].is_written_through else missed
        return costs.catch_up_ms(n_run) / (PAID_WITHIN * missed * costs.plain_ms) if missed else 0.0

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        for counts, lasting in zip((self._verified, self._accepted), self._lasting, strict=True):
            counts[:] = [least + MEMORY * (n - least) for n, least in zip(counts, lasting, strict=True)]
        emitted = 1 + sum(accepted) / max(1, len(accepted))
        self._missed = [0.0 if index == choice.drafter else n + emitted for index, n in enumerate(self._missed)]
        if choice.drafter is not None:
            self._last_drafter, skips = choice.drafter, self.drafters[choice.drafter].skips_model
            if skips is not None:
                self._skipped = MEMORY * self._skipped + (1 - MEMORY) * skips
            self._verified[choice.drafter] += sum(verified_positions(choice.gamma, accepted))
            self._accepted[choice.drafter] += sum(accepted)
