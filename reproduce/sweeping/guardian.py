"""Runs one command and sees to its end: nothing that it started outlives the process that asked for it.

    python guardian.py SOCKET COMMAND...

SOCKET is the number of an inherited socket. When the command has ended, whatever it left running is killed and
its exit code is sent, negative for a signal. When the other side closes the socket, which it does by dying, too,
everything is killed at once. On Linux the command dies also with this process, and this process inherits orphans
of the command that have left its process group; elsewhere those are missed. Needs nothing of the project.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REAP_SECONDS = 0.005


def die_with(parent: int) -> None:
    """In a new process: be killed when `parent` ends, even if that was a moment ago."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def children() -> Iterator[int]:
    """Processes whose parent is this one, as far as /proc tells."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            # The name in parentheses may hold anything; the state and the parent follow it.
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                yield int(stat.parent.name)


def end_everything(group: int) -> None:
    """Kill the group, then whatever has become a child of this process through that, until there is none."""
    with suppress(ChildProcessError):
        while True:
            with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
                os.killpg(group, signal.SIGKILL)
            for pid in children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            time.sleep(REAP_SECONDS)


def main() -> None:
    asker = socket.socket(fileno=int(sys.argv[1]))
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die = partial(die_with, os.getpid())
    command = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die)

    def end_with_asker() -> None:
        with suppress(OSError):  # a connection that was reset is closed, too
            asker.recv(1)
        end_everything(command.pid)
        os._exit(0)

    threading.Thread(target=end_with_asker, daemon=True).start()
    exit_code = command.wait()
    end_everything(command.pid)
    with suppress(OSError):  # nobody is left to answer
        asker.sendall(b"%d" % exit_code)


if __name__ == "__main__":
    main()
