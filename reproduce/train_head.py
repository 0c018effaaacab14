"""Train an EAGLE-3 head and Medusa heads on a target's own text, and measure how they draft.

    python -m reproduce.train_head --out reproduction/heads --minutes 45

docs/speculation.md, "Trained heads", describes the training. Ended at any time, the same command goes on. The heads are
for --draft eagle --draft_model FOLDER/eagle and --draft medusa --draft_model FOLDER/medusa. FOLDER/held_back.txt is the
half of the book that they have not seen, a --dataset for other commands.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import bench
from bench.config import ComparedSampling, Output, RunConfig, Sizes, Target, Text
from bench.draft_flags import CHOSEN, draft_flags
from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import publish
from common.tables import console
from engine.counts import acceptance_standard_error
from engine.drafters.config import DrafterConfig
from models.checkpoints.manifest import CONFIG, write_text
from models.config import read_config
from reproduce.heads import examples, training
from reproduce.heads.training import Recipe
from reproduce.helpers.columns import of

# Shares of the time: the last examples are begun, training ends.
WRITTEN, TRAINED = 0.45, 0.9
TEMPERATURES, DRAFTS = (0.0, 0.6), ("eagle", "medusa", "ngram", "self")
CURVE_POINTS = 40
# The fewest tokens of a window: a shorter block counts as a round's, whose attention takes another mask.
LEAST_WINDOW = 32
# Settings that differ between rows, or that training has not.
ROW_SETTINGS = ("gamma", "draft_policy", "draft_budget", "temperature", "verification", "seed")
COUNTED = ("acceptance_rate", "acceptance_per_position", "mean_accepted_length")


@dataclass(frozen=True)
class Flags:
    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=lambda: Sizes(32, 512, 512))
    recipe: Recipe = field(default_factory=Recipe)
    output: Output = field(default_factory=Output)
    out: str = "reproduction/heads"  # folder of examples, checkpoint, curve and heads
    minutes: float = 45.0  # for everything, earlier runs included
    num_prompts: int = 160  # parts of the book that the model goes on with
    held_back: int = 8  # prompts of the other half, each of which is continued by --measured_len tokens
    measured_len: int = 96  # new tokens behind each of those
    draft_budget: int = 256  # KV entries of the drafts that are measured

    def check(self) -> None:
        """Errors: ConfigError."""
        recipe = self.recipe
        counted = ("steps", "windows", "depth", "draft_vocab_size", "num_prompts", "held_back", "minutes")
        least = dict.fromkeys(counted, 1)
        least |= {"measured_len": recipe.depth + 2, "window": LEAST_WINDOW + recipe.depth, "gen_len": recipe.window}
        for name, number in least.items():
            require_at_least(name, (vars(self) | vars(recipe) | vars(self.sizes))[name], number)
        if self.target.quantize:
            what, where = "heads begin as the target's weights, unquantised", flag("quantize")
            raise ConfigError(what, where, self.target.quantize, "none", f"leave out {where}")

    def drafts(self) -> list[DrafterConfig]:
        shared = {"gamma": self.recipe.depth, "draft_budget": self.draft_budget}
        each = [{"draft": name, "draft_model": str(Path(self.out) / name), **shared} for name in DRAFTS]
        return draft_flags(DRAFTS, without=CHOSEN)().variants(*each)


def main(flags: Flags) -> None:
    flags.check()
    folder, limit, recipe = Path(flags.out), 60 * flags.minutes, flags.recipe
    config = RunConfig(flags.target, flags.text, flags.sizes, output=flags.output)
    source, session = flags.target.with_text(), bench.Session.open(config)
    book, target, runner = next(session.books()), session.runner.model, session.runner
    first, second = book[: len(book) // 2], book[len(book) // 2 :]
    cut = partial(bench.make_prompts, tokenizer=session.tokenizer, prefix_len=session.plan.prefix_len)
    prompts, held_back = cut([first], n_prompts=flags.num_prompts), cut([second], n_prompts=flags.held_back)
    stored = {name: getattr(flags.target, name) for name in ("dtype", "kv_dtype")}
    settings = {"model": source.name, **stored, "num_prompts": flags.num_prompts}
    keep_settings(folder, settings | vars(flags.text) | vars(flags.sizes) | vars(recipe))
    write_text(folder / "held_back.txt", second)
    layers = training.inputs_of(target.config.n_layer)
    how = session.plan.gen_len, layers, folder, lambda seconds: seconds < WRITTEN * limit
    written = examples.write_examples(runner, prompts, *how)
    windows = examples.windows_of(folder, recipe.window)
    known = examples.most_frequent(windows, recipe.draft_vocab_size, runner.vocab_size).to(runner.device)
    heads = training.new_heads(target, known, recipe.depth)
    how = recipe, folder, lambda seconds: (written + seconds) / (TRAINED * limit)
    trained = training.train(heads, training.output_rows(target, known), windows, *how)
    path = Path(source.path)
    training.save_heads(heads, folder, read_config((path if path.is_dir() else path.parent) / CONFIG))
    curve = training.read_curve(folder)
    thinned = [*curve[: -1 : -(-len(curve) // CURVE_POINTS)], curve[-1]]
    rows = measure(config, flags, held_back)
    measured = {"recipe": vars(recipe), "examples": len(windows), "example_tokens": len(windows) * recipe.window}
    measured |= {"steps": curve[-1]["step"], "writing_seconds": written, "training_seconds": trained}
    measured |= {"curve": thinned, "rows": rows}
    record = bench.record_of("train_head", session, bench.rounded(measured), ROW_SETTINGS)
    publish(
        flags.output.output, record, console(rows, of("draft temperature acceptance by_position mean_accepted_length"))
    )


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings of the folder's files. Errors: ConfigError if the folder has files of other settings."""
    file = folder / "settings.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if unlike := [f"{name} {value}" for name, value in kept.items() if name != "steps" and settings[name] != value]:
        what, where, fix = "the folder has another run's files", f"{flag('out')} {folder}", "name another folder"
        raise ConfigError(what, where, ", ".join(unlike), "the flags of that run", f"{fix}, or give these flags")
    write_text(file, json.dumps({name: value for name, value in settings.items() if name != "steps"}))


def measure(config: RunConfig, flags: Flags, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Measure the acceptance of each draft behind those prompts, by temperature."""
    sizes = Sizes(min(len(prompts), config.sizes.B), config.sizes.prefix_len, flags.measured_len)
    rows = []
    for draft in flags.drafts():
        opened = bench.Session.of_plan(bench.resolve(replace(config, sizes=sizes, draft=draft)))
        for temperature in TEMPERATURES:
            session = opened.variant(prompts=[*prompts], sampling=ComparedSampling(temperature))
            stats = session.generate(session.drafter()).stats
            row = {"draft": draft.name, "temperature": temperature, "verification": session.plan.verification}
            row |= {"verified": stats.counts.verified} | {name: getattr(stats.counts, name) for name in COUNTED}
            rows.append(row | {"acceptance_standard_error": acceptance_standard_error(stats.rows)})
    return rows


if __name__ == "__main__":
    cli.run_alone(main, Flags)
