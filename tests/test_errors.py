"""How a command line ends: with one message for the user's errors, quietly where nobody reads on."""

import os
import subprocess
import sys
from textwrap import indent

import pytest

from common.checkout import ROOT

ALONE = "from common.exit import exit_on_user_error as run"
ON_RANKS = "from engine.parallel.launch import run_on_ranks as run"
PROGRAM = """
{how}
import os, select, sys
from common.errors import ConfigError

def until_unread(fd):
    poll = select.poll()
    poll.register(fd, 0)
    poll.poll()

def main():
{body}

run(main)
"""
FIRST_OF_TWO = {"WORLD_SIZE": "2", "RANK": "0"}
both = pytest.mark.parametrize("how", [ALONE, ON_RANKS], ids=["alone", "on ranks"])
REFUSE = "raise ConfigError('too small', where='--B', seen=0, required='1 or more', fix='use 1')"
REFUSAL = b"error: too small\n  where:    --B\n  seen:     0\n  required: 1 or more\n  fix:      use 1\n"
UNREAD_CODE = 141


def run(
    body: str, *, how: str = ALONE, leave: str = "", lines: int = 0, encoding: str = "utf-8"
) -> tuple[int, bytes, bytes]:
    """The exit code of a program with that `main`, and what it printed in that encoding.

    leave: of `stdout` or `stderr` only so many lines are read, and then nobody reads it any more.
    """
    program = PROGRAM.format(how=how, body=indent(body, "    "))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONIOENCODING": encoding} | (FIRST_OF_TWO if how == ON_RANKS else {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment, **pipes) as started:
        read = {}
        if leave:
            with getattr(started, leave) as stream:
                read[leave] = b"".join(stream.readline() for _ in range(lines))
        for name in pipes.keys() - read:
            read[name] = getattr(started, name).read()
        return started.wait(), read["stdout"], read["stderr"]


SAYING = {
    "more than a pipe holds": "for i in range(100_000): print(i)",
    "less than a buffer holds": "print(0, flush=True)\nuntil_unread(1)\nprint(1)",
    "past the buffer": "os.write(1, b'0\\n')\nuntil_unread(1)\nos.write(1, b'1\\n')",
}


@pytest.mark.parametrize("what", SAYING)
def test_whoever_stops_reading_sees_no_error(what):
    assert run(SAYING[what], leave="stdout", lines=1) == (UNREAD_CODE, b"0\n", b"")


@both
def test_ranks_end_as_quietly(how):
    assert run("until_unread(1)\nprint(1)", how=how, leave="stdout") == (UNREAD_CODE, b"", b"")


def test_a_user_error_is_one_message():
    assert run(f"print(1)\n{REFUSE}") == (2, b"1\n", REFUSAL)


def test_what_stdout_cannot_encode_is_escaped():
    body = r"print('caf\u00e9 \u20ac \ud800')"
    assert run(body, encoding="ascii") == (0, rb"caf\xe9 \u20ac \ud800" + b"\n", b"")
    assert run(body, encoding="utf-8") == (0, "caf\u00e9 \u20ac ".encode() + rb"\ud800" + b"\n", b"")


LOST = """
import torch.distributed as dist

class Held:
    def __del__(self):
        os.write(1, b"freed")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = Held()
print(1)
raise RuntimeError("it timed out")
"""


def test_a_rank_that_waited_in_vain_for_another_frees_nothing():
    """Of a GPU that still waits for the other, freeing symmetric memory would wait, too."""
    code, out, err = run(LOST, how=ON_RANKS)
    assert (code, out) == (3, b"1\n") and b"did not answer in time (--rank_timeout)" in err
