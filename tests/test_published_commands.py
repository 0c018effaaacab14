"""The command lines for 8 GPUs of docs/ranks.md: tiny models where theirs lie, on PG-19 in a hub cache, made small."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hf_tiny import N_TOKENS
from page_commands import Planner, blocks
from programs import ROOT, Ended
from programs import run as run_program
from rank_jobs import Models, on_two_ranks, results
from test_data import write_pg19

from engine.bench.data import PG19_REPOSITORY, PG19_REVISION
from engine.noise import in_passes
from models.pointwise import EAGER
from models.presets import PRESETS

SCRIPTS = ("baseline", "selfspec", "longspec")
TARGETS = ("meta-llama/Meta-Llama-3.1-8B", "togethercomputer/LLaMA-2-7B-32K")
DRAFT = "TinyLlama/TinyLlama_v1.1"
# All that is changed: it stands behind the command's own flags, and the last of a flag counts.
SMALL = "--B 2 --num_prompts 3 --prefix_len 60 --gen_len 12 --dtype float64"
ALONE = {"baseline": "--rank_group 0", "selfspec": "--rank_group 0", "longspec": "--rank_group 0 --draft_ranks 0"}
TWO_RANKS = "--rank_group 0 1 --draft_ranks 0"
TEXTS = [" ".join(f"{book}{word} and" for word in range(200))[:200] for book in range(3)]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": N_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The page's flags for 8 ranks of one machine, by script."""
    folder, found = tmp_path_factory.mktemp("bash"), {}
    for block in blocks(ROOT / "docs/ranks.md"):
        for program, *words in block.calls(folder):
            if program == "torchrun" and words[:2] == ["--standalone", "--nproc_per_node=8"]:
                found[Path(words[2]).stem.removesuffix("_benchmark")] = words[3:]
    assert set(found) == set(SCRIPTS)
    return found


@pytest.fixture
def checkout(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models where theirs lie once they are converted. No network, an empty hub cache.

    What --compile compiles is called as it is: compiling takes seconds, and has tests of its own.
    """
    tiny: Models = request.getfixturevalue("models")
    for name, folder in {**dict.fromkeys(TARGETS, tiny.target), DRAFT: tiny.draft}.items():
        link = tmp_path / "checkpoints" / name
        link.parent.mkdir(parents=True)
        link.symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # In this process, they were read when huggingface_hub was imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("engine.bench.loading.compiled", lambda **sizes: EAGER)
    monkeypatch.setattr("engine.bench.session.compiled_source", lambda: in_passes)
    return tmp_path


@pytest.fixture
def pg19(checkout: Path) -> None:
    """What huggingface_hub leaves of the test split in its cache: a blob, a commit, a link between them."""
    repository = checkout / "hub" / f"datasets--{PG19_REPOSITORY.replace('/', '--')}"
    file = write_pg19(repository / "blobs/new", TEXTS)
    blob = file.rename(file.parent / hashlib.sha256(file.read_bytes()).hexdigest())
    data = repository / "snapshots" / PG19_REVISION / "data"
    data.mkdir(parents=True)
    (data / "test-00000-of-00001-29a571947c0b5ccc.parquet").symlink_to(f"../../../blobs/{blob.name}")


@pytest.fixture
def run(checkout: Path) -> Callable[[str, list[str]], Ended]:
    """Runs a benchmark in the checkout, in this process."""
    return lambda script, flags: run_program(f"tests/{script}_benchmark.py", flags)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_published_command_reads_pg19(
    script: str, published: dict[str, list[str]], pg19: None, run: Callable
) -> None:
    flags = published[script]
    record = run(script, [*flags, *ALONE[script].split(), *SMALL.split()]).record
    asked = {"dataset": "pg19", "model": flags[flags.index("--model_name") + 1], "compile": True, "B": 2}
    asked |= {} if script == "baseline" else {"gamma": 3, "draft_budget": 256, "draft_policy": "streaming"}
    assert {name: record[name] for name in asked} == asked
    assert record["draft_model"] == ("draft" if script == "longspec" else None)
    assert record["identical_sequences"] == (None if script == "baseline" else 3)


def test_a_published_command_emits_the_same_on_two_ranks(
    published: dict[str, list[str]], checkout: Path, pg19: None, run: Callable
) -> None:
    """The third one, whose draft lies on one of them; there it is not compiled, which takes seconds."""
    flags = [flag for flag in published["longspec"] if flag != "--compile"]
    changed = f"{SMALL} --draft_dtype same --streamingllm_budget 16 --check_ranks"
    undivided = run("longspec", [*flags, *f"{ALONE['longspec']} {changed}".split()])
    one = undivided.record
    assert one["identical_sequences"] == 3
    assert 0 < one["accepted"] < one["judged"], "some drafts are meant to be right, some wrong"
    ended = on_two_ranks(checkout, "longspec", [*flags, *f"{TWO_RANKS} {changed}".split()])
    two = ended.record
    assert results(two) == results(one), ended.err
    assert (two["tensor_parallel"], two["draft_ranks"], two["check_ranks"]) == (2, [0], True)
    assert two["dataset"] == one["dataset"] == "pg19"
    for said_once in ("loading ", "note: ", "looking for "):
        assert ended.err.count(said_once) == undivided.err.count(said_once)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_published_command_runs_on_random_weights(
    script: str, published: dict[str, list[str]], run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a text, of a tiny shape under the published name."""
    for name in TARGETS:
        monkeypatch.setitem(PRESETS, name, TINY)
    record = run(script, [*published[script], "--load_format", "dummy", *ALONE[script].split(), *SMALL.split()]).record
    assert (record["dataset"], record["load_format"], record["sequences"]) == (None, "dummy", 3)


@pytest.mark.parametrize("n_gpus,says", [(0, "does not fit into memory"), (1, "8 processes on a machine with 1 GPUs")])
def test_a_published_command_gets_as_far_as_the_gpus(
    n_gpus: int, says: str, published: dict[str, list[str]], tmp_path: Path
) -> None:
    """Unchanged, where there are none or too few; `test_page_commands.py` plans it on 8."""
    planner = Planner(tmp_path, n_gpus=n_gpus)
    for script, flags in published.items():
        with pytest.raises(AssertionError, match=says):
            planner.follow(f"tests/{script}_benchmark.py", flags, n_local=8)


def test_without_pg19_a_text_is_asked_for_at_once(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a tokenizer or a weight is read."""

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("something is loaded")

    monkeypatch.setattr("models.checkpoints.model_source.load_tokenizer", load)
    monkeypatch.setattr("models.checkpoints.model_source.load_model", load)
    message = run("baseline", ["--model", f"checkpoints/{DRAFT}/model.pth", *SMALL.split()]).refusal
    for part in ("PG-19", "--dataset FOLDER_OR_FILE (.txt, .jsonl, .parquet)", "--dataset default"):
        assert part in message
