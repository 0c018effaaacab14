"""Adaptive: before every round, the drafter and the gamma that pay best by measured costs and the acceptance seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from engine.cost_model import AcceptanceRate, Costs, tokens_per_round
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice

# What is expected of a drafter that has not drafted yet, worth as many judged drafts ...
PRIOR_ALPHA, PRIOR_WEIGHT = 0.8, 8.0
# ... and what is hoped of it, when it is decided whether it is tried at all.
HOPED_ALPHA = 0.98
# Judged drafts after which the trial of a drafter is over; it is over before, but not without a round, once the drafter
# would not even pay with an acceptance one standard error above the one seen.
TRIAL_DRAFTS = 24
# What is left of a round's evidence one round later, and of all of it when a trial begins: texts change.
MEMORY, FADED = 0.97, 0.25
# Plain rounds after which speculation that did not pay is tried again: at least twice as many after every trial in
# vain, and so many that what the trial lost is at most this share of them.
SHORTEST_PAUSE, LONGEST_PAUSE, TRIAL_SHARE = 32, 512, 0.03
# Rounds of speculation after which the other drafters are tried again: the first trial was short.
SECOND_LOOK = 128
# Another drafter has to promise this much more: the change itself costs something.
WORTH_A_CHANGE = 1.03


class Acceptance:
    """How many drafts at each place of a block were accepted, lately, given that those before them were."""

    def __init__(self, max_gamma: int) -> None:
        self._judged = [0.0] * max_gamma
        self._accepted = [0.0] * max_gamma

    def add(self, gamma: int, accepted: Sequence[int]) -> None:
        """One round of that gamma, and how many drafts of each row were accepted in it."""
        self.fade(MEMORY)
        for n_accepted in accepted:
            for place in range(min(n_accepted + 1, gamma)):
                self._judged[place] += 1
                self._accepted[place] += place < n_accepted

    def fade(self, share: float) -> None:
        """Let all evidence count for that share of what it did."""
        for counts in (self._judged, self._accepted):
            counts[:] = [share * count for count in counts]

    def tokens(self, gamma: int) -> float:
        """Expected tokens of a row in a round of that gamma.

        A place with little evidence of its own takes the rate of all places together.
        """
        pooled = self._pooled.value
        expected = reached = 1.0
        for judged, accepted in zip(self._judged[:gamma], self._accepted[:gamma], strict=True):
            reached *= (accepted + PRIOR_WEIGHT * pooled) / (judged + PRIOR_WEIGHT)
            expected += reached
        return expected

    @property
    def hoped(self) -> float:
        """What may be hoped of all places together: one standard error above what was seen."""
        return min(1.0, self._pooled.value + self._pooled.standard_error)

    @property
    def _pooled(self) -> AcceptanceRate:
        judged = sum(self._judged) + PRIOR_WEIGHT
        return AcceptanceRate((sum(self._accepted) + PRIOR_WEIGHT * PRIOR_ALPHA) / judged, judged)


class Adaptive:
    """A `Pacing` over drafters of one kind; `costs[i]` are those of drafter i.

    Speculation that is not expected to beat plain decoding gives way to plain rounds, and every drafter is tried
    again after a pause; while it pays, the other drafters are tried again now and then. `gammas`: those to choose
    among, for each drafter the same; plain rounds are among the choices if 0 is.
    Its choices follow from costs and accepted counts alone, so ranks that were given the same costs choose alike.
    """

    def __init__(self, drafters: Sequence[Drafter], costs: Sequence[Costs], gammas: Sequence[int]) -> None:
        self.drafters = tuple(drafters)
        self.costs = tuple(costs)
        self.max_gamma = max(gammas)
        self._gammas = tuple(gamma for gamma in gammas if gamma > 0)
        self._may_be_plain = 0 in gammas
        self._acceptance = [Acceptance(self.max_gamma) for _ in drafters]
        # The judged drafts of those that are being tried.
        self._trials: dict[int, int] = {}
        # What speculation cost since it was last tried, in plain steps beyond those that its tokens would have taken.
        self._lost_steps = 0.0
        self._active = 0
        self._plain_rounds, self._pause = 0, SHORTEST_PAUSE // 2
        self._rounds_since_trial = 0
        self._try(range(len(drafters)))

    def choose(self) -> Choice:
        if self._plain_rounds >= self._pause:
            self._try(range(len(self.drafters)))
        elif self._rounds_since_trial >= SECOND_LOOK and not self._plain_rounds:
            self._try(index for index in range(len(self.drafters)) if index != self._active)
        for index in sorted(self._trials):
            if self._goes_on(index):
                return Choice(index, self._best(index)[0])
            del self._trials[index]
        found = [self._best(index) for index in range(len(self.drafters))]
        best = max(range(len(found)), key=lambda index: found[index][1])
        if found[best][1] > WORTH_A_CHANGE * found[self._active][1]:
            self._active = best
        gamma, speedup = found[self._active]
        if speedup > 1 or not self._may_be_plain:
            self._pause, self._plain_rounds, self._lost_steps = SHORTEST_PAUSE // 2, 0, 0.0
            return Choice(self._active, gamma)
        if not self._plain_rounds:  # it has just given way
            self._pause = min(max(2 * self._pause, round(self._lost_steps / TRIAL_SHARE)), LONGEST_PAUSE)
        return PLAIN

    def _try(self, drafters: Iterable[int]) -> None:
        """Let the drafters that may pay draft again, whatever they showed before."""
        self._plain_rounds = self._rounds_since_trial = 0
        self._lost_steps = 0.0
        for index in drafters:
            if self._may_pay(index, HOPED_ALPHA):
                self._trials[index] = 0
                self._acceptance[index].fade(FADED)

    def _goes_on(self, index: int) -> bool:
        """Whether a drafter that is being tried drafts once more."""
        judged = self._trials[index]
        return not judged or (judged < TRIAL_DRAFTS and self._may_pay(index, self._acceptance[index].hoped))

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        if choice.drafter is None:
            self._plain_rounds += 1
            return
        costs = self.costs[choice.drafter]
        self._lost_steps += costs.round_ms(choice.gamma) / costs.plain_ms - (1 + fmean(accepted))
        if choice.drafter in self._trials:
            self._trials[choice.drafter] += sum(min(n_accepted + 1, choice.gamma) for n_accepted in accepted)
        else:
            self._rounds_since_trial += 1
        self._acceptance[choice.drafter].add(choice.gamma, accepted)

    def _best(self, index: int) -> tuple[int, float]:
        """The gamma that pays best by the acceptance seen, and its speedup."""
        seen, costs = self._acceptance[index], self.costs[index]
        return max(((g, costs.speedup(seen.tokens(g), g)) for g in self._gammas), key=lambda found: found[1])

    def _may_pay(self, index: int, alpha: float) -> bool:
        """Whether any gamma would pay at that acceptance rate."""
        if not self._may_be_plain:
            return True
        costs = self.costs[index]
        return any(costs.speedup(tokens_per_round(alpha, g), g) > 1 for g in self._gammas)
