"""Names of drafts: what is written is read again, and what cannot be a draft is refused."""

import pytest

from bench.draft_names import ALONE, drafts_of, parse_draft, written
from common.errors import ConfigError
from engine.drafters.combined import Hybrid
from engine.drafters.self_speculation import SelfConfig
from engine.drafters.suffix import SuffixConfig
from kv_cache.snapkv import SnapKV


@pytest.mark.parametrize(
    "name",
    [
        *ALONE,
        "eagle:a/head",
        "standalone:m.pth=full@5",
        "suffix+markov+self=snapkv@heuristic",
        "self@auto",
        "self=auto@2",
    ],
)
def test_what_is_written_is_read_again(name: str) -> None:
    assert written(parse_draft(name)) == name


@pytest.mark.parametrize(
    "name", ["nothing", "self:snapkv=full", "ngram=snapkv", "nothing+self", "self@0", "suffix+ngram", "ngram:nothing"]
)
def test_what_is_no_draft_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such draft"):
        parse_draft(name)


def test_a_name_and_options_are_a_configuration() -> None:
    given = {**parse_draft("suffix+self=snapkv@5"), "snapkv_window": 16, "draft_options": ("text_match=4",)}
    draft = SelfConfig(gamma=5, policy=SnapKV(snapkv_window=16))
    assert drafts_of(given) == (Hybrid(gamma=5, draft=draft, texts=(SuffixConfig(gamma=5),), text_match=4),)


@pytest.mark.parametrize("pair", ["text_mach=4", "text_match", "policy=4"])
def test_an_option_that_no_draft_has_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){pair}.*text_match"):
        drafts_of({"draft": "self", "draft_options": (pair,)})
