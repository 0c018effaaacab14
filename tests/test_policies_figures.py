"""The figures of policies, from the committed records, and the committed figures."""

from collections import Counter

import pytest

from reproduce import policies
from reproduce.paper.reproduction import ROOT
from reproduce.sweeping.runner import read_rows

FEW, MANY = [200, 400], [75, 225, 375, 525, 750]
CHOSEN = ("snapkv", "verify_topk", "retrieval")


def judged(prefix_len: int, budgets: list[int]) -> dict[str, list[int]]:
    """Budgets by label; a quantised cache keeps the whole context."""
    return dict.fromkeys(("streaming", *CHOSEN), budgets) | {"quantized": [prefix_len]}


def timed(kept: int, budgets: list[int], *others: str) -> dict[str, list[int]]:
    """The same of what is timed, where a quantised cache keeps what is generated, too."""
    whole = {"quantized": [kept], "quantized, int4 weights": [kept]}
    return dict.fromkeys(("streaming", "verify_topk", "retrieval", *others), budgets) | whole


DRAWN = {
    "policies_acceptance": {
        **{f"context of 4000 tokens, text {text}": judged(4000, FEW) for text in ("sampled", "book")},
        **{
            f"context of 7500 tokens, text {text}": judged(7500, MANY)
            for text in ("sampled", "book", "passkey", "multikey", "greedy")
        },
    },
    "policies_speedup": {
        **{f"context of 4000 tokens, B {B}": timed(4068, [400]) for B in (1, 4, 16)},
        "context of 7500 tokens, B 8": timed(7568, MANY, "snapkv") | {"auto": [375]},
    },
}


@pytest.fixture(scope="module")
def records():
    return [row["record"] for row in read_rows(ROOT / "reproduce" / "results" / "policies.jsonl").values()]


@pytest.mark.parametrize("name", policies.FIGURES)
def test_each_panel_has_a_line_for_each_policy_over_its_budgets(records, name):
    with_own_draft = [record | {"draft_of_draft": "markov", "prefix_len": 1} for record in records]
    panels = policies.FIGURES[name](records + with_own_draft).panels
    assert [(panel.title, {one.label: one.x for one in panel.series}) for panel in panels] == [*DRAWN[name].items()]


def test_a_policy_that_was_measured_again_on_a_text_is_shown_as_it_was_last(records):
    one = next(record for record in records if "rows" in record)
    once = [row["acceptance_rate"] for row in one["rows"]]
    for budget, shown in ((one["rows"][0]["draft_budget"], [0.125, *once[1:]]), (1, [*once, 0.125])):
        again = one | {"rows": [one["rows"][0] | {"draft_budget": budget, "acceptance_rate": 0.125}]}
        assert [row["acceptance_rate"] for row in policies.judged([one, again])] == shown


def test_tables_say_how_sure_a_rate_is_and_how_drafts_were_verified(records):
    """Also of records that have no standard error."""
    one, other = (next(row for row in records if key in row) for key in ("rows", "speedup"))
    row = one["rows"][0]
    accepted, timed = policies.table([one, other]).split("Speed by policy")
    assert row["verification"] in accepted and f"{row['acceptance_rate']:.3f} ± " in accepted
    assert other["verification"] in timed and f" {other['acceptance_rate']:.3f} " in timed and "±" not in timed


@pytest.mark.parametrize("name", policies.FIGURES)
def test_a_policy_looks_the_same_in_every_panel_and_open_with_quantised_weights(records, name):
    series = [one for panel in policies.FIGURES[name](records).panels for one in panel.series]
    looks = {(one.label.partition(",")[0], one.style["color"], one.style["marker"]) for one in series}
    assert len(looks) == len({policy for policy, *_ in looks}) == len({tuple(look) for _, *look in looks})
    assert all(("markerfacecolor" in one.style) == one.label.endswith(" weights") for one in series)


@pytest.mark.parametrize("name", policies.FIGURES)
def test_the_committed_figure_names_all_that_is_drawn(name):
    svg = (ROOT / "reproduce" / "figures" / f"{name}.svg").read_text()
    said = [*DRAWN[name], *(label for curves in DRAWN[name].values() for label in curves)]
    assert {text: svg.count(f"<!-- {text} -->") for text in said} == Counter(said)
