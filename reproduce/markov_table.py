"""Count which tokens follow which in a text, for --draft markov.

    python -m reproduce.markov_table --skip 60000
    python tests/selfspec_benchmark.py --draft markov --markov_table reproduction/markov_table.json

Where prompts are cut from the same text, skip them and what follows them.
"""

from dataclasses import dataclass, field
from pathlib import Path

import bench
from bench.config import Target, Text
from common import cli
from common.checkout import ROOT
from common.errors import require_at_least
from engine.drafters.ngram_table import NGramTable


@dataclass(frozen=True)
class Flags:
    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    markov_table: Path = ROOT / "reproduction" / "markov_table.json"  # the file to write
    max_ngram: int = 3  # longest context
    skip: int = 0  # tokens at the beginning of every book that are left out


def main(flags: Flags) -> None:
    require_at_least("max_ngram", flags.max_ngram, 1)
    require_at_least("skip", flags.skip, 0)
    source = flags.target.with_text()
    table, tokenizer = NGramTable(flags.max_ngram), source.tokenizer()
    for book in bench.load_books(str(bench.resolve_dataset(flags.text.dataset, source))):
        table.learn(tokenizer.encode(book, add_bos=False)[flags.skip :])
    table.save(flags.markov_table, source.config.vocab_size)


if __name__ == "__main__":
    cli.run(main, Flags)
