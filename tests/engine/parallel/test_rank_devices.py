"""The GPU that each process gets, and how a lost rank ends a round. No GPU is needed."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.cuda._utils import _get_device_index

from common.errors import ConfigError
from engine import generate
from engine.parallel.launch import LOST_RANK
from engine.parallel.ranks import Ranks, start_ranks
from engine.timing import PhaseTimer
from models.storage import resolve_device
from tests.support.recorded_graph import RecordedGraphs
from tests.support.tiny import random_prompts, tiny_runner


@pytest.fixture
def machine(monkeypatch):
    """Function that pretends to be a process of torchrun on a machine with GPUs."""

    def of(n_gpus: int, n_processes: int, local_rank: int, world_size: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
        for name, value in (("LOCAL_WORLD_SIZE", n_processes), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", world_size)):
            monkeypatch.setenv(name, str(value))
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return of


@pytest.mark.parametrize(
    "where,wanted,given",
    [
        ((8, 8, 3, 8), "auto", "cuda:3"),
        ((8, 2, 1, 4), "cuda", "cuda:1"),
        ((1, 1, 0, 4), "auto", "cuda:0"),  # torchrun with one process a machine
        ((4, 1, 0, 1), "cuda:2", "cuda:2"),
        ((1, 4, 3, 4, "3"), "auto", "cuda:0"),  # --gpus-per-task=1
        ((0, 2, 1, 2), "auto", "cpu"),
        *(((2, 4, 0, 4), "auto", None), ((4, 2, 0, 2), "cuda:1", None), ((1, 2, 1, 2), "cuda", None)),  # too few
    ],
)
def test_every_process_gets_a_gpu_of_its_own_with_a_number(machine, monkeypatch, where, wanted, given):
    """PyTorch refuses to join other ranks on a device without a number."""
    machine(*where)
    if given is None:
        with pytest.raises(ConfigError):
            resolve_device(wanted)
        return
    assert resolve_device(wanted) == given
    if given == "cpu" or where[3] == 1:
        return
    chosen, joined = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(_get_device_index(device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *given, device_id, **_: joined.append((*given, device_id)))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: where[3])
    assert start_ranks(resolve_device(wanted)).device == torch.device(given)
    assert chosen == [int(given[-1])] and joined == [("cpu:gloo,cuda:nccl", torch.device(given))]


def test_a_round_that_a_lost_rank_never_ends_is_given_up(monkeypatch):
    """After a replay on a GPU, reading its outcome, or the time of a phase, would wait for ever."""
    ranks = Ranks(device=torch.device("cuda"), timeout=timedelta(seconds=0.05))
    phase, prompts = PhaseTimer(ranks.device, ranks.timeout), random_prompts([9, 4])
    left, queries = [3], []

    def query() -> bool:
        queries.append(left[0])
        left[0] -= 1
        return left[0] < 0

    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=query))
    runner = tiny_runner(2, ranks=ranks, new_graphs=RecordedGraphs)
    alone = generate(tiny_runner(2), prompts, max_new_tokens=6)
    assert generate(runner, prompts, max_new_tokens=6).tokens == alone.tokens
    assert queries[:4] == [3, 2, 1, 0] and len(queries) == 3 + len(alone.stats.rounds)
    left[0] = 10**9
    with pytest.raises(RuntimeError, match=LOST_RANK):
        generate(runner, prompts, max_new_tokens=6)
    with pytest.raises(RuntimeError, match=LOST_RANK), phase("draft"):
        pass
