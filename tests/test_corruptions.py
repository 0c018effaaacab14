"""Each kind of damage to each file of a tiny random checkpoint, converted and loaded: what it comes to.

A case is refused by the errors that a user is meant to see, accepted with the very weights, configuration and
tokenizer of before ("harmless"), or accepted with others ("wrong"). All is verified against a manifest: nothing that
was changed may be accepted but in the manifest itself, where it may be harmless.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoint_damage import EDITS, damage
from checkpoint_folders import HF_CONFIG, OTHER, make_folders

from common.errors import UserError
from convert_hf_checkpoint import convert
from models import load_model
from models.checkpoints.manifest import MANIFEST
from models.checkpoints.tokenizer import load_tokenizer

DATA_KINDS = ("flip in data", "zero in data", "NaN or infinity")
ANYWHERE = ("flip elsewhere", "zero elsewhere", "insert", "delete")
WEIGHTS = {
    "safetensors": "model.safetensors",
    "sharded": "model-00001-of-00002.safetensors",
    "bin": "pytorch_model.bin",
    "gguf": "tiny.gguf",
    "converted": "model.pth",
}


class Case(NamedTuple):
    """One kind of damage to one file of a folder that `make_folders` made; `number` tells repeats apart."""

    folder: str
    file: str
    kind: str
    number: int


def all_cases(repeats: int) -> Iterator[Case]:
    """Every kind of damage to every file, `repeats` times at other places; every edit of JSON once."""
    texts = [("sharded", "model.safetensors.index.json")]
    texts += [(folder, file) for folder in ("safetensors", "converted") for file in EDITS if "index" not in file]
    for folder, file in [*WEIGHTS.items(), *texts]:
        kinds = {
            "truncate": repeats,
            "append": repeats,
            "drop": int(file != MANIFEST and "index" not in file),
            **dict.fromkeys(ANYWHERE, repeats),
            "swap": 1,
            **dict.fromkeys(DATA_KINDS if file in WEIGHTS.values() else (), repeats),
            "edit": len(EDITS.get(file, ())),
        }
        for kind, count in kinds.items():
            yield from (Case(folder, file, kind, number) for number in range(count))


def used(folder: Path) -> list[Any]:
    """All of a checkpoint that a run uses, converted first if need be, as values that compare by ==."""
    if folder.name != "converted":
        folder = convert(folder, folder / "out").parent
    model, tokenizer = load_model(folder, prepack=False, verify=True), load_tokenizer(folder)
    weights = {name: weight.numpy().tobytes() for name, weight in model.state_dict().items()}
    return [model.config, weights, tokenizer.encode("Some text, and that is to be tokenised."), tokenizer.pieces()]


def outcome(case: Case, made: Path, wanted: list[Any], scratch: Path) -> str:
    folder = shutil.copytree(made / "model" / case.folder, scratch / case.folder)
    other, rng = made / "other" / case.folder / case.file, random.Random(f"0 {case}")
    damage(folder / case.file, case.kind, other, case.number, rng)
    try:
        return "harmless" if used(folder) == wanted else "wrong"
    except UserError:
        return "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the tokenizers package is no Exception
        return f"crashed: {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("repeats,every", [(1, 6), pytest.param(6, 1, marks=pytest.mark.slow)])
def test_damage_is_refused(tmp_path: Path, repeats: int, every: int) -> None:
    cases = list(all_cases(repeats))[::every]
    assert {case.folder for case in cases} == WEIGHTS.keys() and len(cases) > 60
    for name, config in {"model": HF_CONFIG, "other": OTHER}.items():
        make_folders(tmp_path / name, config)
    wanted = {name: used(shutil.copytree(tmp_path / "model" / name, tmp_path / "whole" / name)) for name in WEIGHTS}
    seen = {case: outcome(case, tmp_path, wanted[case.folder], tmp_path / "scratch") for case in cases}
    accepted = {case: what for case, what in seen.items() if what != "refused"}
    assert {case: what for case, what in accepted.items() if (case.file, what) != (MANIFEST, "harmless")} == {}
