"""A program's errors name its own flags, also where others check its values."""

from __future__ import annotations

import pytest
from engine.bench.flag_names import flags_named

from common.errors import ConfigError
from engine.drafters import check_gamma
from kv_cache.streaming import check_budget
from reproduce import coupled_identity


def renamed(text: str, **names: str) -> str:
    """What an error that says `text` says under these names."""
    with pytest.raises(ConfigError) as caught, flags_named(names):
        raise ConfigError(text, where="here", seen=1, required=2, fix="none")
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    "text,says",
    [
        ("--gamma, (--gamma) and --gamma", "--gammas, (--gammas) and --gammas"),
        ("lower gamma, or --B", "lower gamma, or --B"),
        ("--gamma_auto, --auto_gamma", "--gamma_auto, --auto_gamma"),
        ("a--gamma", "a--gamma"),
    ],
)
def test_whole_flags_are_renamed_and_nothing_else(text, says):
    assert renamed(text, gamma="gammas") == says


def test_names_can_be_swapped():
    assert renamed("--target and --model", target="model", model="draft_model") == "--model and --draft_model"


def test_every_line_of_an_error_is_renamed():
    with pytest.raises(ConfigError, match=r"where: .*\(--budgets\)"), flags_named({"draft_budget": "budgets"}):
        check_budget(4, n_sink=4)


def test_what_no_user_caused_stays_as_it_is():
    with pytest.raises(ValueError, match=r"^--gamma$"), flags_named({"gamma": "gammas"}):
        raise ValueError("--gamma")


@pytest.mark.parametrize("budgets", [["512", "3"], ["9"]])
def test_a_budget_without_room_for_a_block_is_refused_by_its_own_name(budgets):
    args = coupled_identity.make_parser().parse_args(["--budgets", *budgets])
    with pytest.raises(ConfigError, match=r"where: +--budgets\n(.*\n)*.*--budgets 10 or more$"):
        coupled_identity.checked(args)


def test_a_flag_without_effect_is_refused():
    args = coupled_identity.make_parser().parse_args(["--save_rows", "rows.jsonl"])
    with pytest.raises(ConfigError, match=r"where: +--save_rows\n +seen: +rows\.jsonl"):
        coupled_identity.checked(args)


def test_the_least_budget_is_one_that_drafts_can_be_made_with():
    least = coupled_identity.LEAST_BUDGET
    _, draft = coupled_identity.checked(coupled_identity.make_parser().parse_args(["--budgets", str(least)]))
    check_budget(draft.capacity, coupled_identity.N_SINK)
    check_gamma(draft.gamma, draft.capacity - coupled_identity.N_SINK)
    with pytest.raises(ConfigError, match="one verification block"):
        check_gamma(draft.gamma, draft.capacity - coupled_identity.N_SINK - 1)
