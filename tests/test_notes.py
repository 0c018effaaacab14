"""What is said before a run, above its table and below."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench.config import RunConfig, Sizes, Target
from bench.finish import FEW_ROUNDS, headline, notes
from bench.plan import remarks, resolve
from bench.resolved import ResolvedDraft
from engine.drafters.self_speculation import SelfConfig
from kv_cache.policy import BudgetedPolicy
from kv_cache.streaming import Streaming


def draft_of(gamma: int, policy: BudgetedPolicy, auto_gamma: bool = True, budgets: tuple[int, ...] = ()):
    return ResolvedDraft(SelfConfig(policy=policy), gamma, auto_gamma, policy.budget, budgets)


AUTO, NARROW = draft_of(6, Streaming()), draft_of(3, Streaming(8))


def beside(waiting: float, stolen: float = 0.0, contended: bool | None = False) -> dict[str, Any]:
    return {"threads_waiting": waiting, "stolen_processors": stolen, "contended": contended}


def record(*rounds_by_gamma: tuple[int, int], **changes: Any) -> dict[str, Any]:
    return {
        "gen_len": 64,
        "choices": [{"gamma": gamma, "rounds": rounds} for gamma, rounds in rounds_by_gamma],
        "speedup": 1.2,
        "wall_speedup": 1.18,
        "steady_rounds": sum(rounds for _, rounds in rounds_by_gamma),
        "measured_costs_seconds": None,
        "measured_costs_kept": None,
        "held_up_rounds": None,
        "contention": {"baseline": beside(0.1), "speculation": beside(0.0)},
        **changes,
    }


def plain_decoding(**changes: Any) -> dict[str, Any]:
    return record(choices=None, speedup=None, steady_rounds=63, contention={}) | changes


SHORT = {"baseline": beside(0.1), "speculation": beside(3.0, contended=None), "phase times": beside(0, contended=None)}
UNTOLD = {"baseline": beside(0.1), "speculation": {"threads_waiting": None, "stolen_processors": 0, "contended": None}}
TOO_SHORT = "too short to judge whether threads waited for processors: speculation, phase times"
BUSY = {"baseline": beside(3.0, 0.12, True), "speculation": beside(0.1), "phase times": beside(0.5, 0, True)}
PLAIN = "every round was a plain step"
FEW = f"too few rounds with all rows busy for a speedup, {FEW_ROUNDS - 1};"


@pytest.mark.parametrize(
    "run,draft,says",
    [
        (record((3, 20)), AUTO, None),
        (record((0, 60), (3, 1)), AUTO, None),
        (record((3, 20)), draft_of(3, Streaming(), False), None),
        (plain_decoding(), None, None),
        (record((3, FEW_ROUNDS)), AUTO, None),
        (record((3, 1), speedup=None), AUTO, None),
        # With --gamma 0 the ratio is what the draft's cache costs.
        (record((0, 63)), draft_of(0, Streaming(), False), None),
        (record((0, 63)), draft_of(0, Streaming(), False, (128, 512)), None),
        (record((2, 20)), draft_of(3, Streaming(8), False), None),
        (
            record((3, 20), measured_costs_seconds=11.26),
            AUTO,
            "measuring what rounds cost took 11.3 s, which is in no ",
        ),
        (
            record((3, 20), measured_costs_seconds=1.26, measured_costs_kept=True, held_up_rounds=0),
            AUTO,
            "checking the costs of an earlier run took 1.3 s, ",
        ),
        (record((3, 20), steady_rounds=14, wall_speedup=1.1), AUTO, "6 of 20 rounds had fewer rows: rows whose"),
        (record((3, 40), wall_speedup=1.0), AUTO, None),
        (record((3, 20), held_up_rounds=1), AUTO, "1 round took over twice what they cost"),
        (record((3, 20), held_up_rounds=4), AUTO, "4 rounds took over twice what they cost"),
        (record((0, 63)), AUTO, f"{PLAIN}, so the speedups are noise"),
        (record((0, 1), (3, FEW_ROUNDS - 2)), AUTO, FEW),
        (record((3, 20), steady_rounds=2), AUTO, "busy for a speedup, 2;"),
        # Nothing was chosen, from however few.
        (record(speedup=None, gen_len=1), AUTO, "--gen_len 2"),
        (record(speedup=None, gen_len=1), NARROW, "--gen_len 2"),
        (record((3, 20), contention=BUSY), AUTO, "3.1 during baseline, 0.5 during phase times: no time or speedup"),
        (record((3, 20), contention=SHORT), AUTO, TOO_SHORT),
        (record((3, 20), contention=UNTOLD), AUTO, None),
        (record(speedup=None, gen_len=1, contention=SHORT), AUTO, "--gen_len 2"),
        (plain_decoding(contention=BUSY), None, "3.1 during baseline, 0.5 during phase times: no time or speedup"),
    ],
)
def test_what_a_run_would_be_misread_without_is_said_and_nothing_else(run, draft, says):
    said = notes(run, draft)
    assert len(said) == (says is not None)
    assert says is None or says in said[0]


def test_plain_steps_that_were_compared_with_nothing_are_no_noise():
    assert notes(record((0, 63), speedup=None), AUTO) == [PLAIN]


MISSES_NOTHING = "the draft's cache keeps the whole context (208 entries): it reads all that the target reads"


@pytest.mark.parametrize(
    "gamma,gen_len,budget,says",
    [
        (4, 8, 207, []),
        (4, 8, 208, [MISSES_NOTHING]),
        (4, 5, 16, []),
        (5, 5, 16, ["a round drafts up to 5 tokens, of which a row takes at most 4"]),
        (5, 1, 16, []),
        ("auto", 5, 16, []),
    ],
)
def test_what_a_plan_would_be_misread_without_is_said_beforehand(gamma, gen_len, budget, says):
    target = Target(model_name="meta-llama/Llama-2-7b-hf", load_format="dummy")
    draft = SelfConfig(gamma=gamma, policy=Streaming(budget))
    assert remarks(resolve(RunConfig(target, draft=draft, sizes=Sizes(2, 200, gen_len)))) == says


@pytest.mark.parametrize("gamma", [0, 3])
def test_the_headline_names_a_draft_that_drafts(gamma):
    one = SimpleNamespace(size=1)
    session: Any = SimpleNamespace(
        config=RunConfig(), ranks=one, n_rows=1, draft=draft_of(gamma, Streaming()), gen_len=8
    )
    kept = {"model": "M", "device": "cpu", "dtype": "float32", "verification": "greedy", "temperature": 0}
    said = headline(session, kept | {"prefill_seconds": 0.1}, [60])
    assert ("float32, self draft: 1 row" in said, "float32: 1 row" in said) == (gamma > 0, gamma == 0)
