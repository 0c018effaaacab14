"""Ranks, of torchrun or forked from a process that has imported the project; and the models that they run."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore
from transformers import LlamaConfig

from convert_hf_checkpoint import convert
from engine.parallel.launch import run_on_ranks
from tests.support.hf_tiny import SHAPE, random_model, save_folder
from tests.support.programs import Ended, overriding

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.support.on_ranks", "tests.support.parallel_cases"])
JOB = "FORETOKEN_TEST_JOB"
LIMIT_SECONDS = 300  # of any command
N_PROMPTS = 3
SIZES = f"--B 2 --num_prompts {N_PROMPTS} --prefix_len 60 --gen_len 12 --dtype float64"
DRAFT = "--gamma 3 --streamingllm_budget 16 --n_sink 4 --draft_dtype same"
# Heads, units and token ids do not divide by two.
UNEVEN = {"hidden_size": 72, "intermediate_size": 101, "num_attention_heads": 9, "num_key_value_heads": 3}
CONFIG = LlamaConfig(
    **SHAPE | UNEVEN | {"num_hidden_layers": 3, "max_position_embeddings": 256}, bos_token_id=0, eos_token_id=2
)


@dataclass(frozen=True)
class Models:
    """Converted checkpoints with one tokenizer, and books. `draft` is `target` without a layer that matters little."""

    target: Path
    draft: Path
    books: Path

    def arguments(self, script: str, more: str = "") -> list[str]:
        """Return arguments with which the script runs, and more."""
        paths = [f"--model={self.target / 'model.pth'}"]
        if script == "longspec":
            paths = [f"--target={self.target}", f"--model={self.draft}"]
        flags = SIZES if script == "baseline" else f"{SIZES} {DRAFT}"
        return [*paths, f"--dataset={self.books}", *overriding(flags, more)]


def make_models(root: Path, books: Path) -> Models:
    made = Models(*(root / name for name in ("target", "draft")), books)
    made.target.mkdir()
    model = random_model(CONFIG)
    for name, parameter in model.named_parameters():
        if name.endswith(("layers.1.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight")):
            parameter.mul_(0.3)
    save_folder(model, made.target)
    convert(made.target, made.target)
    convert(made.target, made.draft, layers_to_drop=(1,))
    return made


def forked(n_ranks: int, folder: Path, task: Callable[..., None], *given: object) -> Ended:
    """Call `task(*given)` in a folder, on ranks that are forked; of their exit codes the first to fail counts, and ends
    the others, as torchrun does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [(rank, n_ranks, store.port, folder) for rank in range(n_ranks)]
    ranks = [FORKING.Process(target=_as_rank, args=(*place, task, *given)) for place in places]
    for rank in ranks:
        rank.start()
    deadline, failed = time.monotonic() + LIMIT_SECONDS, None
    while running := [rank for rank in ranks if rank.exitcode is None]:
        ended = wait([rank.sentinel for rank in running], deadline - time.monotonic())
        failed = failed or next((rank for rank in running if rank.sentinel in ended and rank.exitcode), None)
        for rank in running if failed or not ended else ():
            rank.kill()
    return Ended(failed.exitcode if failed else 0, (folder / "stdout").read_text(), (folder / "stderr").read_text())


def _as_rank(rank: int, n_ranks: int, port: int, folder: Path, task: Callable[..., None], *given: object) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in variables.items()}, TORCHELASTIC_RESTART_COUNT="0")
    os.chdir(folder)
    torch.set_num_threads(1)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with Path(name).open("ab") as file:
            os.dup2(file.fileno(), number)
    run_on_ranks(lambda: task(*given))


class EndedOnRanks(Ended):
    """Exit code and output of a command under torchrun."""

    @property
    def ours(self) -> str:
        """Stderr of the ranks before torchrun's summary; requires a failure."""
        assert self.code != 0, self.out
        return re.split(r"^[WE]\d{4} .*torch/distributed", self.err, maxsplit=1, flags=re.MULTILINE)[0]

    @property
    def first_to_fail(self) -> str:
        """The first failure in torchrun's summary; requires a failure."""
        assert self.code != 0, self.out
        return self.err.partition("Root Cause (first observed failure):")[2]


@dataclass(frozen=True)
class Job:
    """A command on two ranks while it runs. `id_` is in the environment of all its processes."""

    launcher: subprocess.Popen[bytes]
    folder: Path
    id_: str

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return the job's processes that still run."""
        return [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(JOB) == self.id_]

    def rank(self, rank: int) -> int | None:
        """Return the process id of a rank, None if it has ended; its children have larger ids."""
        pids = [one.pid for one in self.processes() if one.info["environ"].get("RANK") == f"{rank}"]
        return min(pids, default=None)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.err}"
            time.sleep(0.02)

    def end(self, seconds: float = LIMIT_SECONDS) -> EndedOnRanks:
        self.until(lambda: self.launcher.poll() is not None, "the end", seconds)
        return EndedOnRanks(self.launcher.wait(), (self.folder / "out").read_text(errors="replace"), self.err)


@contextmanager
def launched(folder: Path, command: list[str], environment: dict[str, str]) -> Iterator[Job]:
    """Start a command that starts other processes, and kill all of them at the end."""
    job_id = str(uuid.uuid4())
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"OMP_NUM_THREADS": "1", JOB: job_id} | environment
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        launcher = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=err)
    job = Job(launcher, folder, job_id)
    try:
        yield job
    finally:
        for process in job.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.wait()


def read_rows(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of a --save_rows file, and require whole lines."""
    text = path.read_text() if path.exists() else ""
    assert text == "" or text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({row.pop("run") for row in rows}) == 1, "rows of different runs"
    assert all(set(row) == {"pass", "row", "finish_reason", "tokens", "text"} for row in rows)
    assert len({(row["pass"], row["row"]) for row in rows}) == len(rows), "a row twice"
    return {(row["pass"], row["row"]): row for row in rows}
