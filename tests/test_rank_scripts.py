"""The benchmark scripts on two ranks of torchrun: the tokens of one process, and an end to every failure.

All exact: float64 on a CPU over gloo, a model whose heads, units and token ids do not divide by two.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_tiny import N_TOKENS, random_model, save_folder
from rank_script_cases import BUG, DAMAGE
from test_benchmarks import ROOT, edit_config, flat, refusal
from transformers import LlamaConfig

from common.errors import RankError
from convert_hf_checkpoint import convert
from engine.parallel.launch import _tell_user_error
from models.checkpoints.loading import read_checkpoint, save_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
JOB = "FORETOKEN_TEST_JOB"
LIMIT_SECONDS = 120  # of any command
N_PADDED = N_TOKENS + 7
GREEDY, COUPLED = "", "--temperature 0.8 --verification coupled --seed 3"
SIZES = {"--B": 2, "--num_prompts": 3, "--prefix_len": 60, "--gen_len": 12, "--dtype": "float64"}
DRAFT = {"--gamma": 3, "--streamingllm_budget": 16, "--n_sink": 4, "--draft_dtype": "same"}
# A few seconds of speculation behind the baseline; the third row starts when the first two are done.
LONGER = {"--num_prompts": 4, "--gen_len": 40}
SAME_ON_ANY_RANKS = (
    *("tokens_sha256", "tokens_generated", "sequences", "identical_sequences", "distinct_4gram_fraction"),
    *("drafted", "judged", "accepted", "emitted", "acceptance_rate", "acceptance_per_position"),
    *("mean_accepted_length", "mean_accepted_length_per_row"),
)


@dataclass(frozen=True)
class Models:
    """Converted checkpoints with one tokenizer: `draft` is `target` without a layer that matters little, `padded`
    is `draft` with more ids, which it likes best. And something to read."""

    target: Path
    draft: Path
    padded: Path
    books: Path

    def arguments(self, script: str, draft: str = "draft") -> list[str]:
        """The script's good arguments."""
        if script == "longspec":
            paths = {"--target": self.target, "--model": getattr(self, draft)}
        else:
            paths = {"--model": self.target / "model.pth"}
        return flat(paths | {"--dataset": self.books} | SIZES | ({} if script == "baseline" else DRAFT))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    made = Models(*(root / name for name in ("target", "draft", "padded", "books")))
    config = LlamaConfig(
        vocab_size=N_TOKENS,
        hidden_size=72,
        intermediate_size=101,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=2,
    )
    made.target.mkdir()
    model = random_model(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("layers.1.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight")):
            parameter.mul_(0.3)
    save_folder(model, made.target)
    convert(made.target, made.target)
    convert(made.target, made.draft, layers_to_drop=(1,))
    shutil.copytree(made.draft, made.padded)
    edit_config(made.padded, vocab_size=N_PADDED)
    small, state_dict = read_checkpoint(made.draft)
    state_dict = dict(state_dict)
    for name in ("tok_embeddings.weight", "output.weight"):
        more = 2 * torch.randn(N_PADDED - N_TOKENS, small.dim, generator=torch.Generator().manual_seed(0))
        state_dict[name] = torch.cat([state_dict[name], more])
    save_checkpoint(made.padded / "model.pth", replace(small, vocab_size=N_PADDED), state_dict)
    made.books.mkdir()
    for number in range(3):
        text = " ".join(f"{number}{word} and" for word in range(200))
        (made.books / f"book{number}.txt").write_text(text[:200])
    return made


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The one JSON object on stdout, which is its last line; needs exit code 0."""
        assert self.code == 0, self.err
        records = [line for line in self.out.splitlines() if line.startswith("{")]
        assert records == self.out.splitlines()[-1:], self.out
        return json.loads(records[0])

    @property
    def ours(self) -> str:
        """What the ranks wrote before torchrun had its say; needs another exit code than 0."""
        assert self.code != 0, self.out
        return re.split(r"^[WE]\d{4} .*torch/distributed", self.err, maxsplit=1, flags=re.MULTILINE)[0]

    @property
    def first_to_fail(self) -> str:
        """The first failure in torchrun's summary; needs another exit code than 0."""
        assert self.code != 0, self.out
        return self.err.partition("Root Cause (first observed failure):")[2]


@dataclass(frozen=True)
class Job:
    """A command on two ranks while it runs. `mark` is in the environment of all its processes."""

    launcher: subprocess.Popen[bytes]
    folder: Path
    mark: str

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def processes(self) -> dict[int, list[bytes]]:
        """The environments of all its processes that are left, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # another user's, or gone meanwhile
                continue
            if self.mark.encode() in environment:
                found[int(folder.name)] = environment
        return found

    def rank(self, rank: int) -> int | None:
        """The process id of a rank, None if it has ended; what a rank starts itself comes after it."""
        of_rank = [pid for pid, values in self.processes().items() if f"RANK={rank}".encode() in values]
        return min(of_rank, default=None)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.err}"
            time.sleep(0.02)

    def end(self, seconds: float = LIMIT_SECONDS) -> Ended:
        self.until(lambda: self.launcher.poll() is not None, "the end", seconds)
        return Ended(self.launcher.wait(), (self.folder / "out").read_text(errors="replace"), self.err)


@contextmanager
def started(folder: Path, script: str, arguments: list[str], fault: str | None = None) -> Iterator[Job]:
    """Start a benchmark on two ranks; whatever is left of it in the end is killed."""
    job_id = str(uuid.uuid4())
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", JOB: job_id} | ({"PYTHONPATH": str(ROOT)} if fault else {})
    path = str(ROOT / "tests" / f"{script}_benchmark.py")
    command = [path] if fault is None else [str(ROOT / "tests" / "rank_script_cases.py"), fault, path]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        launcher = subprocess.Popen(
            [*LAUNCHER, *command, *arguments], cwd=folder, env=environment, stdout=out, stderr=err
        )
    job = Job(launcher, folder, f"{JOB}={job_id}")
    try:
        yield job
    finally:
        for pid in job.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def on_two_ranks(folder: Path, script: str, arguments: list[str], fault: str | None = None) -> Ended:
    with started(folder, script, arguments, fault) as job:
        return job.end()


def alone(
    script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Ended:
    """Run a benchmark in this process."""
    path = ROOT / "tests" / f"{script}_benchmark.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(path), run_name="__main__")
    return Ended(0, *capsys.readouterr())


def results(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in SAME_ON_ANY_RANKS}


@dataclass(frozen=True)
class Case:
    """A script with arguments that one process takes, and some for two ranks. Draft: see Models."""

    script: str
    arguments: str
    of_ranks: str = ""
    draft: str = "draft"
    rank_group: tuple[int, ...] = (0, 1)
    draft_ranks: tuple[int, ...] | None = None


CASES = {
    "selfspec, greedy, checked": Case("selfspec", GREEDY, "--check_ranks"),
    "selfspec, coupled, one layer drafts, shards in reverse": Case(
        "selfspec", f"{COUPLED} --draft_layers 0", "--rank_group 1 0", rank_group=(1, 0)
    ),
    "baseline, coupled": Case("baseline", COUPLED),
    "longspec, coupled, the other rank drafts": Case(
        "longspec", f"{COUPLED} --benchmark", "--draft_ranks 1", draft_ranks=(1,)
    ),
    "longspec, coupled, both draft, a padded vocabulary": Case("longspec", COUPLED, draft="padded", draft_ranks=(0, 1)),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow) if what.startswith("baseline") else what for what in CASES]
)
def test_two_ranks_emit_what_one_process_emits(
    what: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[what]
    arguments = [*models.arguments(case.script, case.draft), *case.arguments.split()]
    undivided = alone(case.script, arguments, monkeypatch, capsys)
    one = undivided.record
    if case.script != "baseline":
        assert one["identical_sequences"] == SIZES["--num_prompts"]
        assert 0 < one["accepted"] < one["judged"], "some drafts are meant to be right, some wrong"
    ended = on_two_ranks(tmp_path, case.script, [*arguments, *case.of_ranks.split()])
    two = ended.record
    assert results(two) == results(one), ended.err
    assert (two["tensor_parallel"], two["all_reduce"]) == (2, "gloo")
    assert two["rank_group"] == list(case.rank_group)
    assert two["draft_ranks"] == (list(case.draft_ranks) if case.draft_ranks else None)
    assert two["check_ranks"] == ("--check_ranks" in case.of_ranks)
    assert len(two["peak_memory_bytes_per_rank"]) == 2
    assert max(two["peak_memory_bytes_per_rank"]) == two["peak_memory_bytes"] > 0
    assert ended.out.count("tokens per second") == 1
    for said_once in ("loading ", "note: "):
        assert ended.err.count(said_once) == undivided.err.count(said_once)


@pytest.fixture(scope="module")
def all_refuse(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A flag that each rank finds wrong before it has met the others."""
    arguments = [*models.arguments("selfspec"), "--streamingllm_budget", "2"]
    return on_two_ranks(tmp_path_factory.mktemp("refusal"), "selfspec", arguments)


def test_what_all_ranks_refuse_is_said_once(all_refuse: Ended) -> None:
    assert all_refuse.out == ""
    # By the leader, unless it starts seconds later than the other and has not come to speak yet.
    assert len(re.findall(r"error(?: on rank 1)?: ", all_refuse.ours)) == 1, all_refuse.err
    assert all_refuse.ours.count("budget 2, n_sink 4") == 1
    assert "Traceback" not in all_refuse.ours
    assert re.search(r"rank +: [01] .*\s+exitcode +: 2 ", all_refuse.first_to_fail), all_refuse.err


def test_a_user_error_shows_nobody_our_frames(all_refuse: Ended) -> None:
    assert str(ROOT / "engine") not in all_refuse.err


def test_what_only_the_leader_finds_is_said_once(models: Models, tmp_path: Path) -> None:
    """It reads the text, while the other rank waits for its prompts."""
    ended = on_two_ranks(tmp_path, "baseline", [*models.arguments("baseline"), "--dataset", "nowhere.txt"])
    assert ended.out == ""
    assert ended.ours.count("error: ") == ended.ours.count("nowhere.txt (no such file") == 1
    assert "error on rank" not in ended.ours and "lost another rank" not in ended.ours
    assert re.search(r"rank +: 0 .*\s+exitcode +: 2 ", ended.first_to_fail)


@dataclass(frozen=True)
class Bad:
    script: str
    n_ranks: int
    arguments: str
    says: tuple[str, ...]


BAD_RANKS = {
    "more ranks than KV heads": Bad("selfspec", 4, "", ("--rank_group", "3 KV heads, 4 ranks", "1 to 3 ranks")),
    "a rank without a part": Bad("selfspec", 2, "--rank_group 0", ("--rank_group", "0 1", "--nproc_per_node=1")),
    "a rank that does not run": Bad("selfspec", 2, "--rank_group 0 2", ("--rank_group", "seen:     0 2", "0 1")),
    "a draft on no such rank": Bad("longspec", 2, "--draft_ranks 5", ("--draft_ranks", "seen:     5", "some of 0 1")),
    "a draft twice on a rank": Bad("longspec", 2, "--draft_ranks 1 1", ("--draft_ranks", "1 1", "each once")),
}


@pytest.mark.parametrize("what", BAD_RANKS)
def test_bad_ranks_are_refused(
    what: str, models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it before a rank waits for another, so that one process can be told of more."""
    bad = BAD_RANKS[what]
    monkeypatch.setenv("WORLD_SIZE", str(bad.n_ranks))
    message = refusal(bad.script, [*models.arguments(bad.script), *bad.arguments.split()], monkeypatch, capsys)
    for part in (*bad.says, "where:", "seen:", "required:", "fix:"):
        assert part in message


def edit_vocabulary(source: Path, folder: Path, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
    """A copy of a checkpoint with another vocabulary in its tokenizer."""
    shutil.copytree(source, folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = change(content["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_a_draft_that_means_other_tokens_is_refused(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One id of all differs."""
    vocabulary = json.loads((models.target / "tokenizer.json").read_text())["model"]["vocab"]
    changed = vocabulary["~"]

    def rename(vocab: dict[str, int]) -> dict[str, int]:
        return {"another" if token == "~" else token: index for token, index in vocab.items()}

    edit_vocabulary(models.draft, tmp_path / "draft", rename)
    arguments = [*models.arguments("longspec"), "--model", str(tmp_path / "draft")]
    message = refusal("longspec", arguments, monkeypatch, capsys)
    for part in (f"token id {changed} of draft and target", "'another' and '~'", "another vocabulary"):
        assert part in message


@pytest.mark.parametrize("longer", ["draft's config", "draft's tokenizer", "target's config"])
def test_a_padded_vocabulary_is_accepted_with_a_note(
    longer: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = models.arguments("longspec", "padded")
    if longer == "draft's tokenizer":
        more = {f"<extra {index}>": index for index in range(N_TOKENS, N_PADDED)}
        edit_vocabulary(models.padded, tmp_path / "padded", lambda vocab: vocab | more)
        arguments += ["--model", str(tmp_path / "padded")]
    if longer == "target's config":
        arguments += flat({"--target": models.padded, "--model": models.draft})
    ended = alone("longspec", arguments, monkeypatch, capsys)
    assert ended.record["identical_sequences"] == SIZES["--num_prompts"]
    notes = [line for line in ended.err.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: only padded has the token ids {N_TOKENS} to {N_PADDED - 1}, which are never drafted"]


def read_rows(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of a --save_rows file, which has to be whole lines."""
    text = path.read_text() if path.exists() else ""
    assert text == "" or text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({row.pop("run") for row in rows}) == 1, "rows of one run say which"
    assert all(set(row) == {"pass", "row", "finish_reason", "tokens", "text"} for row in rows)
    assert len({(row["pass"], row["row"]) for row in rows}) == len(rows), "a row twice"
    return {(row["pass"], row["row"]): row for row in rows}


@contextmanager
def speculating(models: Models, folder: Path, more: tuple[str, ...] = ()) -> Iterator[Job]:
    """A run of two ranks that has emitted the baseline and the first rows of the speculation, saved in `rows`."""
    rows = folder / "rows"
    arguments = [*models.arguments("selfspec"), *flat(LONGER), "--save_rows", str(rows), *more]
    with started(folder, "selfspec", arguments) as job:
        job.until(lambda: rows.exists() and rows.read_bytes().count(b"\n") > LONGER["--num_prompts"], "rows")
        yield job


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_rows_survive_a_rank_that_is_killed(
    victim: int, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 in the middle of the speculation; the run ends at once and says which rank died, of what."""
    undisturbed = tmp_path / "undisturbed"
    arguments = [*models.arguments("selfspec"), *flat(LONGER), "--save_rows", str(undisturbed)]
    alone("selfspec", arguments, monkeypatch, capsys)
    expected = read_rows(undisturbed)
    assert len(expected) == 2 * LONGER["--num_prompts"]
    with speculating(models, tmp_path) as job:
        pid = job.rank(victim)
        assert pid is not None
        seen = (tmp_path / "rows").read_bytes()
        os.kill(pid, signal.SIGKILL)
        ended = job.end(30)
        job.until(lambda: not job.processes(), "all processes gone", 5)
    assert ended.out == ""
    assert re.match(
        rf"\s*\[0\]:\s+time .*\s+host .*\s+rank +: {victim} .*\s+exitcode +: -9 \(pid: {pid}\) +\(SIGKILL\)",
        ended.first_to_fail,
    ), ended.err
    assert "Traceback" not in ended.ours
    assert (tmp_path / "rows").read_bytes().startswith(seen)
    kept = read_rows(tmp_path / "rows")
    assert LONGER["--num_prompts"] < len(kept) < len(expected), "killed in the middle of the speculation"
    assert kept == {key: expected[key] for key in kept}


@pytest.mark.slow
def test_a_rank_that_answers_no_more_ends_the_run(models: Models, tmp_path: Path) -> None:
    """It hangs: stopped, not dead. The other gives up and ends.

    Then torchrun's turn has come, whose SIGTERM a stopped process does not see. It would kill it 30 s later,
    which nobody here waits for.
    """
    with speculating(models, tmp_path, ("--rank_timeout", "5")) as job:
        pid = job.rank(1)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        job.until(lambda: "rank 0 lost another rank" in job.err, "the message", 15)
        job.until(lambda: job.rank(0) is None, "the end of rank 0", 20)
        job.until(lambda: f"Sending process {pid} closing signal SIGTERM" in job.err, "torchrun's turn", 15)
        os.kill(pid, signal.SIGCONT)
        ended = job.end(15)
    assert ended.ours.count("error: ") == 1 and "Timed out" in ended.ours, ended.err
    assert "Traceback" not in ended.ours
    assert re.search(r"rank +: 0 .*\s+exitcode +: 3 ", ended.first_to_fail)
    assert len(read_rows(tmp_path / "rows")) > LONGER["--num_prompts"]


def test_a_bug_of_one_rank_is_named(models: Models, tmp_path: Path) -> None:
    """torchrun's summary has the rank and the exception, the rank's own output where it happened."""
    ended = on_two_ranks(tmp_path, "selfspec", models.arguments("selfspec"), "raise_in_a_step")
    assert ended.out == ""
    assert re.search(r"rank +: 1 .*\s+exitcode +: 1 ", ended.first_to_fail), ended.err
    assert f"IndexError: {BUG}" in ended.first_to_fail
    assert f"IndexError: {BUG}" in ended.ours and "in broken" in ended.ours
    assert "rank 1 lost" not in ended.err


@pytest.mark.slow
def test_what_only_another_rank_refuses_is_said_with_its_number(models: Models, tmp_path: Path) -> None:
    ended = on_two_ranks(tmp_path, "selfspec", models.arguments("selfspec"), "refuse_the_checkpoint")
    assert ended.out == ""
    assert ended.ours.count("error") == ended.ours.count(f"error on rank 1: {DAMAGE}") == 1, ended.err
    assert "Traceback" not in ended.ours
    assert re.search(r"rank +: 1 .*\s+exitcode +: 2 ", ended.first_to_fail), ended.err


def test_check_ranks_stops_ranks_that_disagree(models: Models, tmp_path: Path) -> None:
    arguments = [*models.arguments("selfspec"), "--check_ranks"]
    ended = on_two_ranks(tmp_path, "selfspec", arguments, "change_a_decision")
    assert ended.out == ""
    assert "error: ranks disagree" in ended.err, ended.err
    assert re.search(r"seen: +digest [0-9a-f]{16} on rank 0, [0-9a-f]{16} on rank 1\n", ended.ours)
    assert "look at rank 1:" in ended.ours and "a round from positions [" in ended.ours
    assert "Traceback" not in ended.ours


class TogetherStore:
    """A store of which two threads look for a key before either goes on, as two ranks that fail together do."""

    def __init__(self) -> None:
        self._store, self._barrier = dist.HashStore(), threading.Barrier(2)

    def check(self, keys: list[str]) -> bool:
        there = self._store.check(keys)
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait(1)
        return there

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_what_all_ranks_find_together_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = TogetherStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    error = RankError("ranks disagree", where="a round", seen="1 and 2", required="the same", fix="none")
    ranks = [threading.Thread(target=_tell_user_error, args=(error,)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert capsys.readouterr().err.count("error: ranks disagree") == 1


def test_ranks_that_round_apart_emit_the_same_and_agree(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank's sums are one unit in the last place larger: only the leader decides, so nothing comes apart."""
    arguments = models.arguments("selfspec")
    one = alone("selfspec", arguments, monkeypatch, capsys).record
    two = on_two_ranks(tmp_path, "selfspec", [*arguments, "--check_ranks"], "skew_sums").record
    assert results(two) == results(one)
    assert two["check_ranks"] is True
