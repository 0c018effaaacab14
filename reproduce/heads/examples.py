"""Make and read training examples of heads: parts of a book, the target's continuations, and hidden states."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.progress import progress_bar
from common.say import say
from engine.runner import ModelRunner
from engine.sampling import Distribution, SamplingParams
from models.checkpoints.manifest import atomic_path

# Row i samples at the temperature i modulo 3.
TEMPERATURES = (0.6, 0.8, 1.0)
# Tensors of a file: `tokens [rows, T]`, and for each token the target's normalised last hidden state, `last [rows, T,
# dim]`, and the inputs of k layers side by side, `inputs [rows, T, k * dim]`.
Examples = dict[str, Tensor]


def write_examples(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    layers: Sequence[int],
    folder: Path,
    allowed: Callable[[float], bool],
) -> float:
    """Write a file for each batch of prompts, unless the file exists, while the seconds of writing are `allowed`.
    Return these seconds, those of earlier runs included. Errors: UserError for a folder that cannot be written."""
    n_rows, spent = runner.max_batch, 0.0
    for file in _files(folder):
        with safe_open(file, "pt") as opened:
            spent += float(opened.metadata()["seconds"])
    for first in range(0, len(prompts), n_rows):
        path = folder / f"examples-{first:06}.safetensors"
        if path.exists() or (first and not allowed(spent)):
            continue
        started = perf_counter()
        made = make_examples(runner, prompts[first : first + n_rows], n_new, layers, seed=first)
        seconds = perf_counter() - started
        with atomic_path(path) as partial:
            save_file(made, partial, {"seconds": str(seconds)})
        spent += seconds
        say(f"examples of {min(first + n_rows, len(prompts))} of {len(prompts)} prompts: {spent:.0f} s")
    return spent


@torch.inference_mode()
def make_examples(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], n_new: int, layers: Sequence[int], seed: int
) -> Examples:
    """Return the examples of prompts of equal length, each continued by `n_new` tokens that the target samples. There
    are at most as many prompts as rows. The hidden states are those of sampling, in bfloat16."""
    device, length, n_rows = runner.device, len(prompts[0]), len(prompts)
    tokens = torch.zeros(n_rows, length + n_new, dtype=torch.int64, device=device)
    tokens[:, :length] = torch.tensor(prompts, device=device)
    positions = torch.arange(length + n_new, device=device).expand_as(tokens)
    sampled = Distribution.of([SamplingParams(TEMPERATURES[row % len(TEMPERATURES)]) for row in range(n_rows)], device)
    generator = torch.Generator(device).manual_seed(seed)
    states: list[tuple[Tensor, Tensor]] = []
    for row in range(n_rows):
        runner.cache.reset_row(row)
        view = runner.cache.view(slice(row, row + 1), length, block_at_end=True)
        states.append(runner.model.hidden_states(tokens[row, None, :length], positions[:1, :length], view, layers))
    blocks = [tuple(torch.cat(each).bfloat16() for each in zip(*states, strict=True))]
    last = torch.cat([hidden[:, -1] for hidden, _ in states])
    with progress_bar("writing", n_rows * n_new) as bar:
        for n in range(length, length + n_new):
            tokens[:, n] = torch.multinomial(sampled.probs(runner.model.logits(last)), 1, generator=generator)[:, 0]
            here, view = slice(n, n + 1), runner.cache.view(slice(0, n_rows), n + 1)
            hidden, inputs = runner.model.hidden_states(tokens[:, here], positions[:, here], view, layers)
            blocks.append((hidden.bfloat16(), inputs.bfloat16()))
            last = hidden[:, 0]
            bar.update(n_rows)
    hidden, inputs = (torch.cat(each, dim=1).cpu() for each in zip(*blocks, strict=True))
    return {"tokens": tokens.cpu(), "last": hidden, "inputs": inputs}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("examples-*.safetensors"))


def windows_of(folder: Path, width: int) -> list[Examples]:
    """Return all examples in windows of `width` tokens; files are mapped into memory."""
    return [
        {name: x[row, start : start + width] for name, x in file.items()}
        for file in map(load_file, _files(folder))
        for row in range(len(file["tokens"]))
        for start in range(0, file["tokens"].shape[1] - width + 1, width)
    ]


def most_frequent(windows: Sequence[Examples], n: int, vocab_size: int) -> Tensor:
    """Return the ids of the `n` most frequent tokens, ascending; lower ids first among equals."""
    counts = torch.stack([window["tokens"].bincount(minlength=vocab_size) for window in windows]).sum(dim=0)
    return counts.sort(descending=True, stable=True).indices[:n].sort().values


def batch_of(windows: Sequence[Examples], n: int, step: int) -> Examples:
    """Return a batch of `n` windows, which follow from the step alone. Every epoch has all windows in a new order."""
    epoch, number = divmod(step, max(1, len(windows) // n))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
    chosen = [windows[index] for index in order[number * n : number * n + n].tolist()]
    return {name: torch.stack([window[name] for window in chosen]) for name in chosen[0]}
