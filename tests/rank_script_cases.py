"""Runs a benchmark script of which rank 1 is broken: `rank_script_cases.py FAULT SCRIPT ARGUMENTS...`."""

import os
import runpy
import sys
from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from common.errors import CheckpointError
from engine.parallel.all_reduce import AllReduce
from engine.parallel.ranks import Ranks
from engine.runner import Chunks, ModelRunner
from models import Transformer

BROKEN_RANK = 1
BUG = "a bug that only one rank has"
DAMAGE = "a file that only one machine lacks"


def raise_in_a_step() -> None:
    """A bug: an exception in the middle of a pass."""
    step, calls = ModelRunner.step, count()

    def broken(self: ModelRunner, *args: object) -> Tensor:
        if next(calls) == 3:
            raise IndexError(BUG)
        return step(self, *args)

    ModelRunner.step = broken


def refuse_the_checkpoint() -> None:
    """A user error that the other ranks do not find."""

    def refuse(*args: object, **kwargs: object) -> Transformer:
        raise CheckpointError(DAMAGE, where="model.pth", seen="nothing", required="a file", fix="copy it there")

    import models.checkpoints.model_source

    models.checkpoints.model_source.load_model = refuse


def change_a_decision() -> None:
    """Another next token than the leader's in one round."""
    decided, rounds = Ranks.decided, count()

    def changed(self: Ranks, decide: Callable[[], Tensor], *shape: int) -> Tensor:
        tensor = decided(self, decide, *shape)
        if len(shape) == 2 and next(rounds) == 3:
            tensor[:, 2] += 1
        return tensor

    Ranks.decided = changed


def skew_sums() -> None:
    """Sums that are one unit in the last place too large, as those of other hardware can be."""
    exact = AllReduce.__call__

    def skewed(self: AllReduce, x: Tensor) -> Tensor:
        total = exact(self, x)
        return torch.nextafter(total, torch.full_like(total, torch.inf))

    AllReduce.__call__ = skewed


def spoil_a_prompt() -> None:
    """Logits in the middle of the first prompt that are not finite."""
    filling, prompts = ModelRunner.filling, count(-1)  # the first forward measures memory

    def spoiled(self: ModelRunner, *args: object) -> Chunks[tuple[Tensor, Tensor]]:
        hidden, finite = yield from filling(self, *args)
        finite[5] &= next(prompts) != 0
        return hidden, finite

    ModelRunner.filling = spoiled


BUGS = raise_in_a_step, refuse_the_checkpoint, change_a_decision, skew_sums, spoil_a_prompt
FAULTS = {fault.__name__: fault for fault in BUGS}

if __name__ == "__main__":
    _, fault, *sys.argv = sys.argv
    if int(os.environ["RANK"]) == BROKEN_RANK:
        FAULTS[fault]()
    runpy.run_path(sys.argv[0], run_name="__main__")
