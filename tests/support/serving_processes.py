"""`python -m serving` as a process."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from tests.support.programs import ROOT
from tests.support.rank_jobs import LAUNCHER, Job, launched
from tests.support.serving_cases import FLAGS, Served


@contextmanager
def serving_process(folder: Path, checkpoint: Path, n_ranks: int) -> Iterator[tuple[Job, Served]]:
    words = [*LAUNCHER] if n_ranks > 1 else [sys.executable]
    command = [*words, "-m", "serving", f"--model={checkpoint}", "--port=0", *FLAGS.split()]
    with launched(folder, command, {"PYTHONPATH": str(ROOT)}) as job:
        job.until(lambda: "serving " in job.err or job.launcher.poll() is not None, "a server")
        found = re.search(r"serving .* on (http://\S+)", job.err)
        assert found, job.err
        yield job, Served(SimpleNamespace(url=found[1]), None, [])  # type: ignore[arg-type]
