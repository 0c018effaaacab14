"""Every kind of bad input: exit code 2, one error of the right kind that names the field, and nothing left behind."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from common.errors import CheckpointError, ConfigError, DataError, OutOfMemoryError, UserError
from tests.support.programs import BENCHMARKS, COST_MODEL, TERMINAL, run

BASELINE, LONGSPEC, SELFSPEC = BENCHMARKS
COMPARE, LATENCY, EVAL, _, SERVE = TERMINAL
SIZES = {"--dataset": "books", "--B": "2", "--prefix_len": "60", "--gen_len": "12", "--device": "cpu"}
# Flags of each program that a case leaves out.
USUAL = {program: {"--model": "checkpoint", **SIZES} for program in (BASELINE, SELFSPEC)}
USUAL[LONGSPEC] = {"--target": "checkpoint", "--model": "checkpoint", **SIZES}
USUAL[LATENCY] = {"--dataset": "books", "--device": "cpu"}
# Program, flags, kind of error, and a word of the line that says where the error is.
REFUSALS = [
    ("download.py", "--repo_id org/name --out_dir fetched", CheckpointError, "org/name"),
    ("convert_hf_checkpoint.py", "--checkpoint_dir checkpoint --drop_layers 0", ConfigError, "--out_dir"),
    (BASELINE, "--B 0", ConfigError, "--B"),
    (BASELINE, "--prefix_len 250", ConfigError, "--prefix_len"),
    (BASELINE, "--prefix_len 230", DataError, "dataset"),
    (BASELINE, "--dataset latin.txt", DataError, "latin.txt"),
    (BASELINE, "--B 100000000 --dtype float64", OutOfMemoryError, "cpu"),
    (BASELINE, "--max_len 40", ConfigError, "--max_len"),
    (BASELINE, "--temperature 1 --verification greedy", ConfigError, "--verification"),
    (BASELINE, "--attention flash", ConfigError, "--attention"),
    (BASELINE, "--output missing/folder/out.jsonl", ConfigError, "--output"),
    (BASELINE, "--model nowhere/model.pth", CheckpointError, "--model"),
    (BASELINE, "--model wordless", CheckpointError, "wordless"),
    (BASELINE, "--model more_words", CheckpointError, "more_words"),
    (SELFSPEC, "--draft_budget 4", ConfigError, "--draft_budget"),
    (SELFSPEC, "--draft_of_draft streaming --draft_budget 64", ConfigError, "--draft_budget"),
    (SELFSPEC, "--draft standalone", ConfigError, "--draft"),
    (SELFSPEC, "--temperature 1 --draft oracle", ConfigError, "oracle"),
    (LONGSPEC, "--model other_words", ConfigError, "other_words"),
    (LONGSPEC, "--draft_policy verify_topk", ConfigError, "--draft_policy"),
    (COMPARE, "checkpoint nowhere", ConfigError, "--draft"),
    (COMPARE, "self", ConfigError, "TARGET"),
    (LATENCY, "suffix+self@3", ConfigError, "TARGET"),
    (LATENCY, "checkpoint --length 0", ConfigError, "--length"),
    (EVAL, "checkpoint --load_format dummy --save rows.jsonl", ConfigError, "--load_format"),
    (SERVE, "--model nowhere", CheckpointError, "--model"),
    (COST_MODEL, "--machine A100 --model checkpoint --dtype float64 --alpha 0", ConfigError, "--dtype"),
    (COST_MODEL, "--machine A100 --model checkpoint", ConfigError, "--alpha"),
    (COST_MODEL, "--records books/book0.txt", ConfigError, "--records"),
]


@pytest.fixture(scope="module")
def folder(checkpoint: Path, books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files that the command lines name."""
    folder = tmp_path_factory.mktemp("refusals")
    shutil.copytree(books, folder / "books")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    for name in ("checkpoint", "wordless", "other_words", "more_words"):
        shutil.copytree(checkpoint, folder / name)
    (folder / "wordless" / "tokenizer.json").unlink()
    for name, words in (("other_words", {"a": 66, "b": 65}), ("more_words", {"1": 257})):
        (folder / name / "manifest.json").unlink()
        tokenizer = json.loads((folder / name / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] |= words
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def words_of(program: str, flags: str) -> list[str]:
    given = flags.split()
    return given + [word for pair in USUAL.get(program, {}).items() if pair[0] not in given for word in pair]


@pytest.mark.parametrize("program,flags,kind,where", REFUSALS, ids=[f"{each[0]} {each[1]}" for each in REFUSALS])
def test_bad_input_is_refused(program: str, flags: str, kind: type[UserError], where: str, folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    files, unreachable = sorted(folder.rglob("*")), OSError("no network")
    with (
        mock.patch("huggingface_hub.snapshot_download", side_effect=unreachable),
        mock.patch("huggingface_hub.HfApi.model_info", side_effect=unreachable),
    ):
        ended = run(program, words_of(program, flags))
    assert ended.code == 2 and ended.err.count("error: ") == 1, ended.err
    assert type(ended.error) is kind, ended.err
    (line,) = (line for line in ended.err.splitlines() if line.startswith("  where: "))
    assert where in line
    assert sorted(folder.rglob("*")) == files


@pytest.mark.parametrize("n_ranks,flags,where", [(3, "", "--rank_group"), (4, "--data_parallel 3", "--data_parallel")])
def test_ranks_that_cannot_share_the_model_are_refused(n_ranks: int, flags: str, where: str, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", f"{n_ranks}")
    assert where in run(BASELINE, words_of(BASELINE, flags)).refusal
