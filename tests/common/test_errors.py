"""Programs end with one message for a user's error, and quietly where nobody reads on."""

import os
import subprocess
import sys
from textwrap import indent

import pytest
import torch.distributed as dist

from common.checkout import ROOT
from engine.parallel.launch import run_on_ranks
from tests.support.programs import BENCHMARKS, in_fork, python

PROGRAM = """
import select
from common.exit import exit_on_user_error

def until_unread(fd):
    poll = select.poll()
    poll.register(fd, 0)
    poll.poll()

def main():
{body}

exit_on_user_error(main)
"""
UNREAD_CODE = 141


@pytest.mark.parametrize(
    "body",
    ["for i in range(100_000): print(i)", "print(0, flush=True)\nuntil_unread(1)\nprint(1)"],
    ids=["more than a pipe holds", "less than a buffer holds"],
)
def test_a_reader_that_leaves_sees_no_error(body):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PROGRAM.format(body=indent(body, "    "))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as started:
        with started.stdout as stdout:
            assert stdout.readline() == b"0\n"
        assert (started.stderr.read(), started.wait()) == (b"", UNREAD_CODE)


def test_a_user_error_of_an_import_is_one_message_and_exit_code_2():
    """Flags are made of policies' files, before a program runs."""
    fails = "from common import cli\nfrom common.errors import refuse\nrefuse('B', 0, '1 or more')"
    assert python("-c", fails).refusal.startswith("error: --B is not 1 or more\n")


def test_characters_that_stdout_cannot_encode_are_escaped():
    ended = python("-c", PROGRAM.format(body=r"    print('caf\u00e9 \u20ac \ud800')"), PYTHONIOENCODING="ascii")
    assert (ended.code, ended.out, ended.err) == (0, r"caf\xe9 \u20ac \ud800" + "\n", "")


INTERRUPTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError"
OUR_PROGRAMS = ("foretoken.py chat", BENCHMARKS[0], "convert_hf_checkpoint.py", "-m reproduce.train_head")


@pytest.mark.parametrize("program", OUR_PROGRAMS)
def test_an_interrupt_while_a_program_imports_is_a_line(program, tmp_path):
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    ended = python(*program.split(), PYTHONPATH=str(tmp_path))
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (130, "", 1) and "Traceback" not in ended.err


def test_other_errors_of_an_import_keep_their_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('a damaged file')")
    ended = python("foretoken.py", PYTHONPATH=str(tmp_path))
    assert ended.code == 1 and "Traceback" in ended.err and "a damaged file" in ended.err


class Held:
    number = 1

    def __del__(self) -> None:
        os.write(1, b"freed")


def lose_a_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    held = Held()
    print(held.number)
    raise RuntimeError("it timed out")


def test_a_rank_that_lost_another_frees_nothing(monkeypatch):
    """Freeing symmetric memory of a GPU that still waits for the other would wait, too."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    ended = in_fork(lambda: run_on_ranks(lose_a_rank))
    assert (ended.code, ended.out) == (3, "1\n") and "--rank_timeout" in ended.err
