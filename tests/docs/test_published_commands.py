"""The command lines for 8 GPUs of docs/ranks.md, on one process with tiny models and PG-19 in a hub cache."""

import hashlib
from pathlib import Path

import pytest

from bench.data import PG19_REPOSITORY, PG19_REVISION
from tests.support.pages import commands
from tests.support.pg19 import write_pg19
from tests.support.programs import ROOT, benchmark, overriding
from tests.support.rank_jobs import SIZES as SMALL
from tests.support.rank_jobs import Models

SCRIPTS = ("baseline", "selfspec", "longspec")
TARGETS = ("meta-llama/Meta-Llama-3.1-8B", "togethercomputer/LLaMA-2-7B-32K")
DRAFT = "TinyLlama/TinyLlama_v1.1"
ALONE = {"baseline": "--rank_group 0", "selfspec": "--rank_group 0", "longspec": "--rank_group 0 --draft_ranks 0"}


@pytest.fixture(scope="module")
def published() -> dict[str, list[str]]:
    """The page's flags for 8 ranks on one machine, by benchmark."""
    found = {}
    for launcher, *words in commands(ROOT / "docs/ranks.md"):
        if launcher == "torchrun" and words[:2] == ["--standalone", "--nproc_per_node=8"]:
            found[Path(words[2]).stem.removesuffix("_benchmark")] = words[3:]
    assert set(found) == set(SCRIPTS)
    return found


@pytest.fixture
def checkout(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models where theirs lie once they are converted. No network, an empty hub cache."""
    for name, folder in {**dict.fromkeys(TARGETS, models.target), DRAFT: models.draft}.items():
        link = tmp_path / "checkpoints" / name
        link.parent.mkdir(parents=True)
        link.symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # In this process, they were read when huggingface_hub was imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def pg19(checkout: Path, models: Models) -> None:
    """The test split in a hub cache as huggingface_hub leaves it: a blob, a commit, a link between them."""
    repository = checkout / "hub" / f"datasets--{PG19_REPOSITORY.replace('/', '--')}"
    file = write_pg19(repository / "blobs/new", [book.read_text() for book in sorted(models.books.iterdir())])
    blob = file.rename(file.parent / hashlib.sha256(file.read_bytes()).hexdigest())
    data = repository / "snapshots" / PG19_REVISION / "data"
    data.mkdir(parents=True)
    (data / "test-00000-of-00001-29a571947c0b5ccc.parquet").symlink_to(f"../../../blobs/{blob.name}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_published_command_reads_pg19(script, published, pg19):
    flags = published[script]
    record = benchmark(script, overriding(" ".join(flags), f"{ALONE[script]} {SMALL}")).record
    asked = {"dataset": "pg19", "model": flags[flags.index("--model_name") + 1], "compile": False, "B": 2}
    asked |= {} if script == "baseline" else {"gamma": 3, "draft_budget": 256, "draft_policy": "streaming"}
    asked |= {"draft_model": "draft"} if script == "longspec" else {}
    asked |= {"identical_sequences": None if script == "baseline" else 3}
    assert {name: record[name] for name in asked} == asked


def test_without_pg19_a_text_is_asked_for_at_once(checkout, monkeypatch):
    """Before a tokenizer or a weight is read."""
    for loads in ("load_tokenizer", "load_model"):
        monkeypatch.setattr(f"models.checkpoints.model_source.{loads}", lambda *_, **__: pytest.fail("it is loaded"))
    message = benchmark("baseline", ["--model", f"checkpoints/{DRAFT}/model.pth", *SMALL.split()]).refusal
    assert "--dataset" in message
