"""reproduce/train_head.py: examples, losses, resuming, saved heads, and a whole run."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import ModelRunner
from kv_cache import FullKVCache
from reproduce.heads import examples, training
from reproduce.heads.examples import N_SINK
from reproduce.heads.forwards import dflash_logits, eagle_logits
from reproduce.heads.training import Recipe, TrainedHead
from tests.support.programs import run
from tests.support.tiny import TINY, full_cache, tiny_model

LAYERS = examples.inputs_of(TINY.n_layer)
RECIPE = Recipe(steps=6, window=24, windows=2, lr=0.01, draft_vocab_size=20, layers=2, block_size=4, blocks=5)
TEXT = [(7 * i + i // 5) % TINY.vocab_size for i in range(150)]


def prompts(batch: int) -> Tensor:
    return examples.prompts_of(TEXT, [1], batch, longest=96, n_rows=4, n_new=25)


@pytest.fixture
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def folder(model, tmp_path):
    """A folder of four batches."""
    examples.write_examples(ModelRunner(model, full_cache(model, 1)), prompts, 25, tmp_path, 4)
    return tmp_path


def new_head(kind: str, model, folder: Path) -> tuple[TrainedHead, Tensor]:
    """Return a head with some noise, and the target's output layer for its tokens."""
    torch.manual_seed(0)
    counts, sample = examples.token_counts(folder, TINY.vocab_size), torch.randn(30, 3 * TINY.dim)
    head = training.new_head(kind, model, counts, RECIPE, sample)
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return head, training.output_rows(model, head.target_ids)


def a_batch(folder: Path, n: int = 2) -> examples.Examples:
    windows, _ = examples.windows_of(folder, RECIPE.window)
    batch = examples.stacked(examples.chosen(windows, n, 0), RECIPE.window)
    return batch | {name: batch[name].float() for name in ("last", "inputs")}


def test_examples_hold_the_targets_states(model, folder):
    """Examples equal a pass over the whole text. Batches of longer prompts have fewer rows."""
    files = sorted(folder.iterdir())
    shapes = [tuple(examples.load_file(file)["tokens"].shape) for file in files]
    assert shapes == [(4, 31), (2, 49), (3, 37), (4, 31)]
    for number, file in enumerate(files):
        made, prompt = examples.load_file(file), prompts(number)
        tokens = made["tokens"]
        assert torch.equal(tokens[:, : prompt.shape[1]], prompt) and len({*map(tuple, tokens.tolist())}) == len(tokens)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        last, inputs = model.hidden_states(tokens, positions, full_cache(model, len(tokens)), LAYERS)
        torch.testing.assert_close(made["last"].float(), last, rtol=0.02, atol=0.02)
        torch.testing.assert_close(made["inputs"].float(), inputs, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_eagle_is_trained_as_it_drafts(model, folder):
    """The unrolled steps equal a head over a cache of the window and the first tokens, which continues its states."""
    (eagle, _), batch, depth = new_head("eagle", model, folder), a_batch(folder, 1), RECIPE.depth
    logits, state_of = eagle_logits(eagle, batch, depth)
    eagle.body.backend = tiny_model().backend
    length = RECIPE.window - depth
    assert state_of[:, 0].tolist() == [N_SINK + 1 + i for i in range(depth)]
    for at in range(length):
        cache, n = FullKVCache(eagle.body.config, 1, 128), N_SINK + at + 1
        positions, states = batch["positions"][:, :n], eagle.fused(batch["inputs"][:, :n])
        states = eagle.advance(states, batch["next"][:, :n], positions, cache)[:, -1:]
        for i in range(depth):
            if i:
                states = eagle.advance(states, batch["next"][:, n - 1 + i, None], positions[:, -1:] + i, cache)
            torch.testing.assert_close(eagle.draft_logits(states)[0, 0], logits[i, at], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_dflash_is_trained_as_it_drafts(model, folder):
    """All blocks of a window equal a block over a cache of the text before it."""
    (dflash, _), batch, size = new_head("dflash", model, folder), a_batch(folder), RECIPE.block_size
    logits, state_of = dflash_logits(dflash, batch, size, RECIPE.blocks, seed=0)
    dflash.body.backend = tiny_model().backend
    assert logits.shape == (size, 2 * RECIPE.blocks, RECIPE.draft_vocab_size)
    assert len({*state_of[0].tolist()}) > 5
    for number, anchor in enumerate(state_of[0].tolist()):
        window, at = divmod(anchor, N_SINK + RECIPE.window)
        cache, positions = FullKVCache(dflash.body.config, 1, 128), batch["positions"][window, None]
        dflash.remember(dflash.fused(batch["inputs"][window, None, :at]), positions[:, :at], cache)
        states = dflash.draft(batch["tokens"][window, at, None], positions[:, at : at + size], cache)
        torch.testing.assert_close(dflash.draft_logits(states)[0], logits[:, number], rtol=1e-4, atol=1e-4)
        assert state_of[:, number].tolist() == [*range(anchor, anchor + size)]


SIZES = "--B 2 --prefix_len 96 --gen_len 40 --window 40 --windows 1 --layers 1 --block_size 4 --blocks 4"


def test_heads_are_trained_and_draft(call, checkpoint, tmp_path):
    """The whole command on a tiny model; run again, it trains nothing. Another run's folder is refused."""
    changed = "--rope_scaling linear:2"
    sizes = f"{SIZES} --steps 4 --draft_vocab_size 30 --depth 2"
    flags = f"{sizes} {changed} --batches 2 --out {tmp_path / 'out'}"
    record = call("reproduce/train_head.py", flags).record
    assert record["head"] == "dflash" and record["steps"] == 4 and record["curve"][-1]["step"] == 4
    again = call("reproduce/train_head.py", flags).record
    assert again["curve"] == record["curve"]
    for kind in ("eagle", "dflash"):
        trained, half = tmp_path / "out" / kind, tmp_path / "out/held_back.txt"
        assert '"linear"' in (trained / "config.json").read_text()
        models = f"--target {checkpoint / 'model.pth'} {changed} --model {trained} --dataset {half}"
        how = f"--draft {kind} --gamma 2 --B 2 --prefix_len 24 --gen_len 8 --draft_budget 24"
        drafted = run("tests/longspec_benchmark.py", f"{models} {how}".split()).record
        assert drafted["identical_sequences"] == 2 and drafted["acceptance_per_position"] != [1.0, 1.0]
    for other in ("lr 0.5", "batches 3"):
        assert other.split()[0] in call("reproduce/train_head.py", f"{flags} --{other}").refusal
    again = call("reproduce/train_head.py", flags).record
    assert again["example_tokens"] == record["example_tokens"], "of 2 of 3 files"
