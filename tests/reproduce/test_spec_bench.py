"""Prompt sets through drafters: conversations, sums by category, and what a second run leaves alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import passes
from engine.counts import acceptance_standard_error, total
from reproduce.spec_bench import table_rows
from tests.support.programs import Ended, run

TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[a]{% endif %}"
# Categories of one to three prompts of different lengths, which do not all go on.
ROWS: list[tuple[str, list[str]]] = [
    ("math", ["What is 3 + 4 + 3 + 4?", "Why?"]),
    ("letters", ["a b a b a b a b a b a b", "b a"]),
    ("math", ["No."]),
    ("math", ["One and one and one and one", "and one?"]),
    ("end", ["xyzxyzxyzxyz"]),
]
GAMMA, GEN_LEN = 2, 10
DRAFTERS = ["cache", "ngram", "oracle", "self", "suffix"]
Prompts = list[tuple[str, list[list[int]]]]


@pytest.fixture
def talking(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny model with a chat template."""
    folder = tmp_path / "talking"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def bench(talking: Path, tmp_path: Path) -> Callable[..., Ended]:
    """Runs the program on those conversations."""
    rows = [{"question_id": i, "category": name, "turns": turns} for i, (name, turns) in enumerate(ROWS)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = f"--model {talking} --prompts {tmp_path / 'set.jsonl'} --device cpu --dtype float64 --gen_len {GEN_LEN}"
    flags += f" --gamma {GAMMA} --B 2 --output {tmp_path / 'out.jsonl'}"
    return lambda more="": run("reproduce/spec_bench.py", f"{flags} {more}".split())


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[list[int]], Any, int]]:
    """A list that grows by each pass: its name, prompts and output, and the number of its first request."""
    calls: list[tuple[str, list[list[int]], Any, int]] = []
    original = passes.decode

    def decode(session: Any, name: str, *rest: Any) -> Any:
        calls.append((name, session.prompts, original(session, name, *rest), session.numbered_from))
        return calls[-1][2]

    monkeypatch.setattr("bench.decode", decode)
    return calls


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_category_has_a_record_and_every_row_is_plain_decodings(bench, tmp_path: Path) -> None:
    """The counts are those of rows that differ, over turns and batches; the oracle is always right."""
    ended = bench()
    records = lines(tmp_path / "out.jsonl")
    assert [record["category"] for record in records] == ["math", "letters", "end"]
    assert [record["conversations"] for record in records] == [3, 1, 1]
    for record, n_turns in zip(records, (5, 2, 1), strict=True):
        assert [row["drafter"] for row in record["rows"]] == DRAFTERS and record["dataset"] is None
        for row in record["rows"]:
            assert row["sequences"] == row["identical_sequences"] == n_turns and row["gamma"] == GAMMA
            assert row["emitted"] == row["baseline_emitted"] <= n_turns * (GEN_LEN - 1)
            assert row["acceptance_rate"] is None or row["acceptance_rate"] == round(
                row["accepted"] / row["verified"], 4
            )
        # It has a draft for every round, of which the last one of a row may be cut.
        oracle = record["rows"][DRAFTERS.index("oracle")]
        assert oracle["acceptance_rate"] in (1.0, None)
        assert oracle["rounds"] <= oracle["emitted"] / (GAMMA + 1) + n_turns
    rows = ended.record["rows"]
    assert [(row["drafter"], row["category"]) for row in rows] == [
        (drafter, category) for drafter in DRAFTERS for category in ("math", "letters", "end", "all")
    ]
    for first in (0, 4, 8):
        *parts, whole = rows[first : first + 4]
        for name in ("sequences", "identical_sequences", "rounds", "drafted", "verified", "accepted", "emitted"):
            assert whole[name] == sum(part[name] for part in parts)
        assert whole["mean_accepted_length"] == pytest.approx(whole["emitted"] / whole["rounds"], abs=1e-4)
        assert 1 <= whole["mean_accepted_length"] <= GAMMA + 1 and whole["sequences"] == 8
    assert (
        len(ended.lines) == 2 + 4 * len(DRAFTERS) and "identical rows" in ended.lines[0] and "8 of 8" in ended.lines[-2]
    )


@pytest.mark.parametrize("sampling", ["", "--temperature 1.5 --seed 3 --top_k 40 --verification rejection"])
def test_a_later_turn_follows_the_answers_of_plain_decoding(bench, decoded, talking: Path, sampling: str) -> None:
    """For every drafter, also where its own samples were others; rows whose conversation has ended are left out."""
    from models.checkpoints.model_source import find_model

    template = find_model(str(talking), "pth", None, "--model").chat_template()
    # The last one's samples are others than those of plain decoding.
    drafters = ["ngram", "self"] if sampling else [*DRAFTERS]
    ended = bench(f"--categories math letters --drafters {' '.join(drafters)} {sampling}")
    assert ended.code == 0, ended.err
    names = [name for name, *_ in decoded]
    first_ones = ["plain", *(name for name in drafters if name != "oracle")]
    orders = [[*first_ones[:: -1 if turned else 1], *(["oracle"] * (not sampling))] for turned in (False, True)]
    expected = [("math", 0), ("math", 1), ("math", 0), ("letters", 0), ("letters", 1)]
    assert names == [f"{category}, {name}" for category, turned in expected for name in orders[turned]]
    step = 1 + len(drafters)
    batches = [decoded[start : start + step] for start in range(0, len(decoded), step)]
    for batch in batches:  # from here on with plain decoding in the first place
        batch.sort(key=lambda call: not call[0].endswith("plain"))
    assert all(call[1] == batch[0][1] for batch in batches for call in batch)
    firsts = [[call[3] for call in batch] for batch in batches]
    assert firsts == [[n] * step for n in (0, 2, 3, 0, 1)], "requests are numbered within their category"
    answers = {}
    for batch, asked in zip(batches, ([0, 2], [3], [0, 3], [1], [1]), strict=True):
        plain = batch[0][2]
        for row, prompt, tokens in zip(asked, batch[0][1], plain.tokens, strict=True):
            turns, before = ROWS[row][1], answers.get(row)
            talk = [{"role": "user", "content": turns[0]}]
            if before is not None:
                talk += [{"role": "assistant", "content": before}, {"role": "user", "content": turns[1]}]
            assert prompt == template.encode(talk)
            answers[row] = template.tokenizer.decode(tokens)
    others = [call[2].tokens != batch[0][2].tokens for batch in batches for call in batch[1:]]
    assert any(others) == bool(sampling)
    assert all((row["identical_sequences"] is None) == bool(sampling) for row in ended.record["rows"])


def test_the_standard_error_is_over_conversations(bench, decoded, tmp_path: Path) -> None:
    """Whose turns are counted together, in a category and over all of them."""
    ended = bench("--drafters ngram self")
    drawn = [output.stats.rows for name, _, output, _ in decoded if name.endswith(", self")]
    # Two conversations at a time: the turns of math, then of letters, then of end.
    (first, second), (third,), (first_on, third_on), (fourth,), (fourth_on,), (fifth,) = drawn
    each = [total([first, first_on]), second, total([third, third_on]), total([fourth, fourth_on]), fifth]
    math, whole = lines(tmp_path / "out.jsonl")[0]["rows"][1], ended.record["rows"][-1]
    assert (math["drafter"], whole["category"]) == ("self", "all")
    for row, own in ((math, each[:3]), (whole, each)):
        assert row["verified_of_each"] == [one.verified for one in own] and len({*row["verified_of_each"]}) > 1
        assert row["acceptance_standard_error"] == round(acceptance_standard_error(own) or 0, 4)
    assert any(f"{whole['acceptance_rate']:.3f} ± {whole['acceptance_standard_error']:.3f}" in x for x in ended.lines)


def test_a_draft_model_drafts_beside_the_others(bench, talking: Path) -> None:
    """The target itself over all entries is always right; an option goes to the drafters that have it."""
    ended = bench(f"--categories letters --drafters ngram standalone:{talking} --draft_policy full --max_ngram 2")
    ngram, model = ended.record["rows"]
    assert model["drafter"] == f"standalone:{talking}" and model["draft_model"] == "talking"
    options = [(row.get("max_ngram"), row["draft_policy"]) for row in (ngram, model)]
    assert options == [(2, None), (None, "full")]
    assert model["acceptance_rate"] == 1.0 and model["identical_sequences"] == model["sequences"] == 2


def test_a_drafter_that_would_choose_is_refused(bench) -> None:
    assert "self@auto" in bench("--drafters ngram self@auto").refusal


def record(category: str, drafter: str, accepted: int, seconds: float, **other: Any) -> dict[str, Any]:
    row = {"drafter": drafter, "gamma": 3, "draft_budget": None, "sequences": 4, "identical_sequences": 4}
    row |= {"rounds": 10, "drafted": 30, "verified": 20, "accepted": accepted, "emitted": 10 + accepted}
    row |= {"seconds": seconds, "baseline_emitted": 10 + accepted, "baseline_seconds": 2.0}
    setting = {"model": "M", "prompts": "p.jsonl", "B": 8, "gen_len": 64, "verification": "greedy", "temperature": 0.0}
    named = {"benchmark": "spec_bench", "category": category}
    return named | setting | {"rows": [row]} | other


def test_categories_are_summed_by_tokens_and_settings_apart() -> None:
    one, two = record("a", "self", 10, 1.0), record("b", "self", 2, 4.0)
    apart = record("a", "self", 10, 1.0, B=1)
    rows = table_rows([one, apart, two])
    assert [(row["B"], row["category"]) for row in rows] == [(8, "a"), (8, "b"), (8, "all"), (1, "a")]
    whole = rows[2]
    assert whole["acceptance_rate"] == 12 / 40 and whole["mean_accepted_length"] == 32 / 20
    assert whole["acceptance_standard_error"] is None, "these records do not have each conversation"
    assert whole["speedup"] == pytest.approx((32 / 5) / (32 / 4)) and whole["identical_sequences"] == 8
