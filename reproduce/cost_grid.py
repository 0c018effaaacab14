"""`python -m engine.cost_model`, as a script that a sweep can run."""

from common import cli
from engine.bench.cost_flags import CostFlags
from engine.cost_model.__main__ import main

if __name__ == "__main__":
    cli.run_alone(main, CostFlags)
