"""Foretoken in the terminal. `foretoken.py SUBCOMMAND --help` lists a subcommand's flags."""

from operator import methodcaller
from typing import Any

from common import cli
from engine.terminal.chat import Chat
from engine.terminal.compare import Compare
from engine.terminal.eval import Eval
from engine.terminal.latency import Latency
from serving.serve import Serve

# Each in a file of its own: a class of flags, in lower case the subcommand's name, with a method `run`.
SUBCOMMANDS: Any = Compare | Latency | Eval | Chat | Serve

if __name__ == "__main__":
    cli.run_alone(methodcaller("run"), SUBCOMMANDS)
