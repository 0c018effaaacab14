"""Foretoken in the terminal. `foretoken.py SUBCOMMAND --help` lists a subcommand's flags."""

from operator import methodcaller
from typing import Any

from common import cli
from serving.serve import Serve
from terminal.chat import Chat
from terminal.compare import Compare
from terminal.eval import Eval
from terminal.latency import Latency

# Each class is named like its subcommand; its fields are the flags, and its method `run` is the program.
SUBCOMMANDS: Any = Compare | Latency | Eval | Chat | Serve

if __name__ == "__main__":
    cli.run(methodcaller("run"), SUBCOMMANDS)
