"""A benchmark on two ranks of torchrun of which one is killed or hangs, while it speculates."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.programs import ROOT, benchmark
from tests.support.rank_jobs import LAUNCHER, EndedOnRanks, Job, Models, launched, read_rows

N_LONGER = 4
# A few seconds of speculation after the baseline; the third row starts when the first two are done.
LONGER = f"--num_prompts {N_LONGER} --gen_len 40 --save_rows"


@contextmanager
def speculating(models: Models, rows: Path, victim: int) -> Iterator[tuple[Job, int]]:
    """Start a run on two ranks, and wait for the baseline's rows and the first others; yield the id of a rank, too."""
    flags = models.arguments("selfspec", f"{LONGER} {rows} --rank_timeout 5")
    with launched(rows.parent, [*LAUNCHER, str(ROOT / "tests/selfspec_benchmark.py"), *flags], {}) as job:
        job.until(lambda: rows.exists() and rows.read_bytes().count(b"\n") > N_LONGER, "rows")
        pid = job.rank(victim)
        assert pid is not None
        yield job, pid


def require_first(ended: EndedOnRanks, rank: int, exit_code: int) -> None:
    """Require no traceback, no output, and `rank` as the first to fail."""
    assert ended.out == "" and "Traceback" not in ended.ours, ended.err
    assert re.search(rf"rank +: {rank} .*\s+exitcode +: {exit_code} ", ended.first_to_fail), ended.err


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_rows_survive_a_rank_that_is_killed(victim: int, models: Models, tmp_path: Path) -> None:
    """After kill -9 in the middle of the speculation the run ends at once and says which rank died."""
    undisturbed, rows = tmp_path / "undisturbed", tmp_path / "rows"
    benchmark("selfspec", models.arguments("selfspec", f"{LONGER} {undisturbed}"))
    expected = read_rows(undisturbed)
    assert len(expected) == 2 * N_LONGER
    with speculating(models, rows, victim) as (job, pid):
        seen = rows.read_bytes()
        os.kill(pid, signal.SIGKILL)
        ended = job.end(30)
        job.until(lambda: not job.processes(), "all processes gone", 5)
    require_first(ended, victim, -9)
    assert rows.read_bytes().startswith(seen)
    kept = read_rows(rows)
    assert N_LONGER < len(kept) < len(expected), "killed in the middle of the speculation"
    assert kept == {key: expected[key] for key in kept}


@pytest.mark.slow
def test_a_rank_that_answers_no_more_ends_the_run(models: Models, tmp_path: Path) -> None:
    """The other rank gives up on a rank that is stopped. (torchrun's SIGTERM does not reach a stopped process.)"""
    with speculating(models, tmp_path / "rows", 1) as (job, pid):
        os.kill(pid, signal.SIGSTOP)
        job.until(lambda: job.rank(0) is None, "the end of rank 0", 35)
        job.until(lambda: f"Sending process {pid} closing signal SIGTERM" in job.err, "torchrun's turn", 15)
        os.kill(pid, signal.SIGCONT)
        ended = job.end(15)
    require_first(ended, 0, 3)
    assert ended.ours.count("error: ") == 1 and "rank 0 lost another rank" in ended.err, ended.err
    assert len(read_rows(tmp_path / "rows")) > N_LONGER
