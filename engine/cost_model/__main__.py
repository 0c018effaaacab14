"""`python -m engine.cost_model`."""

from common import cli
from engine.bench.cost_flags import CostFlags


def main(flags: CostFlags) -> None:
    from engine.bench.cost_report import report

    flags.check()
    report(flags)


if __name__ == "__main__":
    cli.run_alone(main, CostFlags)
