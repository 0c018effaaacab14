"""`python -m cost_model`, as a script that a sweep can run."""

from common import cli
from cost_model.__main__ import main
from cost_model.flags import CostFlags

if __name__ == "__main__":
    cli.run_alone(main, CostFlags)
