"""markov_table.py: what is counted, and that drafters read it."""

import json
from pathlib import Path

from tests.support.programs import run


def test_a_table_has_what_follows_what_is_skipped(checkpoint: Path, call, tmp_path: Path):
    text, table = "in and out " * 18, tmp_path / "table.json"
    (tmp_path / "book.txt").write_text("skipped " + text)
    flags = f"--model {checkpoint} --dataset {tmp_path / 'book.txt'} --skip 8 --max_ngram 4 --markov_table {table}"
    assert run("reproduce/markov_table.py", flags.split()).code == 0
    grams = {text[i - n : i + 1] for n in range(1, 5) for i in range(n, len(text))}
    assert len(json.loads(table.read_text())["grams"]) == len(grams)
    flags = f"--B 2 --prefix_len 60 --gen_len 24 --gamma 2 --device cpu --draft markov --markov_table {table}"
    record = call("tests/selfspec_benchmark.py", flags).record
    assert record["draft"] == "markov" and record["identical_sequences"] == 2
