"""`python -m engine.cost_model`, as a script that a sweep can run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from common import cli
from engine.bench.cost_flags import CostFlags
from engine.cost_model.__main__ import main

if __name__ == "__main__":
    cli.run_alone(main, CostFlags)
