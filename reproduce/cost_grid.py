"""`python -m engine.cost_model`, as a script that a sweep can run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from engine.bench.cost_report import main

if __name__ == "__main__":
    main()
