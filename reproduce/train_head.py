"""Train an EAGLE-3.1 head and a DFlash head on text that a target has generated, at length.

    python -m reproduce.train_head --out reproduction/heads
    H=reproduction/heads; python -m reproduce.compare --drafters eagle:$H/eagle --dataset $H/held_back.txt

The target continues prompts of many lengths from the first half of the book. The heads learn from these texts, and
held_back.txt is the half that they have not seen. Ended at any time, the same command goes on. Once examples are
written, two processes can train a head each (`--heads eagle`, `--heads dflash`). A token of the examples takes 8 bytes
of disk for each of the target's dimensions.
"""

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import bench
from bench.config import Output, RunConfig, Sizes, Target, Text
from common import cli
from common.errors import DataError, flag, refuse, require_at_least
from common.jsonl import publish
from common.say import dtype_name
from models.checkpoints.hf_config import read_config
from models.checkpoints.manifest import CONFIG, write_text
from reproduce.heads import examples, training
from reproduce.heads.examples import N_SINK
from reproduce.heads.training import Recipe

# Settings of decoding, which a record of training leaves out.
NO_SETTINGS = ("gamma", "draft_policy", "draft_budget", "temperature", "verification", "seed")


@dataclass(frozen=True)
class Flags:
    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=lambda: Sizes(32, 5488, 512))
    """Rows of a batch of the shortest prompts, tokens of the longest prompts, and new tokens of a row."""
    recipe: Recipe = field(default_factory=Recipe)
    output: Output = field(default_factory=Output)
    out: str = "reproduction/heads"  # folder of examples, and of a folder for each head: checkpoint and weights
    heads: tuple[Literal["eagle", "dflash"], ...] = ("eagle", "dflash")  # to train, one after the other
    batches: int = 36  # of examples; 20 minutes on two CPU cores
    minutes: float = 25.0  # for training each head, earlier runs included

    def check(self) -> None:
        """Errors: ConfigError."""
        recipe = self.recipe
        least = dict.fromkeys((*vars(recipe), "minutes", "batches"), 1)
        least |= {"lr": 0, "block_size": 2, "B": 2, "prefix_len": (N_SINK + 1) << max(examples.HALVINGS)}
        least |= {"window": max(recipe.depth, recipe.block_size) + 1, "gen_len": recipe.window}
        for name, number in least.items():
            require_at_least(name, (vars(self) | vars(recipe) | vars(self.sizes))[name], number)
        if self.target.quantize:
            what = "heads begin as the target's weights, unquantised"
            refuse("quantize", self.target.quantize, "none", what, f"leave out {flag('quantize')}")


def main(flags: Flags) -> None:
    flags.check()
    folder, source, sizes = Path(flags.out), flags.target.with_text(), flags.sizes
    if source.config.n_expert or source.config.rotary_dim:
        seen, required = f"{source.name}, with experts or heads rotated in part", "a layer like Llama's, as heads have"
        refuse("model", seen, required, "no head is trained for this model", "name another target")
    # The session's cache of a row stays unused: every batch of examples has a cache of its size.
    config = RunConfig(flags.target, flags.text, replace(sizes, B=1), output=flags.output)
    session = bench.Session.open(config)
    names = ("dtype", "kv_dtype", "rope_scaling", "config_overrides")
    stored = {name: getattr(flags.target, name) for name in names} | {"dataset": flags.text.dataset}
    stored["dtype"] = dtype_name(session.plan.target.weights.dtype)  # `auto` depends on the machine
    keep_settings(folder, {"model": source.name} | stored | vars(sizes))
    write_all(session, folder, sizes, flags.batches)
    # Sessions pack the weights of linear layers.
    target = source.load(device=session.runner.device, dtype=torch.float32, prepack=False).requires_grad_(False)
    path = Path(source.path)
    values = read_config((path if path.is_dir() else path.parent) / CONFIG)
    for kind in flags.heads:
        keep_settings(folder / kind, vars(flags.recipe) | {"batches": flags.batches})
        head, measured = training.train(kind, target, folder, flags.batches, flags.recipe, 60 * flags.minutes)
        training.save_head(head, folder / kind, flags.target.changes.apply(values, source.name))
        record = bench.record_of("train_head", session, bench.rounded({"head": kind} | measured), NO_SETTINGS)
        publish(flags.output.output, record | vars(sizes))


def write_all(session: bench.Session, folder: Path, sizes: Sizes, n_batches: int) -> None:
    """Write examples from the book's first half, and its second half to held_back.txt. Errors: DataError for a book
    that is too short."""
    book, tokenizer = next(bench.load_books(str(session.plan.dataset))), session.tokenizer
    assert tokenizer is not None and sizes.prefix_len is not None
    bos, text = tokenizer.encode("", add_bos=True), tokenizer.encode(book[: len(book) // 2], add_bos=False)
    if len(text) < sizes.prefix_len:
        seen, fix = f"{len(text)} tokens in its first half", f"give a smaller {flag('prefix_len')}"
        refuse("dataset", seen, f">= {sizes.prefix_len}", "too little text for the prompts", fix, DataError)
    write_text(folder / "held_back.txt", book[len(book) // 2 :])
    prompts = partial(examples.prompts_of, text, bos, longest=sizes.prefix_len, n_rows=sizes.B, n_new=sizes.gen_len)
    examples.write_examples(session.runner, prompts, sizes.gen_len, folder, n_batches)


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings of the files in the folder. Errors: ConfigError if they were made with other settings."""
    file, settings = folder / "settings.json", json.loads(json.dumps(settings))
    kept = json.loads(file.read_text()) if file.exists() else {}
    if unlike := [name for name, value in kept.items() if settings.get(name) != value]:
        what, where = "the folder has another run's files", f"{flag('out')} {folder}"
        seen, required = (", ".join(f"{name} {each.get(name)}" for name in unlike) for each in (settings, kept))
        refuse(where, seen, required, what, f"name another {flag('out')}, or give that run's flags")
    write_text(file, json.dumps({name: value for name, value in settings.items() if name != "steps"}))


if __name__ == "__main__":
    cli.run(main, Flags)
