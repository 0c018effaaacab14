"""Predict what speculation gains on a machine that is not here, or from costs that runs have measured.

    python -m cost_model --machine 8xA100 --model_name meta-llama/Meta-Llama-3.1-8B --B 64 --context 32000

predicts the costs of each size and draft from the numbers of a data sheet, loads nothing, and prints the speedup of
every gamma, with the best draft of each batch and context:

    speedup = tokens_per_round(alpha, gamma) * plain / (gamma * draft + verify(gamma) + other)

is MagicDec's formula (arXiv 2408.11049). On this machine, runs with `--gamma auto` measure these costs and the
acceptance; `--records FILE` takes them from the records of such runs.
"""

from operator import methodcaller

from common import cli
from cost_model.report import CostFlags

if __name__ == "__main__":
    cli.run(methodcaller("run"), CostFlags)
