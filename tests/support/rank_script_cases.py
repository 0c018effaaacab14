"""Run a benchmark script with a fault in rank 1: `rank_script_cases.py FAULT SCRIPT ARGUMENTS...`.

A fault is a function of this file, or another value for a flag, such as "--gamma 4".
"""

import os
import runpy
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from engine.parallel.all_reduce import AllReduce
from engine.parallel.ranks import Ranks
from engine.runner import Chunks, ModelRunner

BROKEN_RANK = 1


def change_a_decision() -> None:
    """Change a row's next token in one round."""
    decided, rounds = Ranks.decided, count()

    def changed(self: Ranks, decide: Callable[[], Tensor], *shape: int) -> Tensor:
        tensor = decided(self, decide, *shape)
        if len(shape) == 2 and next(rounds) == 3:
            tensor[:, 2] += 1
        return tensor

    Ranks.decided = changed


def skew_sums() -> None:
    """Make sums one unit in the last place too large, as other hardware may."""
    exact = AllReduce.__call__

    def skewed(self: AllReduce, x: Tensor) -> Tensor:
        total = exact(self, x)
        return torch.nextafter(total, torch.full_like(total, torch.inf))

    AllReduce.__call__ = skewed


def spoil_a_prompt() -> None:
    """Make logits in the middle of the first prompt not finite."""
    filling, prompts = ModelRunner.filling, count(-1)  # the first forward measures memory

    def spoiled(self: ModelRunner, *args: object) -> Chunks[tuple[Tensor, Tensor]]:
        hidden, finite = yield from filling(self, *args)
        finite[5] &= next(prompts) != 0
        return hidden, finite

    ModelRunner.filling = spoiled


if __name__ == "__main__":
    _, fault, *sys.argv = sys.argv
    is_broken = int(os.environ["RANK"]) == BROKEN_RANK
    if is_broken and fault.startswith("--"):
        name, value = fault.split()
        sys.argv[sys.argv.index(name) + 1] = value
    elif is_broken:
        {"change_a_decision": change_a_decision, "skew_sums": skew_sums, "spoil_a_prompt": spoil_a_prompt}[fault]()
    runpy.run_path(sys.argv[0], run_name="__main__")
