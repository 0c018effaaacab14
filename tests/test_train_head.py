"""reproduce/train_head.py: examples, losses, resuming, saved heads, and a whole run."""

import math
from itertools import count
from pathlib import Path

import pytest
import torch
from programs import run
from tiny import TINY, full_cache, tiny_model
from torch import Tensor

from engine import ModelRunner
from kv_cache import FullKVCache
from reproduce.heads import examples, training
from reproduce.heads.training import Recipe

LAYERS = training.inputs_of(TINY.n_layer)
RECIPE = Recipe(steps=6, window=40, windows=2, lr=0.01, depth=3, draft_vocab_size=20)
PROMPTS = [[(7 * row + 3 * i) % TINY.vocab_size for i in range(30)] for row in range(5)]


@pytest.fixture
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def windows(model, tmp_path):
    runner = ModelRunner(model, full_cache(model, 2))
    examples.write_examples(runner, PROMPTS, 50, LAYERS, tmp_path, lambda seconds: True)
    return examples.windows_of(tmp_path, RECIPE.window)


def heads_and_rows(model, windows) -> tuple[torch.nn.ModuleDict, Tensor]:
    torch.manual_seed(0)
    known = examples.most_frequent(windows, RECIPE.draft_vocab_size, TINY.vocab_size)
    return training.new_heads(model, known, RECIPE.depth), training.output_rows(model, known)


def test_examples_hold_the_targets_states(model, tmp_path):
    """Examples equal a pass over the whole text."""
    runner = ModelRunner(model, full_cache(model, 2))
    assert examples.write_examples(runner, PROMPTS[:3], 20, LAYERS, tmp_path, lambda seconds: True) > 0
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for first, file in zip((0, 2), files, strict=True):
        made = examples.load_file(file)
        tokens = made["tokens"]
        assert tokens[:, :30].tolist() == PROMPTS[first : first + 2][: len(tokens)]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        last, inputs = model.hidden_states(tokens, positions, full_cache(model, len(tokens)), LAYERS)
        torch.testing.assert_close(made["last"].float(), last, rtol=0.02, atol=0.02)
        torch.testing.assert_close(made["inputs"].float(), inputs, rtol=0.02, atol=0.02)


def test_losses_are_those_of_a_head_that_drafts(model, windows):
    """The unrolled steps at each position equal the head over a cache, which goes on from its own states."""
    heads, rows = heads_and_rows(model, windows)
    eagle, medusa, known = heads["eagle"], heads["medusa"], heads["eagle"].target_ids
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    batch = examples.batch_of(windows, 2, 0)
    batch |= {name: batch[name].float() for name in ("last", "inputs")}
    tokens, length = batch["tokens"], RECIPE.window - RECIPE.depth
    with torch.no_grad():
        losses, shared = training.unrolled_losses(eagle, medusa, rows, batch)
        laws = model.logits(batch["last"])[..., known].softmax(dim=-1)
        expected = torch.zeros(2, RECIPE.depth, length)
        eagle.body.backend = tiny_model().backend
        for at in range(length):
            cache = FullKVCache(eagle.body.config, 2, 64)
            positions = torch.arange(at + 1).expand(2, -1)
            states = eagle.fused(batch["inputs"][:, : at + 1])
            states = eagle.advance(states, tokens[:, 1 : at + 2], positions, cache)[:, -1:]
            for i in range(RECIPE.depth):
                if i:
                    states = eagle.advance(states, tokens[:, at + 1 + i, None], torch.full((2, 1), at + i), cache)
                law = laws[:, at + 1 + i]
                guesses = eagle.draft_logits(states)[:, 0], model.logits(medusa[i](batch["last"][:, at]))[:, known]
                for head, logits in enumerate(guesses):
                    expected[head, i, at] = -(law * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
    torch.testing.assert_close(losses, expected.mean(dim=-1), rtol=1e-4, atol=1e-5)
    assert ((shared > 0) & (shared < 1)).all() and len({*losses.flatten().tolist()}) == 6


def trained(model, windows, folder: Path, stop_at: float = math.inf) -> dict[str, Tensor]:
    """Return the weights after training that ends behind `stop_at` steps."""
    heads, rows = heads_and_rows(model, windows)
    calls = count(1)
    folder.mkdir(exist_ok=True)
    training.train(heads, rows, windows, RECIPE, folder, lambda seconds: float(next(calls) > stop_at))
    return heads.state_dict()


def test_training_that_is_resumed_gives_the_same_weights(model, windows, tmp_path):
    whole = trained(model, windows, tmp_path / "whole")
    first = trained(model, windows, tmp_path / "parts", stop_at=3)
    resumed = trained(model, windows, tmp_path / "parts")
    assert any(not torch.equal(first[name], whole[name]) for name in whole)
    for name, weights in whole.items():
        assert torch.equal(resumed[name], weights), name
    curve = training.read_curve(tmp_path / "parts")
    assert [line["step"] for line in curve] == [1, 2, 3, 4, 5, 6]


SIZES = "--B 2 --prefix_len 24 --gen_len 40 --num_prompts 2 --window 40 --windows 2"


def test_heads_are_trained_and_draft(call, checkpoint, tmp_path):
    """The whole command on a tiny model; run again, it trains nothing. Another run's folder is refused."""
    flags = f"{SIZES} --steps 4 --draft_vocab_size 30 --depth 2 --out {tmp_path / 'out'}"
    record = call("reproduce/train_head.py", flags).record
    assert record["steps"] == 4 and [line["step"] for line in record["curve"]] == [1, 2, 3, 4]
    again = call("reproduce/train_head.py", flags).record
    assert again["curve"] == record["curve"]
    trained, half = tmp_path / "out/eagle", tmp_path / "out/held_back.txt"
    models = f"--target {checkpoint / 'model.pth'} --model {trained} --dataset {half}"
    sizes = "--draft eagle --gamma 2 --B 2 --prefix_len 24 --gen_len 8 --draft_budget 24"
    drafted = run("tests/longspec_benchmark.py", f"{models} {sizes}".split()).record
    assert drafted["identical_sequences"] == 2 and drafted["acceptance_per_position"] != [1.0, 1.0]
    assert "lr" in call("reproduce/train_head.py", flags + " --lr 0.5").refusal
