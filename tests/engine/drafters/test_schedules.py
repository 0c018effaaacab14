"""How many tokens each row drafts: by what was accepted, and by how sure the draft is."""

import random

import pytest
import torch

from engine import ModelRunner, generate
from engine.batch import Batch
from engine.drafters import Drafter
from engine.drafters.schedules import N_STEPS, Confidence, Heuristic
from engine.modes import Drafts
from engine.sampling.distribution import Filters, SamplingParams
from engine.sampling.noise import Stream, gumbel
from kv_cache.streaming import Streaming
from tests.support.controllers import SCHEDULES, scheduled
from tests.support.tiny import batch_at, random_prompts, self_draft, tiny_runner

CPU, GAMMA = torch.device("cpu"), 4
WRONG = 9  # no draft of these tests


def drafted(lengths: list[int]) -> Drafts:
    """Drafts 1, 2, 3, 4 of every row, of which it means so many."""
    return Drafts(torch.arange(1, GAMMA + 1).expand(len(lengths), -1), lengths=torch.tensor(lengths))


def end_round(schedule: Confidence | Heuristic, batch: Batch, lengths: list[int], emitted: list[list[int]]) -> None:
    """A round of those draft lengths that left each row with more tokens, the last of which are given."""
    schedule.cut(drafted(lengths), batch)
    n = [had + len(tokens) for had, tokens in zip(batch.lengths.tolist(), emitted, strict=True)]
    last = [tokens[-1] if tokens else 0 for tokens in emitted]
    batch.set_state(n, [0] * len(n), last)
    schedule.observe(batch)


def test_a_row_drafts_two_more_where_all_was_accepted_and_one_less_where_not():
    schedule, batch = Heuristic(GAMMA, 5, CPU), batch_at([9, 5, 7, 3, 4], [0] * 5)
    assert schedule.bounds(batch, GAMMA).tolist() == [4] * 5
    bonus = [1, 2, 3, 4, WRONG]
    end_round(schedule, batch, [4, 4, 4, 4, 0], [[WRONG], [1, 2, 3, WRONG], bonus, [1, 2, 3, WRONG], [WRONG]])
    assert schedule.bounds(batch, GAMMA).tolist() == [3, 3, 4, 3, 4], "at most gamma; nothing drafted, nothing known"
    end_round(schedule, batch, [3, 3, 4, 3, 4], [[WRONG], [1, WRONG], [1, WRONG], [1, WRONG], []])
    assert schedule.bounds(batch, GAMMA).tolist() == [2, 2, 3, 2, 4], "a row without a request stays as it is"
    end_round(schedule, batch, [2, 2, 3, 2, 4], [[WRONG], [1, 2], [1, 2, 3, WRONG], [1, WRONG], [1, 2, 3, 4]])
    assert schedule.bounds(batch, GAMMA).tolist() == [1, 4, 4, 1, 4], "a stop token cuts the block, and rejects nothing"
    assert schedule.bounds(batch, 2).tolist() == [1, 2, 2, 1, 2], "a round may draft less than the drafter can"


def test_limits_are_those_of_the_rows_of_the_cache():
    """A batch may have some of its rows, in another order, and an idle row."""
    schedule, batch = Heuristic(GAMMA, 3, CPU), Batch(3, Filters())
    batch.set_rows([SamplingParams()] * 3, range(3), [2, 0, 1])
    batch.idle[2] = 1
    batch.set_state([5, 5, 5], [0] * 3, [0] * 3)
    assert schedule.bounds(batch, GAMMA).tolist() == [4, 4, 0]
    end_round(schedule, batch, [4, 4, 0], [[WRONG], [1, 2, 3, 4, WRONG], []])
    assert schedule.bounds(batch, GAMMA).tolist() == [3, 4, 0]
    batch.set_rows([SamplingParams()] * 3, range(3))
    batch.idle[2] = 0
    assert schedule.bounds(batch, GAMMA).tolist() == [4, 4, 3]


def sure_of(*shares: float) -> torch.Tensor:
    """Logits of three ids, the first of which has that share of each row's mass and the second most of the rest."""
    return torch.tensor([[share, (1 - share) * 0.9, (1 - share) * 0.1] for share in shares]).log()


def test_a_row_stops_behind_the_token_that_it_is_not_sure_of():
    schedule, batch = Confidence(0.5, 0.0, 3, CPU), batch_at([5, 6, 7], [0] * 3)
    bounds = schedule.bounds(batch, GAMMA)
    bounds = schedule.shorten(bounds, 0, sure_of(0.6, 0.4, 0.51), torch.tensor([0, 0, 0]), batch)
    assert bounds.tolist() == [4, 1, 4], "the token itself is meant"
    bounds = schedule.shorten(bounds, 1, sure_of(0.6, 0.9, 0.6), torch.tensor([0, 0, 1]), batch)
    assert bounds.tolist() == [4, 1, 2], "it is its own probability that counts; who stopped stays so"
    bounds = schedule.shorten(bounds, 2, sure_of(0.1, 0.1, 0.1), torch.tensor([0, 0, 0]), batch)
    assert bounds.tolist() == [3, 1, 2]
    # Or before a token where the likeliest is not likely, whichever is drawn.
    schedule = Confidence(0.0, 0.5, 3, CPU)
    bounds = schedule.shorten(schedule.bounds(batch, 4), 1, sure_of(0.1, 0.45, 0.45), torch.tensor([0, 1, 0]), batch)
    assert bounds.tolist() == [4, 1, 1]


def best_threshold(seen: list[tuple[float, bool]]) -> float:
    """The least share of rejected drafts that pass plus three times that of accepted ones that do not."""
    accepted, rejected = ([sure for sure, ok in seen if ok is kind] for kind in (True, False))

    def cost(threshold: float) -> float:
        passed = sum(sure >= threshold for sure in rejected) / len(rejected)
        return passed + 3 * sum(sure < threshold for sure in accepted) / len(accepted)

    return min((step / N_STEPS for step in range(N_STEPS)), key=cost)


def test_an_adapted_threshold_divides_what_was_accepted_from_what_was_not():
    """Row 0 is sure of what is accepted, row 1 of what is not, row 2 sees no rejection."""
    rng, schedule, batch = random.Random(0), Confidence("auto", 0.0, 3, CPU), batch_at([5, 6, 7], [0] * 3)
    seen: list[list[tuple[float, bool]]] = [[], [], []]
    thresholds = set()
    for n_round in range(12):
        # Nothing that is seen leaves a row unsure: what is told apart here are outcomes.
        shares = [[rng.uniform(0.3, 1.0) for _ in range(3)] for _ in range(GAMMA)]
        bounds, token = schedule.bounds(batch, GAMMA), torch.tensor([0, 0, 0])
        for i, column in enumerate(shares):
            schedule.shorten(bounds, i, sure_of(*column), token, batch)
        emitted = []
        for row in range(3):
            n = 0
            while n < GAMMA and (row == 2 or (shares[n][row] > 0.62) == (row == 0)):
                n += 1
            seen[row] += [(shares[i][row], i < n) for i in range(min(n + 1, GAMMA))]
            emitted.append([*range(1, n + 1), WRONG])
        end_round(schedule, batch, [GAMMA] * 3, emitted)
        own = schedule._thresholds.tolist()
        for row in range(2):
            enough = len(seen[row]) > 5 and {ok for _, ok in seen[row]} == {True, False}
            assert own[row] == pytest.approx(best_threshold(seen[row]) if enough else 0.4), (n_round, row)
            thresholds.add(own[row])
        assert own[2] == pytest.approx(0.4)
    assert 0.5 < own[0] < 0.7 and len(thresholds) > 3


def runner_and_drafter(schedule: str, n_rows: int = 2, gamma: int = 5) -> tuple[ModelRunner, Drafter]:
    runner = tiny_runner(n_rows)
    return runner, scheduled(self_draft(runner, Streaming(12, n_sink=2), gamma), schedule, n_rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_drafts_as_far_as_its_longest_row(schedule):
    """Both the draft's steps and the block that is verified are shorter; the tokens are those of plain decoding."""
    runner, drafter = runner_and_drafter(schedule)
    n_steps, widths, meant = [], [], []
    propose, logits, step = drafter.propose, drafter.logits, runner.step

    def watched(*args):
        n_steps.append(0)
        drafts = propose(*args)
        meant.append(5 if drafts.lengths is None else int(drafts.lengths.max()))
        return drafts

    def counted(*args):
        n_steps[-1] += 1
        return logits(*args)

    def wide(tokens, *args):
        widths.append(tokens.shape[1])
        return step(tokens, *args)

    prompts, how = random_prompts([30, 7, 12, 19]), {"max_new_tokens": 24}
    plain = generate(runner, prompts, **how)
    drafter.propose, drafter.logits, runner.step = watched, counted, wide
    out = generate(runner, prompts, drafter=drafter, **how)
    assert out.tokens == plain.tokens
    assert widths == [n + 1 for n in meant] and len(set(widths)) > (1 if schedule else 0)
    assert all(n <= ran <= min(n + 1, 5) for n, ran in zip(meant, n_steps, strict=True))
    assert [round_.choice.gamma for round_ in out.stats.rounds] == meant
    assert (out.stats.drafted < 5 * out.stats.counts.rounds) is bool(schedule)


def test_no_round_draws_its_drafts_from_numbers_that_another_saw(monkeypatch):
    """A draft that was drawn and not verified decided how far a round went, and so the next q."""
    seen: list[tuple[int, ...]] = []

    def spied(seed, request, position, stream, *args):
        if stream not in (Stream.COUPLED, Stream.ACCEPT, Stream.RESAMPLE):
            keys = torch.stack([seed, request, position, torch.full_like(seed, stream)], 1).tolist()
            seen.extend(map(tuple, keys))
        return gumbel(seed, request, position, stream, *args)

    monkeypatch.setattr("engine.modes.gumbel", spied)
    runner, drafter = runner_and_drafter("confidence")
    sampling = [SamplingParams(1.0, seed=seed) for seed in (3, 4)]
    out = generate(runner, random_prompts([30, 7]), max_new_tokens=[24, 24], drafter=drafter, sampling=sampling)
    of_requests = [key for key in seen if key[0]]  # rows that idle draw the same numbers round by round
    assert len(of_requests) == len(set(of_requests)) >= out.stats.drafted
    assert out.stats.drafted > out.stats.counts.verified, "drafts that nobody verified"
