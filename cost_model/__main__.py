"""Measure what rounds cost on this machine, and predict what speculation gains.

    python -m cost_model --batches 1 4 8 --contexts 1000 4000 --budgets 128 512 --alpha 0.8

measures plain steps, verifications and draft steps on a grid, over KV caches of random entries, and prints the
predicted speedup of every (policy, budget, gamma), with the best of each batch and context.

    speedup = tokens_per_round(alpha, gamma) * plain / (gamma * draft + verify(gamma) + other)

is MagicDec's formula (arXiv 2408.11049) with costs that are measured, and with what else a round takes. For a machine
that is not here, costs are predicted from the numbers of its data sheet, and nothing is loaded:

    python -m cost_model --machine 8xA100 --model_name meta-llama/Meta-Llama-3.1-8B --B 64 --context 32000
"""

from common import cli
from cost_model.flags import CostFlags
from cost_model.report import report_measured, report_predicted


def main(flags: CostFlags) -> None:
    flags.check()
    (report_measured if flags.machine is None else report_predicted)(flags)


if __name__ == "__main__":
    cli.run_alone(main, CostFlags)
