"""Adaptive: before every round, the drafter and the gamma that pay best by measured costs and the acceptance seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from engine.acceptance import AcceptanceRate, verified_positions
from engine.cost_model.costs import Costs, tokens_per_round
from engine.cost_model.isotonic import non_increasing
from engine.drafters import Drafter
from engine.pacing import PLAIN, Choice

# What is expected of any drafter, worth as many places of blocks as it says ...
PRIOR_ALPHA, PRIOR_WEIGHT = 0.8, 4.0
# ... what is hoped of it, when it is decided whether it is tried at all ...
HOPED_ALPHA = 0.98
# ... and the most places that what was seen while costs were measured is worth, at first.
MOST_MEASURED = 24.0
# A place of a block that was seldom reached is expected to do as all places together, with this weight.
POOLED_WEIGHT = 8.0
# Places of blocks, reached in all rows together, after which the trial of a drafter is over; it is over before, but not
# without a round, once the drafter would not pay with an acceptance one standard error above the one seen either.
TRIAL_PLACES = 24
# What is left of a round's evidence one round later, and of all of it when a trial begins: texts change.
MEMORY, FADED = 0.97, 0.25
# Plain rounds after which speculation that did not pay is tried again: at least twice as many after every trial in
# vain, and so many that the rounds of the last attempt lost at most this share of them. What bringing a drafter's
# cache up to date costs is not in it.
SHORTEST_PAUSE, LONGEST_PAUSE, TRIAL_SHARE = 32, 512, 0.03
# Rounds of speculation after which the other drafters are tried again: the first trial was short.
SECOND_LOOK = 128
# Another drafter has to promise this much more: the change itself costs something.
WORTH_A_CHANGE = 1.03


class Acceptance:
    """How often each place of a block was reached, lately, and accepted, and what was measured of all before."""

    def __init__(self, max_gamma: int, measured: AcceptanceRate | None = None) -> None:
        measured = measured or AcceptanceRate(PRIOR_ALPHA, 0.0)
        self._measured_alpha = measured.value
        self._measured = MOST_MEASURED if measured.n is None else min(measured.n, MOST_MEASURED)
        self._reached = [0.0] * max_gamma
        self._accepted = [0.0] * max_gamma

    def add(self, gamma: int, accepted: Sequence[int]) -> int:
        """One round of that gamma, and how many drafts of each row were accepted in it; returns the places reached."""
        self.fade(MEMORY)
        n_reached = verified_positions(gamma, accepted)
        for reached, n_accepted in zip(n_reached, accepted, strict=True):
            for place in range(reached):
                self._reached[place] += 1
                self._accepted[place] += place < n_accepted
        return sum(n_reached)

    def fade(self, share: float) -> None:
        """Let all evidence count for that share of what it did."""
        self._measured *= share
        for counts in (self._reached, self._accepted):
            counts[:] = [share * count for count in counts]

    def tokens(self, gamma: int) -> float:
        """Expected tokens of a row in a round of that gamma.

        A place with little evidence of its own takes the rate of all places together.
        """
        pooled = self._pooled.value
        expected = emitted = 1.0
        for reached, accepted in zip(self._reached[:gamma], self._accepted[:gamma], strict=True):
            emitted *= (accepted + POOLED_WEIGHT * pooled) / (reached + POOLED_WEIGHT)
            expected += emitted
        return expected

    @property
    def hoped(self) -> float:
        """What may be hoped of all places together: one standard error above what was seen and expected."""
        return min(1.0, self._pooled.value + self._pooled.standard_error)

    @property
    def weight(self) -> float:
        """How many places of blocks it goes by: those that were seen, and what the prior is worth."""
        return sum(self._reached) + self._measured + PRIOR_WEIGHT

    @property
    def _pooled(self) -> AcceptanceRate:
        accepted = sum(self._accepted) + self._measured * self._measured_alpha + PRIOR_WEIGHT * PRIOR_ALPHA
        return AcceptanceRate(accepted / self.weight, self.weight)


class Promise(NamedTuple):
    """The gamma that is expected to pay best, and its speedup over plain steps."""

    gamma: int
    speedup: float


class Adaptive:
    """A `Pacing` over drafters of one kind, from the largest budget to the smallest; `costs[i]` are those of drafter i.

    A drafter whose acceptance was seen while its costs were measured is expected to do as well; one whose was not is
    tried first. The largest budget drafts until another promises 3% more, and so on from there; in that comparison none
    is expected to do better than one with a larger budget: where it did, both share what was seen, since the best of
    several counts of few places is mostly the luckiest. Whether the one that drafts pays is judged by its own rounds.
    Speculation that is not expected to beat plain decoding gives way to plain rounds, and every drafter is tried again
    after a pause; while it pays, the others are tried again now and then. `gammas`: those to choose among beside plain
    rounds, for each drafter the same.
    Its choices follow from costs and accepted counts alone, so ranks that were given the same costs choose alike.
    """

    def __init__(self, drafters: Sequence[Drafter], costs: Sequence[Costs], gammas: Sequence[int]) -> None:
        self.drafters = tuple(drafters)
        self.costs = tuple(costs)
        self.max_gamma = max(gammas)
        self._gammas = tuple(gamma for gamma in gammas if gamma > 0)
        self._round_ms = [{gamma: one.round_ms(gamma) for gamma in self._gammas} for one in costs]
        self._acceptance = [Acceptance(self.max_gamma, one.acceptance) for one in costs]
        # The places reached by those that are being tried.
        self._trials: dict[int, int] = {}
        # What speculation lost since the last pause, in plain steps beyond those that its tokens would have taken.
        self._lost_steps = 0.0
        self._active = 0
        self._plain_rounds, self._pause = 0, SHORTEST_PAUSE // 2
        self._rounds_since_trial = 0
        self._try(index for index, one in enumerate(costs) if one.acceptance is None)

    def choose(self) -> Choice:
        if self._plain_rounds >= self._pause:
            self._plain_rounds, self._lost_steps = 0, 0.0
            self._try(range(len(self.drafters)))
        elif self._rounds_since_trial >= SECOND_LOOK and not self._plain_rounds:
            others = (index for index in range(len(self.drafters)) if index != self._active)
            self._try(others, to_beat=self._shown(self._active).speedup)
        for index in sorted(self._trials):
            if self._goes_on(index):
                return Choice(index, self._shown(index).gamma)
            del self._trials[index]
        self._active = self._worth_a_change()
        gamma, speedup = self._shown(self._active)
        if speedup > 1:
            if not self._lost_steps:
                self._pause = SHORTEST_PAUSE // 2
            return Choice(self._active, gamma)
        if not self._plain_rounds:  # it has just given way
            self._pause = min(max(2 * self._pause, round(self._lost_steps / TRIAL_SHARE)), LONGEST_PAUSE)
        return PLAIN

    def _try(self, drafters: Iterable[int], to_beat: float = 1.0) -> None:
        """Let the drafters that may have a larger speedup draft again, whatever they showed before."""
        self._rounds_since_trial = 0
        for index in drafters:
            if self._may_pay(index, HOPED_ALPHA, to_beat):
                self._trials[index] = 0
                self._acceptance[index].fade(FADED)

    def _goes_on(self, index: int) -> bool:
        """Whether a drafter that is being tried drafts once more: it may beat what else there is."""
        reached = self._trials[index]
        to_beat = 1.0 if self._active in self._trials else max(1.0, self._shown(self._active).speedup)
        hoped = self._acceptance[index].hoped
        return not reached or (reached < TRIAL_PLACES and self._may_pay(index, hoped, to_beat))

    def observe(self, choice: Choice, accepted: Sequence[int]) -> None:
        if choice.drafter is None:
            self._plain_rounds += 1
            return
        steps = self._round_ms[choice.drafter][choice.gamma] / self.costs[choice.drafter].plain_ms
        self._lost_steps = max(0.0, self._lost_steps + steps - (1 + fmean(accepted)))
        reached = self._acceptance[choice.drafter].add(choice.gamma, accepted)
        if choice.drafter in self._trials:
            self._trials[choice.drafter] += reached
        else:
            self._rounds_since_trial += 1

    def _worth_a_change(self) -> int:
        """The drafter that promises most, if that is enough more than what the active one does; else the active one.

        Of those that share a promise and cost the same, the one that showed most: it is the one to go on drafting.
        """
        promises = self._ordered_promises()
        best = max(range(len(promises)), key=lambda index: (promises[index].speedup, self._shown(index).speedup))
        promised, active = promises[best].speedup, promises[self._active].speedup
        return best if promised > 1 and (active <= 1 or promised > WORTH_A_CHANGE * active) else self._active

    def _shown(self, index: int) -> Promise:
        """By what a drafter itself showed."""
        seen = self._acceptance[index]
        return self._most(index, {gamma: seen.tokens(gamma) for gamma in self._gammas})

    def _ordered_promises(self) -> list[Promise]:
        """Of all drafters, none of which is expected to yield more tokens than one with a larger budget.

        This compares them. It is not what any of them yields: those that do not draft keep what was seen of them.
        """
        weights = [seen.weight for seen in self._acceptance]
        tokens = {
            gamma: non_increasing([seen.tokens(gamma) for seen in self._acceptance], weights) for gamma in self._gammas
        }
        return [
            self._most(index, {gamma: tokens[gamma][index] for gamma in self._gammas})
            for index in range(len(self.drafters))
        ]

    def _most(self, index: int, tokens: Mapping[int, float]) -> Promise:
        """The gamma that pays best if a row's rounds yield so many tokens at every gamma."""
        return max(
            (Promise(gamma, self._speedup(index, gamma, tokens[gamma])) for gamma in self._gammas),
            key=lambda promise: promise.speedup,
        )

    def _may_pay(self, index: int, alpha: float, to_beat: float = 1.0) -> bool:
        """Whether any gamma would have a larger speedup at that acceptance rate."""
        return any(self._speedup(index, gamma, tokens_per_round(alpha, gamma)) > to_beat for gamma in self._gammas)

    def _speedup(self, index: int, gamma: int, tokens: float) -> float:
        """`Costs.speedup`, with the rounds' times at hand: this is asked for between rounds."""
        return tokens * self.costs[index].plain_ms / self._round_ms[index][gamma]
