"""markov_table.py: what is counted, and that drafters read it."""

import json
from pathlib import Path

from tests.support.programs import run


def test_a_table_has_what_follows_what_is_skipped(checkpoint: Path, tmp_path: Path):
    text, table = "in and out " * 18, tmp_path / "table.json"
    (tmp_path / "book.txt").write_text("skipped " + text)
    flags = f"--model {checkpoint} --dataset {tmp_path / 'book.txt'} --skip 8 --max_ngram 4 --markov_table {table}"
    assert run("reproduce/markov_table.py", flags.split()).code == 0
    grams = {text[i - n : i + 1] for n in range(1, 5) for i in range(n, len(text))}
    assert len(json.loads(table.read_text())["grams"]) == len(grams)


def test_a_file_of_the_cache_is_a_table(call, tmp_path: Path):
    file, sizes = tmp_path / "cache.json", "--B 2 --prefix_len 60 --gen_len 24 --gamma 2 --device cpu --dtype float64"
    for draft in (f"cache --ngram_cache {file}", f"markov --markov_table {file}"):
        record = call("tests/selfspec_benchmark.py", f"{sizes} --draft {draft}").record
        assert record["identical_sequences"] == 2 and record["draft"] == draft.split()[0]
    assert record["acceptance_rate"] > 0.5 and record["config"]["draft"].get("markov_table", str(file)) == str(file)
