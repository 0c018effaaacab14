"""Benchmarks on ranks that divide the models or the prompts: the tokens, saved rows and numbers of one process.

All exact: float64 on a CPU over gloo, a model whose heads, units and token ids do not divide by two.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.record import ratio
from engine.controller import PLAIN, RoundChoice
from engine.stats import Counts, RoundStats, Stats
from tests.support.on_ranks import run_benchmarks
from tests.support.programs import benchmark
from tests.support.rank_jobs import DRAFT, Models, forked, read_rows

N_PROMPTS = 5
SAME = ("tokens_sha256", "tokens_generated", "sequences", "identical_sequences", "drafted", "accepted")
SAME += ("acceptance_per_position",)
COUPLED = "--temperature 0.8 --seed 3 --verification coupled"
OWN = [f"{'It was the best of times, ' * (number % 4)}it was number {number}" for number in range(N_PROMPTS)]


REPLICA = {"data_parallel": 2, "tensor_parallel": 1}
SHARDS = {"data_parallel": 1, "tensor_parallel": 2, "all_reduce": "gloo", "draft_ranks": [1]}
# A script with arguments that one process takes, some for ranks, and what the record says of those. `selfspec` has
# prompts of many lengths, and saves rows.
CASES: dict[int, list[tuple[str, str, str, dict[str, Any]]]] = {
    2: [
        ("longspec", f"{COUPLED} --benchmark", "--check_ranks --rank_group 1 0 --draft_ranks 1", SHARDS),
        ("selfspec", COUPLED, "--data_parallel 2", REPLICA),
    ],
    4: [
        ("selfspec", COUPLED, "--data_parallel 2 --check_ranks", {"tensor_parallel": 2}),
        ("longspec", "--benchmark", "--data_parallel 2 --rank_group 1 0 --draft_ranks 1", {"data_parallel": 2}),
    ],
}


def command(script: str, arguments: str, models: Models, folder: Path) -> list[str]:
    if script == "selfspec":
        flags = f"--model {models.target} --prompts {folder / 'own.jsonl'} --B 2 --gen_len 12 --dtype float64"
        return f"{flags} {DRAFT} --save_rows rows {arguments}".split()
    return models.arguments(script, f"--num_prompts {N_PROMPTS} {arguments}")


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_emit_what_one_process_emits(
    n_ranks: int, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases run one after another in the same processes. The first of two replicas has two of five prompts."""
    cases, folder, alone = CASES[n_ranks], tmp_path / "together", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    (folder / "own.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in OWN))
    commands = [
        [script, *command(script, arguments, models, folder), *of_ranks.split(), "--output", "out"]
        for script, arguments, of_ranks, _ in cases
    ]
    ended = forked(n_ranks, folder, run_benchmarks, commands)
    assert ended.code == 0, ended.err
    monkeypatch.chdir(alone)
    said = ""
    lines = (folder / "out").read_text().splitlines()
    for (script, arguments, of_ranks, expected), line in zip(cases, lines, strict=True):
        undivided, seen = benchmark(script, command(script, arguments, models, folder)), json.loads(line)
        one, said = undivided.record, said + undivided.err
        assert {key: seen[key] for key in SAME} == {key: one[key] for key in SAME}, (script, of_ranks)
        assert one["sequences"] == N_PROMPTS
        if script == "selfspec" or n_ranks == 2:
            assert one["identical_sequences"] == N_PROMPTS
            assert 0 < one["accepted"] < one["verified"], "some drafts are meant to be right, some wrong"
        wanted = expected | {"B": one["B"], "prefix_len": one["prefix_len"]}
        assert {key: seen[key] for key in wanted} == wanted
        assert len(seen["peak_memory_bytes_per_rank"]) == n_ranks
        assert max(seen["peak_memory_bytes_per_rank"]) == seen["peak_memory_bytes"] > 0
        # Of the timed pass, whose rounds are those of all replicas.
        assert (seen["verify_step_ms"] is None) == (one["verify_step_ms"] is None)
        assert set(seen["contention"]) == set(one["contention"])
        if script == "selfspec":
            rows = read_rows(folder / "rows")
            assert rows == read_rows(alone / "rows") and len(rows) == 2 * N_PROMPTS
    assert ended.out.count('{"benchmark": ') == len(cases), "one rank prints"
    if n_ranks == 2:
        assert all(ended.err.count(once) == said.count(once) for once in ("loading ", "note: ")), ended.err
    else:
        assert ", 2 x 2 ranks, " in ended.out and ": 2 rows at a time" in ended.out


def rounds(*each: tuple[float, int, int], choice: RoundChoice = PLAIN) -> tuple[RoundStats, ...]:
    return tuple(RoundStats(*one, choice) for one in each)


def test_stats_of_replicas_add_up() -> None:
    """Throughputs add up, over the rounds in which all rows of that replica are busy; the slowest ends the pass."""
    fast = Stats((Counts(2, 6, 5, [2], [1]),), (rounds((0.5, 1, 3), (0.5, 1, 2), choice=RoundChoice(0, 1)),), 4.0, 0.25)
    slow = Stats((Counts(3, 0, 6), Counts(2, 0, 5)), (rounds((1, 2, 6), (1, 2, 4), (2, 1, 1)),), 3.0, 0.5)
    both = Stats.joined([fast, slow])
    assert (fast.tokens_per_second, slow.tokens_per_second, both.tokens_per_second) == (5, 5, 10)
    assert (both.decode_seconds, both.prefill_seconds, both.draft_prefill_seconds) == (4, 4, 0.5)
    assert both.rounds == fast.rounds + slow.rounds and both.rows == fast.rows + slow.rows
    assert [one.seconds for one in both.steady()] == [0.5, 0.5, 1, 1]
    assert ratio(both.decode_seconds, fast.decode_seconds) == 4
    nothing = Stats((), ((),), 1.0)
    assert nothing.tokens_per_second is None and nothing.decode_seconds == 0
    assert Stats.joined([nothing, slow]).tokens_per_second == 5
