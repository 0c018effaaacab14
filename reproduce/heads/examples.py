"""Make and read training examples of heads: parts of a book, the target's continuations, and hidden states."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.progress import progress_bar
from common.say import say
from engine.runner import ModelRunner
from engine.sampling.distribution import Distribution, SamplingParams
from kv_cache import FullKVCache
from models.checkpoints.manifest import atomic_path

# Row i samples at the temperature i modulo 3.
TEMPERATURES = (0.6, 0.8, 1.0)
# How often the prompts of a batch are halved from the longest; repeated batch after batch. Short prompts come more
# often: as many rows fit that writing is several times faster.
HALVINGS = (4, 2, 3, 4, 1, 3, 4, 0)
# Every HELD_OUT-th row, from the first on, is held out from training.
HELD_OUT = 16
# First tokens of a row in front of every window.
N_SINK = 4
# Tensors of a file: `tokens [rows, T]`, and for each token the target's normalised last hidden state, `last [rows, T,
# dim]`, and the inputs of k layers side by side, `inputs [rows, T, k * dim]`.
Examples = dict[str, Tensor]
# A training window: its file's tensors, the row, and the first token.
Window = tuple[Examples, int, int]


def inputs_of(n_layer: int) -> tuple[int, ...]:
    """Return the layers whose inputs heads read, those of EAGLE-3's published code; fewer for a target of few."""
    return tuple(sorted({min(2, n_layer), n_layer // 2, max(0, n_layer - 3)}))


def prompts_of(text: Sequence[int], bos: Sequence[int], batch: int, longest: int, n_rows: int, n_new: int) -> Tensor:
    """Return the prompts of a batch, `[rows, length]`, from random places of `text`, after `bos`.

    A batch of the shortest prompts has `n_rows` rows; other batches have about as many tokens, `n_new` new tokens for
    each row included. longest: tokens of the longest prompts."""
    length, shortest = (longest >> halvings for halvings in (HALVINGS[batch % len(HALVINGS)], max(HALVINGS)))
    rows = max(1, n_rows * (shortest + n_new) // (length + n_new))
    n_text = length - len(bos)
    starts = torch.randint(len(text) - n_text + 1, (rows,), generator=torch.Generator().manual_seed(batch))
    return torch.tensor([[*bos, *text[start : start + n_text]] for start in starts.tolist()])


def write_examples(
    runner: ModelRunner, prompts: Callable[[int], Tensor], n_new: int, folder: Path, n_batches: int
) -> None:
    """Write a file for each batch of prompts up to `n_batches`, after the files that exist. prompts: gives those of a
    batch from its number. Errors: UserError for a folder that cannot be written."""
    for batch in range(len(_files(folder)), n_batches):
        made = make_examples(runner, prompts(batch), n_new, seed=batch)
        with atomic_path(folder / f"examples-{batch:06}.safetensors") as partial:
            save_file(made, partial)
        rows, length = made["tokens"].shape
        say(f"batch {batch + 1} of {n_batches}: {rows} rows of {length} tokens")


@torch.inference_mode()
def make_examples(runner: ModelRunner, prompts: Tensor, n_new: int, seed: int) -> Examples:
    """Return the examples of `prompts [rows, length]`, each continued by `n_new` tokens that the target samples. The
    hidden states are those of sampling, in bfloat16."""
    device, (n_rows, length) = runner.device, prompts.shape
    model, chunk = runner.model, runner.prefill_chunk
    config, end, layers = model.config, length + n_new, inputs_of(model.config.n_layer)
    cache = FullKVCache(config, n_rows, end, device, model.dtype)
    tokens = F.pad(prompts.to(device), (0, n_new))
    positions = torch.arange(end, device=device).expand_as(tokens)
    sampled = Distribution.of([SamplingParams(TEMPERATURES[row % len(TEMPERATURES)]) for row in range(n_rows)], device)
    generator = torch.Generator(device).manual_seed(seed)
    made = {
        name: torch.empty(n_rows, end, width * config.dim, dtype=torch.bfloat16)
        for name, width in (("last", 1), ("inputs", len(layers)))
    }
    last = torch.empty(n_rows, config.dim, dtype=model.dtype, device=device)

    def run(rows: slice, here: slice, block_at_end: bool) -> None:
        view = cache.view(rows, here.stop, block_at_end)
        hidden, inputs = model.hidden_states(tokens[rows, here], positions[rows, here], view, layers)
        made["last"][rows, here], made["inputs"][rows, here] = hidden, inputs
        last[rows] = hidden[:, -1]

    with progress_bar("writing", n_rows * n_new) as bar:
        for row in range(n_rows):
            for start in range(0, length, chunk):
                run(slice(row, row + 1), slice(start, min(start + chunk, length)), True)
        for n in range(length, end):
            tokens[:, n] = torch.multinomial(sampled.probs(model.logits(last)), 1, generator=generator)[:, 0]
            run(slice(0, n_rows), slice(n, n + 1), False)
            bar.update(n_rows)
    return {"tokens": tokens.cpu(), **made}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("examples-*.safetensors"))


def windows_of(folder: Path, width: int, n_batches: int | None = None) -> tuple[list[Window], list[Window]]:
    """Return all training windows of `width` tokens after N_SINK, and held-out windows, of the first `n_batches`;
    files are mapped into memory. Every HELD_OUT-th row is held out, of which only the end is a window: text that the
    target generated."""
    training, held_out = list[Window](), list[Window]()
    files = map(load_file, _files(folder)[:n_batches])
    for number, (file, row) in enumerate([(each, row) for each in files for row in range(len(each["tokens"]))]):
        last = file["tokens"].shape[1] - 1 - width
        windows = [(file, row, start) for start in range(last, N_SINK - 1, -width)]
        if number % HELD_OUT:
            training += windows
        else:
            held_out += windows[:1]
    return training, held_out


def stacked(windows: Sequence[Window], width: int) -> Examples:
    """Return windows side by side, each after the first N_SINK tokens of its row, as a streaming cache keeps them:
    the tensors of a file, `[n, N_SINK + width, ...]`, with `positions`, and `next`, the tokens that followed."""
    at = torch.stack([torch.cat([torch.arange(N_SINK), torch.arange(start, start + width)]) for *_, start in windows])
    pairs = [*zip(windows, at, strict=True)]
    batch = {name: torch.stack([file[name][row, i] for (file, row, _), i in pairs]) for name in windows[0][0]}
    following = torch.stack([file["tokens"][row, i + 1] for (file, row, _), i in pairs])
    return batch | {"positions": at, "next": following}


def chosen(windows: Sequence[Window], n: int, step: int) -> list[Window]:
    """Return a step's `n` windows, which follow from the step alone. Every epoch has all windows in a new order."""
    epoch, number = divmod(step, max(1, len(windows) // n))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
    return [windows[index] for index in order[number * n : number * n + n].tolist()]


def token_counts(folder: Path, vocab_size: int, n_batches: int | None = None) -> Tensor:
    """Return how often the examples of the first `n_batches` have each token, `[vocab_size]` int64."""
    files = map(load_file, _files(folder)[:n_batches])
    return sum(file["tokens"].flatten().bincount(minlength=vocab_size) for file in files)
