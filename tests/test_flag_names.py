"""A program's errors name its own flags, also where others check its values."""

from __future__ import annotations

import pytest

from common import cli
from common.errors import ConfigError, flag
from engine.bench.resolved import resolve_draft
from engine.drafters import check_gamma
from kv_cache.streaming import check_budget
from reproduce import coupled_identity


def told(error: ConfigError, **names: str) -> str:
    """What that error says first under these names."""
    return error.told(names).splitlines()[0]


def test_a_field_is_called_what_the_program_calls_it():
    error = ConfigError(f"{flag('gamma')} and --gamma", where="here", seen=1, required=2, fix="none")
    assert told(error) == str(error).splitlines()[0] == "--gamma and --gamma"
    assert told(error, gamma="--gammas") == "--gammas and --gamma"


def test_names_can_be_swapped():
    error = ConfigError(f"{flag('model')}, {flag('draft_model')}", where="here", seen=1, required=2, fix="none")
    assert told(error, model="--target", draft_model="--model") == "--target, --model"


def test_every_line_of_an_error_has_the_programs_names():
    with pytest.raises(ConfigError) as caught:
        check_budget(4, n_sink=4)
    assert "budget (--budgets)" in caught.value.told(coupled_identity.Flags.FLAGS).splitlines()[1]


def config(*flags: str):
    return cli.read(coupled_identity.Flags, flags).config()


@pytest.mark.parametrize("budgets", [["512", "3"], ["9"]])
def test_a_budget_without_room_for_a_block_is_refused_by_its_own_name(budgets):
    with pytest.raises(ConfigError, match=r"where: +--budgets\n(.*\n)*.*--budgets 10 or more$"):
        config("--budgets", *budgets)


def test_a_list_without_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"seen: +--budgets without a value\n"):
        config("--budgets")


def test_a_seed_is_drawn_by_only_where_something_is_drawn():
    assert config().sampling.seed == coupled_identity.SEED
    assert config("--temperature", "0", "--verification", "greedy").sampling.seed is None
    with pytest.raises(ConfigError, match=r"where: +--seed\n"):
        config("--temperature", "0", "--verification", "greedy", "--seed", "7")


def test_the_least_budget_is_one_that_drafts_can_be_made_with():
    least = config("--budgets", str(coupled_identity.LEAST_BUDGET))
    draft = resolve_draft(least.draft, least.target, prefix_len=60, gen_len=8)
    check_gamma(draft.gamma, draft.capacity - coupled_identity.N_SINK)
    with pytest.raises(ConfigError, match="one verification block"):
        check_gamma(draft.gamma, draft.capacity - coupled_identity.N_SINK - 1)
