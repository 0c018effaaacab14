"""Replicas that divide the prompts: on four ranks the tokens, saved rows and numbers of one process; one record."""

import json
import pickle
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import replica_cases
import torch
from programs import Ended, benchmark, python
from rank_jobs import DRAFT, Models, on_two_ranks, read_rows, results

from common.errors import ConfigError, RankError
from engine.bench.record import ratio
from engine.pacing import PLAIN, Choice
from engine.parallel.ranks import Ranks, check_rank_group, check_replicas
from engine.stats import Counts, RoundStats, Stats

N_PROMPTS = 7
SAMPLED = "--temperature 0.8 --seed 3 --verification"
OWN = [f"{'It was the best of times, ' * (number % 4)}it was number {number}" for number in range(N_PROMPTS)]


@dataclass(frozen=True)
class Case:
    """A script with arguments that one process takes, and some for replicas. own: prompts of many lengths."""

    script: str
    arguments: str
    of_ranks: str = "--data_parallel 2"
    own: bool = False

    def command(self, models: Models, folder: Path) -> list[str]:
        """For one process."""
        if self.own:
            flags = f"--model {models.target} --prompts {folder / 'own.jsonl'} --B 2 --gen_len 12 --dtype float64"
            return f"{flags} {DRAFT} --save_rows rows {self.arguments}".split()
        return models.arguments(self.script, f"--num_prompts {N_PROMPTS} {self.arguments}")


CASES = {
    "coupled, prompts of many lengths": Case("selfspec", f"{SAMPLED} coupled", "--data_parallel 2 --check_ranks", True),
    "rejection": Case("selfspec", f"{SAMPLED} rejection"),
    "a draft model on one rank of each": Case(
        "longspec", "--benchmark", "--data_parallel 2 --rank_group 1 0 --draft_ranks 1"
    ),
    "gamma auto": Case("selfspec", "--gamma auto"),
    "replicas of one rank": Case("baseline", f"{SAMPLED} coupled --B 1", "--data_parallel 4"),
}


@dataclass(frozen=True)
class Together:
    """What four ranks printed and wrote."""

    ended: Ended
    folder: Path
    records: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def together(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Together:
    folder = tmp_path_factory.mktemp("together")
    (folder / "own.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in OWN))
    commands = [
        [case.script, *case.command(models, folder), *case.of_ranks.split(), "--output", "out"]
        for case in CASES.values()
    ]
    (folder / "commands").write_text("\n".join(map(shlex.join, commands)))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4")
    ended = python(*torchrun, replica_cases.__file__, "commands", cwd=folder, FORETOKEN_CACHE=str(folder / "cache"))
    assert ended.code == 0, ended.err
    records = map(json.loads, (folder / "out").read_text().splitlines())
    return Together(ended, folder, dict(zip(CASES, records, strict=True)))


@pytest.mark.parametrize("what", CASES)
def test_replicas_emit_what_one_process_emits(
    what: str, together: Together, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven prompts, of which the first replica has three."""
    monkeypatch.chdir(tmp_path)
    one = benchmark(CASES[what].script, CASES[what].command(models, together.folder)).record
    seen = together.records[what]
    if seen["measured_costs"]:  # what is drafted depends on times, what is emitted does not
        assert seen["tokens_sha256"] == one["tokens_sha256"] and seen["identical_sequences"] == N_PROMPTS
    else:
        assert results(seen) == results(one)
    assert one["sequences"] == N_PROMPTS
    n_replicas = int(re.findall(r"--data_parallel (\d)", CASES[what].of_ranks)[0])
    ranks = {"data_parallel": n_replicas, "tensor_parallel": 4 // n_replicas, "B": one["B"]}
    assert {key: seen[key] for key in ranks} == ranks
    assert len(seen["peak_memory_bytes_per_rank"]) == len(seen["startup_memory_bytes_per_rank"]) == 4
    assert seen["prefix_len"] == one["prefix_len"] and set(seen["contention"]) == set(one["contention"])
    # Of the timed pass, whose rounds are those of both replicas.
    assert (seen["verify_step_ms"] is None) == (one["verify_step_ms"] is None)
    if CASES[what].own:
        assert one["identical_sequences"] == N_PROMPTS and 0 < one["accepted"] < one["judged"]
        rows = read_rows(together.folder / "rows")
        assert rows == read_rows(tmp_path / "rows") and len(rows) == 2 * N_PROMPTS
    assert together.ended.out.count('"benchmark": ') == len(CASES), "one rank prints"
    assert "on 2 replicas of 2 ranks, " in together.ended.out and "2 rows at a time in each" in together.ended.out


def test_a_prompt_that_fails_on_another_replica_ends_the_run_with_its_number(models: Models, tmp_path: Path) -> None:
    """The second replica has prompts 2 to 4."""
    arguments = models.arguments("baseline", "--num_prompts 5 --data_parallel 2 --save_rows rows")
    said = on_two_ranks(tmp_path, "baseline", arguments, "spoil_a_prompt").message("[01]", 2)
    assert said.count("error") == 1
    assert re.search(r"seen: +row 2: logits at position 5 are NaN or infinite\n", said), said
    rows = read_rows(tmp_path / "rows")
    reasons = {row: kept["finish_reason"] for (_, row), kept in rows.items()}
    assert reasons == {row: "error" if row == 2 else "length" for row in range(5)}


def rounds(*each: tuple[float, int, int], choice: Choice = PLAIN) -> tuple[RoundStats, ...]:
    return tuple(RoundStats(*one, choice) for one in each)


def test_what_replicas_did_at_the_same_time() -> None:
    """Throughputs add up, over the rounds in which all rows of that replica are busy; the slowest ends the pass."""
    fast = Stats((Counts(2, 6, 5, [2], [1]),), (rounds((0.5, 1, 3), (0.5, 1, 2), choice=Choice(0, 1)),), 4.0, 0.25)
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


def test_replicas_have_as_many_ranks_each_which_are_numbered_alike() -> None:
    assert (check_replicas(1, 1), check_replicas(2, 4), check_replicas(4, 4)) == (1, 2, 1)
    for n_replicas, n_ranks in ((0, 4), (-2, 4), (3, 4), (2, 1), (8, 4)):
        with pytest.raises(ConfigError, match="--data_parallel"):
            check_replicas(n_replicas, n_ranks)
    assert check_rank_group([1, 0], 2, n_replicas=2) == (1, 0)
    with pytest.raises(ConfigError, match=r"each of the 2 ranks of each of 2 replicas, once: 0 1"):
        check_rank_group([0, 1, 2, 3], 2, n_replicas=2)


def test_ranks_that_disagree_are_named_by_their_numbers_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gathered", lambda self, value: [value, "other"])
    with pytest.raises(RankError, match=r"on rank 2, other on rank 3\n(.*\n)+.*look at rank 3:"):
        Ranks(0, 2, check=True, first=2).require_same(lambda: "a round", lambda: [torch.zeros(1)])


def test_an_error_is_told_by_another_process_as_by_its_own() -> None:
    with pytest.raises(ConfigError) as refused:
        check_replicas(3, 4)
    error = pickle.loads(pickle.dumps(refused.value))
    flags = {"data_parallel": "--replicas"}
    assert type(error) is ConfigError and error.told(flags) == refused.value.told(flags) != str(error)
