"""Every program refuses bad input with exit code 2 and one error of the right kind that names the field."""

import json
import os
import shutil
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from unittest import mock

import pytest
from programs import COST_MODEL, run

from common.errors import CheckpointError, ConfigError, DataError, OutOfMemoryError, UserError

BASELINE, LONGSPEC, SELFSPEC = (f"tests/{name}_benchmark.py" for name in ("baseline", "longspec", "selfspec"))
COMPARE, EVAL, LATENCY, SERVE = (f"foretoken.py {name}" for name in ("compare", "eval", "latency", "serve"))
SWEEP = "reproduce/sweep.py"
SIZES = {"--dataset": "books", "--B": "2", "--prefix_len": "60", "--gen_len": "12", "--device": "cpu"}
# Flags that a case leaves out are filled in from here.
USUAL = {
    BASELINE: {"--model": "checkpoint", **SIZES},
    SELFSPEC: {"--model": "checkpoint", **SIZES},
    LONGSPEC: {"--target": "checkpoint", "--model": "checkpoint", **SIZES},
    LATENCY: {"--dataset": "books", "--device": "cpu"},
    COST_MODEL: {"--model": "checkpoint", "--dataset": "books", "--device": "cpu", "--gammas": "1"},
    "reproduce/acceptance.py": {"--model": "checkpoint", **SIZES},
    "reproduce/train_head.py": {"--model": "checkpoint", **SIZES},
}


@dataclass(frozen=True)
class Refusal:
    """A command line, the kind of its error, and a word of the line that says where the error is.

    flags: a word is NAME=VALUE if it sets an environment variable; "--name ..." leaves out a flag of USUAL.
    loads: the error can only be seen after the model was loaded.
    """

    program: str
    flags: str
    kind: type[UserError]
    where: str
    loads: bool = False

    @property
    def words(self) -> list[str]:
        given = self.flags.split()
        usual = USUAL.get(self.program, {})
        return given + [word for name, value in usual.items() if name not in given for word in (name, value)]


REFUSALS = [
    Refusal("download.py", "--repo_id org/name --out_dir fetched", CheckpointError, "org/name"),
    Refusal("convert_hf_checkpoint.py", "--checkpoint_dir nowhere", CheckpointError, "nowhere"),
    Refusal("convert_hf_checkpoint.py", "--checkpoint_dir checkpoint --drop_layers 0", ConfigError, "--out_dir"),
    Refusal(BASELINE, "--no_such_flag", ConfigError, "baseline_benchmark.py"),
    Refusal(BASELINE, "--B two", ConfigError, "baseline_benchmark.py"),
    Refusal(BASELINE, "--B 0", ConfigError, "--B"),
    Refusal(BASELINE, "--gen_len 0", ConfigError, "--gen_len"),
    Refusal(BASELINE, "--prefix_len 250", ConfigError, "--prefix_len"),
    Refusal(BASELINE, "--prefix_len 230", DataError, "dataset", loads=True),
    Refusal(BASELINE, "--dataset nowhere.txt", DataError, "--dataset"),
    Refusal(BASELINE, "--dataset latin.txt", DataError, "latin.txt", loads=True),
    Refusal(BASELINE, "--dataset pg19", DataError, "emozilla/pg19"),
    Refusal(BASELINE, "--B 100000000 --dtype float64", OutOfMemoryError, "cpu"),
    Refusal(BASELINE, "--temperature nan", ConfigError, "--temperature"),
    Refusal(BASELINE, "--temperature 1 --top_p 0", ConfigError, "--top_p"),
    Refusal(BASELINE, "--temperature 1 --verification greedy", ConfigError, "--verification"),
    Refusal(BASELINE, "--device cuda", ConfigError, "--device"),
    Refusal(BASELINE, "--attention flash", ConfigError, "--attention"),
    Refusal(BASELINE, "--output missing/out.jsonl", ConfigError, "--output"),
    Refusal(BASELINE, "--output books", ConfigError, "--output"),
    Refusal(BASELINE, "--save_rows missing/rows.jsonl", ConfigError, "--save_rows"),
    Refusal(BASELINE, "--model nowhere/model.pth", CheckpointError, "--model"),
    Refusal(BASELINE, "--model listed_config", CheckpointError, "listed_config/config.json"),
    Refusal(BASELINE, "--model wordless", CheckpointError, "wordless", loads=True),
    Refusal(SELFSPEC, "--gamma -1", ConfigError, "--gamma"),
    Refusal(SELFSPEC, "--draft_budget 4", ConfigError, "--draft_budget"),
    Refusal(SELFSPEC, "--draft_policy snapkv --draft_budget 8 --snapkv_window 8", ConfigError, "--draft_budget"),
    Refusal(SELFSPEC, "--text_drafts cache", ConfigError, "--text_match"),
    Refusal(SELFSPEC, "--draft markov", ConfigError, "--markov_table"),
    Refusal(SELFSPEC, "--temperature 1 --draft oracle", ConfigError, "oracle"),
    Refusal(LONGSPEC, "--model other_words", ConfigError, "other_words"),
    Refusal(LONGSPEC, "--draft_policy verify_topk", ConfigError, "--draft_policy"),
    Refusal(LONGSPEC, "--model checkpoint --draft medusa", CheckpointError, "checkpoint"),
    Refusal(COMPARE, "checkpoint nowhere", ConfigError, "--draft"),
    Refusal(COMPARE, "checkpoint ngram --draft suffix", ConfigError, "--draft"),
    Refusal(COMPARE, "checkpoint --save nowhere/page.html", ConfigError, "--save"),
    Refusal(COMPARE, "checkpoint --prompts nowhere.txt", DataError, "--prompts"),
    Refusal(LATENCY, "checkpoint --length 0", ConfigError, "--length"),
    Refusal(EVAL, "checkpoint --load_format dummy --save rows.jsonl", ConfigError, "--load_format"),
    Refusal(SERVE, "--model nowhere", CheckpointError, "--model"),
    Refusal(SERVE, "--max_batch 0", ConfigError, "--max_batch"),
    Refusal(COST_MODEL, "--alpha 1.5", ConfigError, "--alpha"),
    Refusal(COST_MODEL, "WORLD_SIZE=2 --alpha 0.5", ConfigError, "torchrun"),
    Refusal("reproduce/acceptance.py", "--budgets 4", ConfigError, "--budgets"),
    Refusal("reproduce/train_head.py", "--steps 0", ConfigError, "--steps"),
    Refusal("reproduce/spec_bench.py", "--model checkpoint --drafters ngrams", ConfigError, "--drafters"),
    Refusal(SWEEP, "--grid nowhere.toml --output out.jsonl", ConfigError, "nowhere.toml"),
    Refusal(SWEEP, "--script tests/sleeper.py --axis B= --output out.jsonl", ConfigError, "--axis"),
]


@pytest.fixture(scope="module")
def folder(checkpoint: Path, books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the command lines name; the damaged checkpoints differ in one file."""
    folder = tmp_path_factory.mktemp("refusals")
    shutil.copytree(books, folder / "books")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    for name in ("checkpoint", "listed_config", "wordless", "other_words"):
        shutil.copytree(checkpoint, folder / name)
    config = folder / "listed_config" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1}))
    (folder / "wordless" / "tokenizer.json").unlink()
    (folder / "other_words" / "manifest.json").unlink()
    tokenizer = json.loads((folder / "other_words" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"a": 66, "b": 65}
    (folder / "other_words" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.program} {refusal.flags}")
def test_bad_input_is_refused(refusal: Refusal, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one error of its kind, before anything is loaded where that can be, and nothing is left behind."""
    monkeypatch.chdir(folder)
    files = sorted(folder.rglob("*"))
    environment = dict(word.split("=", 1) for word in takewhile(lambda word: word[:1].isupper(), refusal.words))
    unreachable = OSError("no network")
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch("huggingface_hub.snapshot_download", side_effect=unreachable),
        mock.patch("huggingface_hub.HfApi.model_info", side_effect=unreachable),
    ):
        ended = run(refusal.program, refusal.words[len(environment) :])
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    assert type(ended.error) is refusal.kind, ended.err
    assert ended.err.count("error: ") == 1
    (where,) = (line for line in ended.err.splitlines() if line.startswith("  where: "))
    assert refusal.where in where
    assert ("loading " in ended.err) == refusal.loads, ended.err
    assert sorted(folder.rglob("*")) == files


@pytest.mark.parametrize("n_ranks,flags,where", [(3, "", "--rank_group"), (4, "--data_parallel 3", "--data_parallel")])
def test_ranks_that_the_model_cannot_be_split_over_are_refused(
    n_ranks: int, flags: str, where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", f"{n_ranks}")
    assert f"where:    {where}" in run(BASELINE, Refusal(BASELINE, flags, ConfigError, where).words).refusal
