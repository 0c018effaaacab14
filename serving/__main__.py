"""Serve a model over HTTP. Under torchrun, the first rank listens."""

from operator import methodcaller

from common import cli
from engine.parallel import end_on_ranks
from serving.serve import Serve

if __name__ == "__main__":
    cli.run(methodcaller("run"), Serve, end_on_ranks)
