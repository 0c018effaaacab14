"""Benchmark scripts on two ranks of torchrun of which one is killed or hangs."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.programs import benchmark
from tests.support.rank_jobs import Job, Models, read_rows, started

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")

N_LONGER = 4
# A few seconds of speculation after the baseline; the third row starts when the first two are done.
LONGER = f"--num_prompts {N_LONGER} --gen_len 40"


@contextmanager
def speculating(models: Models, folder: Path, more: str = "") -> Iterator[Job]:
    """Start a run on two ranks, and wait until the baseline and first speculative rows are saved in `rows`."""
    rows = folder / "rows"
    with started(folder, "selfspec", models.arguments("selfspec", f"{LONGER} --save_rows {rows} {more}")) as job:
        job.until(lambda: rows.exists() and rows.read_bytes().count(b"\n") > N_LONGER, "rows")
        yield job


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_rows_survive_a_rank_that_is_killed(victim: int, models: Models, tmp_path: Path) -> None:
    """After kill -9 in the middle of the speculation the run ends at once and says which rank died."""
    undisturbed = tmp_path / "undisturbed"
    benchmark("selfspec", models.arguments("selfspec", f"{LONGER} --save_rows {undisturbed}"))
    expected = read_rows(undisturbed)
    assert len(expected) == 2 * N_LONGER
    with speculating(models, tmp_path) as job:
        pid = job.rank(victim)
        assert pid is not None
        seen = (tmp_path / "rows").read_bytes()
        os.kill(pid, signal.SIGKILL)
        ended = job.end(30)
        job.until(lambda: not job.processes(), "all processes gone", 5)
    assert ended.out == ""
    assert re.search(rf"rank +: {victim} .*\s+exitcode +: -9 \(pid: {pid}\)", ended.first_to_fail), ended.err
    assert "Traceback" not in ended.ours
    assert (tmp_path / "rows").read_bytes().startswith(seen)
    kept = read_rows(tmp_path / "rows")
    assert N_LONGER < len(kept) < len(expected), "killed in the middle of the speculation"
    assert kept == {key: expected[key] for key in kept}


@pytest.mark.slow
def test_a_rank_that_answers_no_more_ends_the_run(models: Models, tmp_path: Path) -> None:
    """A rank that is stopped, not dead, makes the other rank give up. (torchrun's SIGTERM does not reach a stopped
    process.)"""
    with speculating(models, tmp_path, "--rank_timeout 5") as job:
        pid = job.rank(1)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        job.until(lambda: "rank 0 lost another rank" in job.err, "the message", 15)
        job.until(lambda: job.rank(0) is None, "the end of rank 0", 20)
        job.until(lambda: f"Sending process {pid} closing signal SIGTERM" in job.err, "torchrun's turn", 15)
        os.kill(pid, signal.SIGCONT)
        ended = job.end(15)
    assert ended.message("0", 3).count("error: ") == 1, ended.err
    assert len(read_rows(tmp_path / "rows")) > N_LONGER
