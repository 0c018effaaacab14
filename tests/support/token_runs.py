"""Tokens and acceptance of a fixed list of runs of the built-in model: what a change of the code must leave as it was.

    python tests/support/token_runs.py --output before.jsonl       # then change the code
    python tests/support/token_runs.py --against before.jsonl      # exit code 1 if a run differs

Runs have five prompts of unlike lengths in three rows. A run that is new, or that `--against` lacks, is only printed.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import cli
from common.jsonl import publish
from common.provenance import provenance
from models.checkpoints.default_model import DEFAULT_BOOK, DEFAULT_CHECKPOINT
from models.checkpoints.loading import read_checkpoint
from tests.support.programs import ROOT, python
from tests.support.published_heads import (
    dflash_config,
    dflash_tensors,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    save_head,
)
from tests.support.rank_jobs import LAUNCHER

LENGTHS, START = (900, 2600, 4100, 1500, 3300), 100_000  # characters of the prompts, and where in the book they begin
COUPLED = "--temperature 0.6 --top_p 0.95 --verification coupled --seed 3"
REJECTION = "--temperature 0.8 --top_k 50 --verification rejection --seed 5"
SELF = {
    "streaming": "--draft_budget 96",
    "streaming, 8-bit entries": "--draft_budget 96 --draft_kv_dtype int8",
    "full": "--draft_policy full --draft_weights int8",
    "snapkv": "--draft_policy snapkv --draft_budget 96 --snapkv_window 16",
    "retrieval": "--draft_policy retrieval --draft_budget 96",
    "verify_topk": "--draft_policy verify_topk --draft_budget 96",
    "verify_topk, ends": "--draft_policy verify_topk --draft_budget 96 --score_queries ends --refresh 3",
    "quantized": "--draft_policy quantized",
    "heuristic": "--draft_budget 96 --gamma_schedule heuristic",
    "confidence": "--draft_budget 96 --gamma_schedule confidence",
    "suffix + self": "--draft_budget 96 --text_drafts suffix",
    "layers": "--draft_budget 96 --draft_layers 0-9,14-29",
    "draft of draft": "--draft_policy verify_topk --draft_budget 256 --draft_of_draft ngram",
    "ngram": "--draft ngram",
    "suffix": "--draft suffix",
    "cache": "--draft cache",
    "oracle": "--draft oracle",
}
MODELS = {
    "standalone": "--model {model} --draft_budget 128 --draft_dtype same",
    "standalone, cache positions": "--model {model} --draft_budget 128 --draft_positions cache",
    "standalone, snapkv": "--model {model} --draft_policy snapkv --draft_budget 128",
    "eagle": "--draft eagle --model {eagle}",
    "medusa": "--draft medusa --model {medusa}",
    "dflash": "--draft dflash --model {dflash}",
}
IN_REJECTION = ("streaming", "verify_topk", "suffix", "standalone", "eagle", "dflash")


@dataclass(frozen=True)
class Flags:
    """What is run, and what it is compared with."""

    only: str = ""  # run those whose names contain this
    output: str | None = None  # append the record to this file
    against: Path | None = None  # a file whose last record is of other code


def commands(folder: Path) -> Iterator[tuple[str, str, list[str], bool]]:
    """Name, benchmark and flags of each run, and whether two ranks share it."""
    book = DEFAULT_BOOK.read_text()[START:]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": book[5000 * i :][:n]}) + "\n" for i, n in enumerate(LENGTHS)))
    shared = ["--prompts", str(prompts), "--B", "3", "--gen_len", "32"]
    target, _ = read_checkpoint(DEFAULT_CHECKPOINT / "model.pth")
    heads = {"eagle": save_head(folder / "eagle", eagle_tensors(target, 3), eagle_config(target, 3))}
    heads["dflash"] = save_head(folder / "dflash", dflash_tensors(target), dflash_config(target))
    medusa = {"medusa_num_heads": 4, "medusa_num_layers": 2}
    heads["medusa"] = save_head(folder / "medusa", medusa_tensors(target), medusa, "medusa_lm_head.safetensors")
    models = {"model": str(DEFAULT_CHECKPOINT / "model.pth"), **heads}
    yield "plain, int8 weights", "baseline", [*shared, "--quantize", "int8"], False
    for mode, flags in {"greedy": "", "coupled": COUPLED, "rejection": REJECTION}.items():
        yield f"plain, {mode}", "baseline", [*shared, *flags.split()], False
        drafts = SELF | MODELS
        for name in drafts if mode != "rejection" else IN_REJECTION:
            script = "longspec" if name in MODELS else "selfspec"
            words = [*shared, *flags.split(), *drafts[name].format(**models).split()]
            yield f"{name}, {mode}", script, words, False
    for mode, flags in {"greedy": "", "coupled": COUPLED}.items():
        yield f"two ranks, {mode}", "selfspec", [*shared, *flags.split(), "--rank_group", "0", "1"], True


def served() -> dict[str, Any]:
    """The texts of nine requests with seeds, four at a time."""
    command = [sys.executable, "-m", "serving", "--port", "0", "--max_batch", "3", "--max_length", "2048"]
    command += ["--gamma", "3", "--draft_budget", "96"]
    book = DEFAULT_BOOK.read_text()[START:]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        ready = next(line for line in server.stderr if line.startswith("serving "))
        address = next(word for word in ready.split() if word.startswith("http://"))

        def ask(seed: int) -> str:
            asked = {"prompt": book[4000 * seed :][: LENGTHS[seed % 5]], "max_tokens": 24, "seed": seed}
            body = json.dumps(asked | {"temperature": 0.7 * (seed % 3), "top_p": 0.9}).encode()
            url, headers = f"{address.rstrip('/,')}/v1/completions", {"content-type": "application/json"}
            with urlopen(Request(url, body, headers), timeout=300) as answer:
                return json.load(answer)["choices"][0]["text"]

        try:
            texts = list(ThreadPoolExecutor(4).map(ask, range(9)))
        finally:
            server.terminate()
            server.stderr.read()
    return {"tokens_sha256": sha256("\0".join(texts).encode()).hexdigest()}


def run_one(folder: Path, script: str, words: list[str], on_ranks: bool) -> dict[str, Any]:
    """Return the tokens and the counts of a benchmark."""
    path = ROOT / "tests" / f"{script}_benchmark.py"
    record = python(*(LAUNCHER[1:] if on_ranks else ()), path, *words).record
    return {name: record[name] for name in ("tokens_sha256", "drafted", "accepted", "identical_sequences")}


def main(flags: Flags) -> None:
    lines = flags.against.read_text().splitlines() if flags.against else []
    before, found = json.loads(lines[-1])["runs"] if lines else {}, dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        runs = {run: partial(run_one, Path(name), *how) for run, *how in commands(Path(name))} | {"server": served}
        for run in (run for run in runs if flags.only in run):
            found[run] = runs[run]()
            differs = run in before and before[run] != found[run]
            print(f"{run:40} {found[run]['tokens_sha256'][:12]} {'DIFFERS' * differs}", flush=True)
    differing = [run for run in found if run in before and before[run] != found[run]]
    publish(flags.output, {"benchmark": "token_runs", "differing": differing, "runs": found, **provenance()})
    sys.exit(bool(differing))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
