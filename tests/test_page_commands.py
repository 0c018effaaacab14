"""The pages' commands fit the machines that they are for; the built-in model's run here, at small sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from page_commands import BUILT_IN, NO_COMMANDS, Block, Planner, blocks, fields_read, is_built_in, started, use_built_in
from programs import COST_MODEL, ROOT, run
from test_docs import PAGES

from models.checkpoints.default_model import DEFAULT_NAME

BOOK_TOKENS = 167_930  # of the built-in book, by the built-in model


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("checkout"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_pages_commands_fit_the_machine_that_they_are_for(page: Path, planner: Planner) -> None:
    """Flags, values, files, contexts, ranks and memory, as the programs themselves check them."""
    for block in blocks(page):
        assert block.language in ("", "bash", *NO_COMMANDS), f"{page}: are these commands?\n{block.text}"
        for plan in block.plans(planner):
            built_in = plan.target.name == DEFAULT_NAME
            expected = None if not plan.target.has_text else "default" if built_in else "pg19"
            assert plan.dataset == expected
            assert plan.dataset != "default" or plan.n_prompts * plan.prefix_len < BOOK_TOKENS
            assert block.n_gpus in (None, plan.config.n_replicas * len(plan.group)), block.text


def test_commands_write_where_git_does_not_look(tmp_path: Path) -> None:
    """Those that users are told of, and every command of reproduce/; what is committed is made as CONTRIBUTING says."""
    pages = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
    told = [call for page in pages for block in blocks(page) for call in block.calls(tmp_path)]
    told += [["python", f"reproduce/{file.name}"] for file in (ROOT / "reproduce").glob("*.py")]
    told.remove(["python", "reproduce/plot.py"])  # which needs records
    written: set[object] = set()
    for program, flags, *_ in filter(None, map(started, told)):
        read = fields_read(program, flags)
        if "page" not in read:  # made of records, by maintainers
            written |= {read.get(name) for name in ("output", "save_rows", "figures")}
    paths = {os.path.abspath(ROOT / str(path)) for path in written - {None}}
    asked = "\n".join(paths)
    ignored = subprocess.run(["git", "check-ignore", "--stdin"], cwd=ROOT, input=asked, capture_output=True, text=True)
    assert len(paths) > 5 and paths - set(ignored.stdout.splitlines()) == set()


def test_commands_are_found() -> None:
    found = [block.text for page in PAGES for block in blocks(page) if block.language not in NO_COMMANDS]
    text = "\n".join(found)
    assert len(re.findall(r"\b(?:python|torchrun|make|pip) ", text)) > 70
    for command in ("python -m cost_model", "torchrun --nnodes=2", "make certify", "srun"):
        assert command in text


def test_what_cannot_run_is_found(tmp_path: Path) -> None:
    """The checks above can fail: for flags, ranks, memory, contexts, files, and for what they do not know."""
    planner, llama = Planner(tmp_path), "--model checkpoints/meta-llama/Meta-Llama-3.1-8B/model.pth"
    selfspec = "tests/selfspec_benchmark.py"
    for command, says in {
        f"python {selfspec} {llama} --B 32 --prefix_len 32000": "does not fit into memory",
        f"torchrun --nnodes=2 --nproc_per_node=8 {selfspec} {llama}": "8 KV heads, 16 ranks",
        f"torchrun --nproc_per_node=4 {selfspec} {llama} --rank_group 0 1": "--rank_group",
        f"python {selfspec} --prefix_len 9000": "exceeds the model's context",
        f"python {selfspec} --model /data/model.pth": "no converted checkpoint",
        f"python {selfspec} --no_such_flag": "unrecognized arguments",
        f"python reproduce/sweep.py --script {selfspec} --axis B=1,64 --fixed gen_len=9000 --output o": "context",
        "python download.py --no_such_flag": "unrecognized arguments",
        "python reproduce/no_such_script.py --help": "no_such_script",
        "make no-such-target": "no-such-target",
        "pip install something": "something",
        "curl example.org": "curl",
    }.items():
        with pytest.raises(AssertionError, match=re.escape(says)):
            Block("", command).plans(planner)


# The sizes at which a tiny model in the built-in one's place runs the pages' commands: the last of a flag counts.
SIZE = "--B 2 --prefix_len 60 --gen_len 8 "
SMALL = {
    "tests/selfspec_benchmark.py": SIZE,
    "tests/baseline_benchmark.py": SIZE,
    "tests/longspec_benchmark.py": SIZE,
    "reproduce/acceptance.py": SIZE + "--budgets 40",
    "reproduce/certify.py": "--B 2 --prefix_len 60 --tokens 16 --calibration_positions 8",
    "reproduce/gamma_cell.py": SIZE + "--repeats 1 --gammas 1 --budgets 40",
    COST_MODEL: "--batches 1 2 --contexts 40 60 --budgets 40 --gammas 1 2",
}


@pytest.fixture
def tiny_built_in(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which a tiny model and a short book are the built-in ones; the working directory."""
    folder, book = tmp_path / "checkpoints", tmp_path / "book.txt"
    folder.mkdir()
    for name in BUILT_IN:
        (folder / name).symlink_to(checkpoint)
    book.write_text(" ".join(f"{word} and" for word in range(200)))
    use_built_in(folder / DEFAULT_NAME, monkeypatch)
    monkeypatch.setattr("bench.data.DEFAULT_BOOK", book)
    monkeypatch.setattr("bench.auto.measure.MEASURING_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_built_in_models_commands_run(tiny_built_in: Path) -> None:
    """Each as it is on its page, at smaller sizes."""
    every = [call for page in PAGES for block in blocks(page) for call in block.calls(tiny_built_in)]
    commands = set()
    for words in every:
        program, flags, *_ = started(words) or ("", [])
        if words[0] == "python" and program in SMALL and is_built_in(words):
            commands.add((program, *flags, *SMALL[program].split()))
    assert {command[0] for command in commands} == set(SMALL)
    for program, *flags in sorted(commands):
        ended = run(program, flags)
        assert "error:" not in ended.err, ended.err  # one that says whether something holds may exit with 1
        record = json.loads(ended.out.splitlines()[-1])
        assert record["dataset"] == "default"


def test_the_pages_python_runs(tiny_built_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the README; `test_extending.py` runs the other."""
    codes = {page.name: block.text for page in PAGES for block in blocks(page) if block.language == "python"}
    assert codes.keys() == {"README.md", "extending.md"}
    exec(codes["README.md"], {})
    out = capsys.readouterr().out
    assert "It is a truth universally acknowledged, that ->" in out
    [per_position] = re.findall(r"^\[.*\]$", out, re.MULTILINE)
    assert len(json.loads(per_position)) == 3
