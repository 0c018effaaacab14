"""The Session API: one configuration opened, other drafts and samplings over the same weights and cache."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.config import AUTO, RunConfig, Sizes, Target
from bench.memory import memory_plan
from bench.passes import settle
from bench.plan import resolve
from bench.session import Session
from common.errors import ConfigError
from engine.drafters.ngram import NGramConfig
from engine.drafters.self_speculation import SelfConfig
from engine.drafters.speculated import Hierarchical
from engine.drafters.standalone import StandaloneConfig
from kv_cache.full import Full
from kv_cache.policy import BudgetedPolicy
from kv_cache.snapkv import SnapKV
from kv_cache.streaming import Streaming
from tests.support.hf_tiny import converted_llama, rope

TEXTS = ["Call me Ishmael.", "It was the best of times, it was the worst of times", "No"]
SMALL = SelfConfig(gamma=3, policy=Streaming(16))


@pytest.fixture
def config(checkpoint: Path) -> RunConfig:
    target = Target(model=str(checkpoint), device="cpu", dtype="float64")
    return RunConfig(target=target, sizes=Sizes(B=2, gen_len=12), draft=replace(SMALL, draft_dtype="same"))


@pytest.fixture
def session(config: RunConfig) -> Session:
    return Session.open(config, prompts=TEXTS)


def test_a_draft_of_the_draft_is_a_model_of_its_own(config, tmp_path, monkeypatch) -> None:
    """It is planned for, and trained on fewer positions than the target."""
    monkeypatch.setattr(BudgetedPolicy, "AUTO_BUDGETS", (18, 24))
    converted_llama(tmp_path, max_position_embeddings=64, num_hidden_layers=1)
    how = {"policy": Streaming(AUTO, n_sink=2), "draft_dtype": "float32"}
    draft = Hierarchical(gamma="auto", draft_of_draft=str(tmp_path), inner_budget=20, draft=SelfConfig(**how))
    session = Session.open(replace(config, draft=draft), TEXTS)
    drafters = session.drafters()
    caches = [cache for one in drafters for cache in (one._outer.cache, one._inner._runner.cache)]
    assert len(drafters) == 2 and [cache.rotate_on_read for cache in caches] == [False, True] * 2
    assert drafters[0]._inner._runner.model is drafters[1]._inner._runner.model in [*session.models.loaded.values()]
    held = sum(cache.n_bytes for cache in caches) + sum(cache.n_bytes for cache in caches[1::2])
    planned = session.plan.target.n_rows * memory_plan(session.plan).per_row["draft KV"]
    assert planned == held, "what prompts left of the model is kept beside it"
    fixed = session.variant(drafts=[replace(draft, gamma=4, draft=replace(draft.draft, policy=Streaming(24)))])
    out, both = fixed.generate(drafter := fixed.drafter()), drafter.inner_counts()
    assert out.tokens == session.generate().tokens and both.emitted == out.stats.drafted > 0


def test_a_variant_shares_weights_and_cache(session: Session) -> None:
    """Every draft over one prefilled target; only another form of the weights is loaded, and once."""
    plain = session.generate().tokens
    drafts = [NGramConfig(gamma=2), SelfConfig(gamma=2, policy=Full(), draft_dtype="same")]
    drafts.append(SelfConfig(gamma=1, policy=SnapKV(24, snapkv_window=8), draft_dtype="same"))
    for draft in drafts:
        variant = session.variant(drafts=[draft])
        assert variant.runner is session.runner and not session.models.loaded
        assert variant.generate(variant.drafter()).tokens == plain
    assert variant.plan.candidates[0].policy == SnapKV(24, snapkv_window=8)
    rounded = [session.variant(drafts=[replace(SMALL, gamma=gamma, draft_dtype="float32")]) for gamma in (1, 2)]
    (model,) = session.models.loaded.values()
    assert model.dtype == torch.float32
    assert all(one.generate(one.drafter()).tokens == plain for one in rounded)


def test_what_is_there_before_rounds_is_left_out_of_collections_until_the_next_session(config: RunConfig) -> None:
    class Owner:
        pass

    earlier = Owner()
    earlier.__dict__["itself"] = earlier
    died = weakref.finalize(earlier, lambda: None)
    settle()
    assert gc.get_freeze_count() > 10 * len(gc.get_objects())
    del earlier
    gc.collect()
    assert died.alive
    Session.open(config, prompts=TEXTS)
    gc.collect()
    assert not died.alive


YARN = {"rope_scaling": "yarn:4"}
OTHER_BASE = 'rope_parameters={"rope_type": "default", "rope_theta": 500000.0}'
OVERRIDES = {"config_overrides": (OTHER_BASE, "max_position_embeddings=1024")}


@pytest.mark.parametrize("changes", [YARN, OVERRIDES])
def test_a_draft_of_the_same_checkpoint_is_accepted_beyond_its_context(config: RunConfig, changes) -> None:
    """The checkpoint was trained on 256 positions; rows are longer, and differ. Without changes it is another model."""
    target = replace(config.target, **changes)
    draft = StandaloneConfig(gamma=3, draft_model=target.model, policy=Full(), draft_dtype="same")
    session = Session.open(replace(config, target=target, draft=draft), ["a b c " * 50, "and tea for two" * 27])
    out = session.generate(session.drafter())
    assert out.tokens == session.generate().tokens and out.tokens[0] != out.tokens[1]
    assert out.stats.counts.acceptance_rate == 1.0 and out.stats.counts.accepted > 12
    assert any("rotary" in said for said in session.plan.remarks())


def test_a_draft_within_its_context_stays_as_it_was_trained(config: RunConfig, tmp_path: Path) -> None:
    """Also if its cache counts positions, which never exceed the budget. A draft that is scaled already is refused."""
    target = replace(config.target, **YARN)
    draft = StandaloneConfig(gamma=3, draft_model=target.model, policy=Full(), draft_dtype="same")
    for policy, text in ((Full(), "a b c"), (Streaming(32), "a b c " * 50)):
        plan = resolve(replace(config, target=target, draft=replace(draft, policy=policy)), [text])
        source = plan.candidates[0].source
        assert source is not None and source.config.rope_scaling is None and not source.is_changed
    converted_llama(tmp_path, **rope(10000.0, "linear", factor=2.0))
    with pytest.raises(ConfigError, match=f"(?s)extended.*{tmp_path}"):
        resolve(replace(config, target=target, draft=replace(draft, draft_model=str(tmp_path))), ["a b c " * 50])
