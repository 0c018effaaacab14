"""Acceptance on a given text, against a recomputation that knows no cache of the target's and no rounds in a batch."""

import pytest

from engine import ModelRunner, StandaloneDraft
from engine.drafters.base import WrappingDrafter
from engine.evaluation.teacher_forcing import forced_acceptance
from tests.support.drafters import Drafters
from tests.support.policies import Size
from tests.support.tiny import continue_by_recomputing, full_cache, random_prompts, tiny_model

GAMMA, N_TOKEN = 2, 13
PROMPTS, BOOK = random_prompts([30, 11, 22]), random_prompts([N_TOKEN] * 3, seed=8)


def expected(model, draft_tokens) -> list[tuple[int, int]]:
    """Per row (verified, accepted): at every (gamma + 1)-th place, the draft's tokens against the target's own."""
    counts = []
    for prompt, book in zip(PROMPTS, BOOK, strict=True):
        verified = accepted = 0
        for start in range(0, N_TOKEN - GAMMA - 1, GAMMA + 1):
            text = [*prompt, *book[: start + 1]]
            own = continue_by_recomputing(model, text, GAMMA)
            drafted = draft_tokens(text)
            n = next((i for i in range(GAMMA) if drafted[i] != own[i]), GAMMA)
            verified += min(n + 1, GAMMA)
            accepted += n
        counts.append((verified, accepted))
    return counts


def test_another_models_drafts_are_verified_behind_the_books_tokens():
    """A full cache, so that the draft is what recomputing gives too; it is nearly the target."""
    target, draft = tiny_model(), tiny_model()
    draft.output.weight += 0.4 * tiny_model(seed=5).output.weight
    runner = ModelRunner(target, full_cache(target, 3))
    drafter = StandaloneDraft(ModelRunner(draft, full_cache(draft, 3)), GAMMA)
    wanted = expected(target, lambda text: continue_by_recomputing(draft, text, GAMMA))
    found = [(row.verified, row.accepted) for row in forced_acceptance(runner, drafter, PROMPTS, BOOK)]
    assert found == wanted
    assert 0 < sum(accepted for _, accepted in wanted) < sum(verified for verified, _ in wanted)


@pytest.mark.parametrize(
    "name", ["streaming", "standalone, full", "suffix", "combined, streaming", "speculated, ngram"]
)
def test_a_wrapped_draft_is_accepted_as_it_is(name):
    """Also one that reads the current token, or has a draft that verifications do not write to."""
    books = [(book[:3] * 9)[:24] for book in BOOK]  # repeated, so that guesses from text are accepted, too

    def found(wraps: bool) -> list[tuple[int, int]]:
        model = tiny_model()
        runner = ModelRunner(model, full_cache(model, 3))
        size = Size(3, runner.cache.capacity, n_kept=1, window=7, dtype=runner.cache.keys.dtype)
        drafter = Drafters(runner, GAMMA, size)(name)
        drafter = WrappingDrafter(drafter) if wraps else drafter
        return [(row.verified, row.accepted) for row in forced_acceptance(runner, drafter, PROMPTS, books)]

    assert found(wraps=True) == found(wraps=False)
    assert sum(verified for verified, _ in found(wraps=True)) > 0
