"""Train an EAGLE-3 head and Medusa heads on text that a target has generated.

    python -m reproduce.train_head --out reproduction/heads --minutes 45
    python -m reproduce.drafters --drafters eagle:reproduction/heads/eagle --dataset reproduction/heads/held_back.txt

The target continues prompts from the first half of the book. The heads learn from these texts, and held_back.txt is
the half that they have not seen. Ended at any time, the same command goes on.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
from bench.config import Output, RunConfig, Sizes, Target, Text
from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import publish
from models.checkpoints.manifest import CONFIG, write_text
from models.config import read_config
from reproduce.heads import examples, training
from reproduce.heads.training import Recipe

# Share of the time after which no further examples are begun.
WRITTEN = 0.5
CURVE_POINTS = 40
# The fewest tokens of a window: attention takes a shorter block for a round's, with another mask.
LEAST_WINDOW = 32
# Settings of decoding, which a record of training leaves out.
NO_SETTINGS = ("gamma", "draft_policy", "draft_budget", "temperature", "verification", "seed")


@dataclass(frozen=True)
class Flags:
    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=lambda: Sizes(32, 512, 512))
    recipe: Recipe = field(default_factory=Recipe)
    output: Output = field(default_factory=Output)
    out: str = "reproduction/heads"  # folder of examples, checkpoint, curve and heads
    minutes: float = 45.0  # for examples and training, earlier runs included
    num_prompts: int = 160  # parts of the book that the target continues

    def check(self) -> None:
        """Errors: ConfigError."""
        recipe = self.recipe
        least = dict.fromkeys(("steps", "windows", "depth", "draft_vocab_size", "num_prompts", "minutes"), 1)
        least |= {"window": LEAST_WINDOW + recipe.depth, "gen_len": recipe.window}
        for name, number in least.items():
            require_at_least(name, (vars(self) | vars(recipe) | vars(self.sizes))[name], number)
        if self.target.quantize:
            what, where = "heads begin as the target's weights, unquantised", flag("quantize")
            raise ConfigError(what, where, self.target.quantize, "none", f"leave out {where}")


def main(flags: Flags) -> None:
    flags.check()
    folder, limit, recipe = Path(flags.out), 60 * flags.minutes, flags.recipe
    config = RunConfig(flags.target, flags.text, flags.sizes, output=flags.output)
    source, session = flags.target.with_text(), bench.Session.open(config)
    if source.config.n_expert or source.config.rotary_dim:
        seen, required = f"{source.name}, with experts or heads rotated in part", "a layer like Llama's, as heads have"
        raise ConfigError("no head is trained for this model", "--model", seen, required, "name another target")
    book, target, runner = next(session.books()), session.runner.model, session.runner
    first, second = book[: len(book) // 2], book[len(book) // 2 :]
    sizes = {"prefix_len": session.plan.prefix_len, "n_prompts": flags.num_prompts}
    prompts = bench.make_prompts([first], tokenizer=session.tokenizer, **sizes)
    names = ("dtype", "kv_dtype", "rope_scaling", "config_overrides")
    stored = {name: getattr(flags.target, name) for name in names} | {"dataset": flags.text.dataset}
    settings = {"model": source.name, **stored, "num_prompts": flags.num_prompts}
    keep_settings(folder, json.loads(json.dumps(settings)) | vars(flags.sizes) | vars(recipe))
    write_text(folder / "held_back.txt", second)
    layers = training.inputs_of(target.config.n_layer)
    how = session.plan.gen_len, layers, folder, lambda seconds: seconds < WRITTEN * limit
    written = examples.write_examples(runner, prompts, *how)
    windows = examples.windows_of(folder, recipe.window)
    known = examples.most_frequent(windows, recipe.draft_vocab_size, runner.vocab_size).to(runner.device)
    heads = training.new_heads(target, known, recipe.depth)
    how = recipe, folder, lambda seconds: (written + seconds) / limit
    trained = training.train(heads, training.output_rows(target, known), windows, *how)
    path = Path(source.path)
    training.save_heads(heads, folder, read_config((path if path.is_dir() else path.parent) / CONFIG))
    curve = training.read_curve(folder)
    thinned = [*curve[: -1 : -(-len(curve) // CURVE_POINTS)], curve[-1]]
    measured = {"recipe": vars(recipe), "examples": len(windows), "example_tokens": len(windows) * recipe.window}
    measured |= {"steps": curve[-1]["step"], "writing_seconds": written, "training_seconds": trained}
    record = bench.record_of("train_head", session, bench.rounded(measured | {"curve": thinned}), NO_SETTINGS)
    publish(flags.output.output, record)


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings of the files in the folder. Errors: ConfigError if they were made with other settings."""
    file = folder / "settings.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if unlike := [f"{name} {value}" for name, value in kept.items() if name != "steps" and settings[name] != value]:
        what, where, fix = "the folder has another run's files", f"{flag('out')} {folder}", "name another folder"
        raise ConfigError(what, where, ", ".join(unlike), "the flags of that run", f"{fix}, or give these flags")
    write_text(file, json.dumps({name: value for name, value in settings.items() if name != "steps"}))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
