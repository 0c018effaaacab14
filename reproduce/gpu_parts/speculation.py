"""Part c: speculation beside plain decoding on the default model and book, many cells over one prefilled state."""

import json
import tempfile
from functools import partial
from pathlib import Path

from engine.bench import passes
from engine.bench.config import Sampling, Sizes, Target, Text
from models.checkpoints.default_model import DEFAULT_BOOK, DEFAULT_CHECKPOINT
from reproduce.gpu_parts.cells import Cell, Options, Record, Skip, shared
from reproduce.gpu_parts.setups import COUPLED, Filled, open_session, self_draft

SAMPLINGS = {"coupled": COUPLED, "greedy": Sampling(verification="greedy")}
MOST_GAMMA = 4
# Rows and prompt tokens, and the cells (gamma, weights of the draft) over each; the most telling ones first.
USUAL = ((3, "same"),)
SIZES = (
    (64, 7500, (*USUAL, (2, "same"), (4, "same"), (3, "int4"))),
    *((batch, prefix, USUAL) for batch, prefix in ((256, 7500), (16, 7500), (64, 4000), (256, 4000), (16, 4000))),
)
QUICK_SIZES = ((2, 96, ((2, "same"),)),)
# More than English prose takes, on average over a prompt.
CHARACTERS_PER_TOKEN = 5


def budget_of(options: Options) -> int:
    return 32 if options.quick else 512


def cells(options: Options) -> list[Cell]:
    found = []
    for batch, prefix, drafts in QUICK_SIZES if options.quick else SIZES:
        for sampling in SAMPLINGS:
            for gamma, weights in drafts:
                name = f"B {batch}, prefix {prefix}, {sampling}, gamma {gamma}, draft weights {weights}"
                run = partial(speculation, options, batch, prefix, sampling, gamma, weights)
                found.append(Cell("c", "gpu_selfspec", name, run))
    return found


def speculation(options: Options, batch: int, prefix: int, sampling: str, gamma: int, weights: str) -> Record:
    """A record with every field of the benchmark scripts, and how much the prompts have in common."""
    filled, prompts = _prefilled(options, batch, prefix)
    draft = self_draft(gamma, budget_of(options), weights)
    return filled.record("gpu_selfspec", draft, SAMPLINGS[sampling]) | {"dataset": "default"} | prompts


@shared
def _prefilled(options: Options, batch: int, prefix: int) -> tuple[Filled, Record]:
    for path in (DEFAULT_CHECKPOINT / "model.pth", DEFAULT_BOOK):
        if not path.is_file():
            raise Skip(f"{path.name} of the default model and book is missing: python download.py, then convert")
    run = {"sizes": Sizes(batch, prefix, 8 if options.quick else 96), "sampling": COUPLED}
    run["draft"] = self_draft(MOST_GAMMA, budget_of(options))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "windows.jsonl")
        stride = _write_windows(file, batch, prefix)
        session = open_session(options, Target(), text=Text(str(file)), **run)
    assert session.tokenizer is not None
    overlap = max(0.0, 1 - stride / len(session.tokenizer.decode(session.prompts[0])))
    prompts = {"prompts": "stretches of the book at even distances", "prompt_overlap": round(overlap, 4)}
    return Filled(session, passes.prefill(session)), prompts


def _write_windows(file: Path, batch: int, prefix: int) -> int:
    """One text per row, cut out of the book at even distances; they overlap where it is too short.

    From its end the book goes on at its beginning, once. Returns the distance in characters.
    """
    book = DEFAULT_BOOK.read_text(encoding="utf-8-sig")
    length, stride = prefix * CHARACTERS_PER_TOKEN, len(book) // batch
    around = book + book[:length]
    # A prompt begins with a word.
    begins = [around.find(" ", row * stride) + 1 for row in range(batch)]
    file.write_text("".join(json.dumps({"text": around[begin : begin + length]}) + "\n" for begin in begins))
    return stride
