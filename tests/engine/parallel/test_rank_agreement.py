"""Ranks that were started unlike: what differs is named on all of them, before any waits for another."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from models.checkpoints.loading import read_checkpoint, save_checkpoint
from tests.support.on_ranks import open_cases
from tests.support.programs import overriding
from tests.support.rank_jobs import Models, forked


def scaled(weights: dict[str, Tensor]) -> None:
    weights["layers.1.attention.wo.weight"] *= 1.001


def one_element(weights: dict[str, Tensor]) -> None:
    weights["tok_embeddings.weight"].view(-1)[1500] += 1  # a place that a cheap digest skips


def reordered(weights: dict[str, Tensor]) -> None:
    weights.update({name: weights.pop(name) for name in [*weights][::-1]})


def copied(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Copy a checkpoint without its manifest, and change its weights."""
    shutil.copytree(source, folder)
    (folder / "manifest.json").unlink()
    config, weights = read_checkpoint(source)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    change(weights)
    save_checkpoint(folder / "model.pth", config, weights)
    return folder


def test_ranks_that_were_started_unlike_say_so_on_all_ranks(models: Models, tmp_path: Path) -> None:
    """Sessions open one after another in the same processes, before and after the first that joins the ranks."""
    copy = f"--model {copied(models.target, tmp_path / 'copy', reordered)}"  # the same weights in another order
    other = f"--model {copied(models.target, tmp_path / 'other', scaled)}"
    element = f"--model {copied(models.target, tmp_path / 'element', one_element)}"
    draft = f"--model {copied(models.draft, tmp_path / 'draft', scaled)}"
    usual = {script: " ".join(models.arguments(script)) for script in ("selfspec", "longspec")}
    usual["serving"] = f"--model={models.target} --gamma 3 --max_batch 2 --max_length 60"
    # A program, flags on both ranks, flags on the first and on the second, and what the error names.
    cases: list[tuple[str, str, str, str, tuple[str, ...]]] = [
        ("selfspec", "", "", "--gamma 4", ("--gamma: 3 on rank 0, 4 on rank 1",)),
        ("selfspec", "", "", other, ("the target's weights",)),
        ("selfspec", "", "", copy, ()),
        ("selfspec", "", "", other, ("the target's weights",)),
        ("selfspec", "--check_ranks", "", element, ("the target's weights",)),
        ("selfspec", "--check_ranks", "", copy, ()),
        ("selfspec", "", "", "--gen_len 13", ("--gen_len: 12 on rank 0, 13 on rank 1",)),
        ("selfspec", "", "", "--dtype float32", ("--dtype: float64 on rank 0, float32 on rank 1",)),
        ("selfspec", "", "", "--draft suffix", ("SelfConfig on rank 0, SuffixConfig on rank 1",)),
        ("selfspec", "", "", "--rank_group 1 0", ("--rank_group",)),
        ("selfspec", "", "", "", ("torch: ", "numpy: ", "triton: ")),  # other versions
        ("longspec", "", "", draft, ("the draft's weights",)),
        ("longspec", "--draft_ranks 1", draft, "", ()),  # of a draft that rank 0 does not hold
        ("serving", "", "", "--prefill_tokens 16", ("--prefill_tokens: None on rank 0, 16 on",)),
        ("serving", "", "", "", ()),
    ]
    given = []
    for program, shared, *by_rank, names in cases:
        flags = [" ".join(overriding(usual[program], f"{shared} {more}")) for more in by_rank]
        given.append((program, flags, "0.1" if "torch: " in names else None))
    ended = forked(2, tmp_path, open_cases, given)
    assert ended.code == 0, ended.err
    on_ranks = [json.loads((tmp_path / f"said.{number}").read_text()) for number in range(2)]
    assert on_ranks[0] == on_ranks[1]
    for said, (*case, names) in zip(on_ranks[0], cases, strict=True):
        assert all(part in said for part in names) and bool(said) == bool(names), (case, said)
        assert not said or "rank 0" in said.partition("seen:")[2], said
