"""`auto` among unlike drafts, budgets and policies: what was chosen, and why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.auto.costs import Costs
from bench.auto.measure import FEWEST_TIMED, UNTIMED_ROUNDS, costs_of, measure_costs
from bench.config import RunConfig, Sizes, Target
from bench.draft_flags import DraftFlags
from bench.memory import memory_plan
from bench.plan import check_choice, resolve
from bench.session import Session
from common.errors import ConfigError
from engine import SelfSpeculation
from engine.drafters.combined import Hybrid
from engine.drafters.eagle import Eagle, EagleConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.self_speculation import SelfConfig
from engine.drafters.speculated import Hierarchical
from engine.drafters.suffix import Suffix, SuffixConfig
from kv_cache.streaming import Streaming
from tests.support.heads import eagle_config, eagle_tensors, save_head
from tests.support.serving_cases import CHATS, V1, Alone, serving
from tests.support.serving_cases import PLAIN as SERVED_PLAIN


def test_the_flag_names_drafts_with_options_of_the_same_flags():
    flags = DraftFlags(draft="suffix", gamma="auto", auto_drafts=("self", "ngram"), draft_budget=40, max_ngram=2)
    others = SelfConfig(gamma="auto", policy=Streaming(40)), NGramConfig(gamma="auto", max_ngram=2)
    assert flags.choices({}) == [(SuffixConfig(gamma="auto"), *others)]


@pytest.mark.parametrize(
    "drafts,where",
    [
        ((SelfConfig(gamma=3), SuffixConfig(gamma="auto")), "--gamma 3"),
        ((SelfConfig(gamma="auto"),) * 2, "self"),
        ((SelfConfig(gamma="auto"), *(SuffixConfig(gamma="auto"),) * 2), "suffix"),
        ((SuffixConfig(gamma="auto"), Hierarchical(gamma="auto", draft=SelfConfig(), draft_of_draft="ngram")), "self"),
        ((SelfConfig(gamma="auto"), EagleConfig(gamma="auto", draft_model="head")), "eagle"),
    ],
)
def test_drafts_that_cannot_be_chosen_among_are_refused(drafts, where):
    with pytest.raises(ConfigError, match="--auto_drafts") as error:
        check_choice(drafts)
    assert where in str(error.value)


@pytest.fixture
def head(tmp_path: Path, checkpoint: Path) -> str:
    config = Target(model=str(checkpoint)).source().config
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return save_head(tmp_path / "head", eagle_tensors(config, 3), eagle_config(config, 3, **layers))


def test_a_plan_has_room_for_every_draft_and_rounds_for_each(checkpoint: Path, head: str) -> None:
    """The head's most drafts bound no other draft; a self-draft in another dtype has weights next to the head's."""
    target = Target(str(checkpoint), device="cpu", dtype="float32")
    how = {"gamma": "auto", "policy": Streaming(24), "draft_dtype": "bfloat16"}
    drafts = EagleConfig(draft_model=head, **how), SelfConfig(**how), SuffixConfig(gamma="auto")
    config, prompts = RunConfig(target, sizes=Sizes(B=2, gen_len=8)), [[1] * 40, [2] * 31]
    alone = [memory_plan(resolve(replace(config, draft=draft), prompts)) for draft in (*drafts, None)]
    session = Session.open(replace(config, draft=drafts[0], auto_drafts=drafts[1:]), prompts)
    together = memory_plan(session.plan)
    plain = alone.pop().fixed["weights"]
    assert together.fixed["weights"] - plain == sum(plan.fixed["weights"] - plain for plan in alone)
    assert together.per_row["draft KV"] == sum(plan.per_row["draft KV"] for plan in alone)
    assert len(session.models.loaded) == 2 and session.plan.gamma == 6
    drafters = session.drafters()
    assert [type(drafter) for drafter in drafters] == [Eagle, SelfSpeculation, Suffix]
    eagle = drafters[0]
    assert 2 * alone[0].per_row["draft KV"] == eagle.cache.n_bytes + eagle.hidden_buffer._states.nbytes
    costs = costs_of(session, drafters)
    assert costs is not None and [cost.at for cost in costs.by_rows[2]] == [(1, 3, 6)] * 3
    kept = costs_of(session, drafters)
    assert kept is not None and len(kept.by_rows[2]) == 3


def test_costs_are_of_rounds_in_which_the_model_runs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses from a text that repeats would leave it out."""
    draft = Hybrid(gamma="auto", draft=SelfConfig(), texts=(SuffixConfig(),), text_match=1)
    target = Target(str(checkpoint), device="cpu", dtype="float64")
    session = Session.open(RunConfig(target, sizes=Sizes(B=1, gen_len=30), draft=draft), [[1, 2] * 20])
    n_drafted = list[int]()
    (drafter,) = session.drafters()
    propose = drafter.model.propose
    monkeypatch.setattr(drafter.model, "propose", lambda *given: n_drafted.append(given[2]) or propose(*given))
    costs = costs_of(session, [drafter])
    assert costs is not None and n_drafted == [1, 3, 6] * (UNTIMED_ROUNDS + FEWEST_TIMED)


def test_a_server_chooses_among_drafts(chat_checkpoint: Path, alone: Alone) -> None:
    """Answers are those of plain decoding; a request's prediction is read."""
    flags = "--gamma auto --draft_budget 24 --draft_dtype same --auto_drafts suffix --max_batch 2"
    with serving(chat_checkpoint, flags, SERVED_PLAIN) as served:
        answer = served.json(V1, {"prompt": "abcabcabc", "max_tokens": 40, "temperature": 0})
        assert answer["choices"][0]["text"] == alone.text("abcabcabc", 40)
        chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}
        assert served.json(CHATS, chat | {"prediction": {"type": "content", "content": "abc"}})["choices"]


def test_a_cache_without_room_for_a_draft_is_refused_beside_other_drafts(checkpoint: Path) -> None:
    draft = SelfConfig(gamma="auto", policy=Streaming(5, n_sink=4))
    config = RunConfig(Target(str(checkpoint), device="cpu"), sizes=Sizes(B=1, gen_len=8), draft=draft)
    assert not resolve(config, [[1] * 40]).chooses
    with pytest.raises(ConfigError, match="--draft_budget"):
        resolve(replace(config, auto_drafts=(SuffixConfig(gamma="auto"),)), [[1] * 40])


SELFSPEC = "tests/selfspec_benchmark.py"
SIZES = "--B 2 --prefix_len 60 --gen_len 24 --device cpu --dtype float64"


@pytest.fixture
def drafting_pays(monkeypatch: pytest.MonkeyPatch):
    """Whatever is measured, the smallest budget drafts for nothing, and a verification costs what a step does."""

    def cheap(*args: Any, **kwargs: Any) -> dict[int, list[Costs]]:
        (n_rows, measured), *_ = measure_costs(*args, **kwargs).items()
        n_gammas = len(measured[0].at)
        cheapest = replace(measured[-1], plain_ms=100.0, verify_ms=(100.0,) * n_gammas, draft_ms=0.1, other_ms=0.0)
        return {n_rows: [*(replace(cheapest, draft_ms=90.0) for _ in measured[1:]), cheapest]}

    monkeypatch.setattr("bench.auto.measure.measure_costs", cheap)


def drafting(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of rounds that drafted."""
    return [choice for choice in record["choices"] if choice["gamma"]]


def test_gamma_auto_says_what_it_chose_and_why(call, drafting_pays):
    record = call(SELFSPEC, f"{SIZES} --draft_budget 40 --gamma auto --benchmark").record
    assert record["gamma"] == "auto" and record["identical_sequences"] == 2
    assert sum(choice["rounds"] for choice in record["choices"]) >= 5
    assert all(0 <= choice["gamma"] <= 6 for choice in record["choices"])
    assert drafting(record) and all(choice["draft_budget"] == 40 for choice in drafting(record))
    (costs,) = record["measured_costs"]
    assert record["measured_costs_seconds"] > 0
    assert (costs["rows"], costs["gammas"]) == (2, [1, 3, 6]) and costs["plain_ms"] > 0
    assert costs["draft_budget"] == 40 and 0 <= costs["accepted_share"] <= 1 and costs["verified"] > 0


def test_budget_and_policy_are_chosen_and_choosing_entries_is_counted(call, drafting_pays):
    """Every policy is measured with each budget below the prompt's length; here the last costs nothing."""
    how = f"{SIZES.replace('60', '150')} --draft_policy auto --refresh 2 --snapkv_window 12"
    names = ["streaming", "retrieval", "snapkv", "verify_topk"]
    for flags, budgets in (("--draft_budget 50", [50]), ("--draft_budget auto --gamma auto", [128, 64])):
        record = call(SELFSPEC, f"{how} {flags}").record
        assert (record["draft_policy"], record["identical_sequences"]) == ("auto", 2)
        assert record["draft_budget"] == (50 if budgets == [50] else "auto")
        costs = [(one["draft_budget"], one["draft_policy"]) for one in record["measured_costs"]]
        assert costs == [(budget, name) for budget in budgets for name in names]
        assert {(one["draft_policy"], one["draft_budget"]) for one in drafting(record)} == {(names[-1], budgets[-1])}
