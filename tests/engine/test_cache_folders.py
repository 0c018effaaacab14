"""Cache folders in which something else than a file has a file's name: it is skipped, never opened."""

from pathlib import Path

import pytest

from engine import generate
from engine.drafters.markov import NGramTable
from engine.drafters.ngram_cache import NGramCache
from tests.support.tiny import random_prompts, tiny_runner

PROMPTS = random_prompts([5, 38, 17])


@pytest.mark.parametrize("damage", [lambda x: x[: len(x) // 2], lambda x: b"{" + x[7:], lambda x: b"[" * 100_000])
def test_a_damaged_file_of_n_grams_is_noted_and_left_out(damage, tmp_path: Path, capfd) -> None:
    """Rows decode as with an empty table, and the file, which may be another program's, stays."""
    path, outputs = tmp_path / "grams.json", []
    table = NGramTable(3)
    table.learn(PROMPTS[1])
    table.save(path, tiny_runner(3).vocab_size)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    for given in (None, path):
        runner = tiny_runner(3)
        outputs.append(generate(runner, PROMPTS, max_new_tokens=20, drafter=NGramCache(runner, 3, path=given)))
    assert "note: " in capfd.readouterr().err and path.read_bytes() == damaged
    assert outputs[0].tokens == outputs[1].tokens
    assert outputs[0].stats.accepted == outputs[1].stats.accepted
