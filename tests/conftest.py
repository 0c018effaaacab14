"""Fixtures that several files share, and what the tests of losslessness measured: a table at the end, one JSON record.

A test records a figure with `record_property`: "count: X" figures are summed over tests, "max: X" figures
keep their largest, and "p-value: X" figures stand for themselves. They survive pytest-xdist's processes.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from common.jsonl import append_record
from common.provenance import provenance

# Small tensors gain nothing from more threads, and on a busy machine lose a lot to threads that wait.
torch.set_num_threads(1)

LONGEST = ("test_triton_kernels.py", "test_tensor_parallel.py", "test_rank_scripts.py", "test_data_parallel.py")
COMBINE = {"count": sum, "max": max, "p-value": min}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--evidence", metavar="FILE", help="append what the tests measured to this file, as JSON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of the longest tests, so that no process ends long after the others."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def combined(properties: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Combine properties into a figure per name, in order of first appearance."""
    figures: dict[str, float] = {}
    for name, value in properties:
        if combine := COMBINE.get(name.partition(":")[0]):
            figures[name] = combine((figures[name], value)) if name in figures else value
    return figures


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    figures = combined(pair for report in reports if report.when == "call" for pair in report.user_properties)
    if not figures:
        return
    terminalreporter.section("what the tests of losslessness measured")
    for name, value in sorted(figures.items()):
        terminalreporter.line(f"{name:<90} {value:g}")
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist: its reports reach the main process, too
    if config.getoption("evidence") and not is_worker:
        passed, failed = (len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed"))
        record = {"benchmark": "lossless_tests", "passed": passed, "failed": failed, "figures": figures}
        append_record(config.getoption("evidence"), record | provenance())


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed PyTorch, so that random numbers do not depend on tests that ran before in the process."""
    torch.manual_seed(0)


@pytest.fixture
def call(checkpoint: Path, books: Path):
    """Function that runs a program in this process on the checkpoint and the books: `call(program, flags)`."""
    from tests.support.programs import overriding, run

    paths = f"--model {checkpoint / 'model.pth'} --dataset {books}"
    return lambda program, flags: run(program, overriding(paths, flags))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted random Llama with a token a byte; every seventh token is an end of text."""
    from tests.support.hf_tiny import N_TOKENS, converted_llama

    ends = list(range(3, N_TOKENS, 7))
    return converted_llama(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=256, eos_token_id=ends)


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three books of 200 characters."""
    folder = tmp_path_factory.mktemp("books")
    for number in range(3):
        text = " ".join(f"{number}{word} and" for word in range(200))
        (folder / f"book{number}.txt").write_text(text[:200])
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, books: Path):
    """`rank_jobs.Models`: a target whose heads do not divide by two, and a draft."""
    from tests.support.rank_jobs import make_models

    return make_models(tmp_path_factory.mktemp("models"), books)


@pytest.fixture(scope="session")
def chat_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted random Llama with a chat template, a token a byte, and an end token; long enough for answers."""
    from tests.support.hf_tiny import converted_llama
    from tests.support.serving_cases import END, TEMPLATE

    folder = tmp_path_factory.mktemp("chat_checkpoint")
    converted_llama(folder, max_position_embeddings=400, eos_token_id=END)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def alone(chat_checkpoint: Path):
    """`serving_cases.Alone`: what plain decoding of one request gives."""
    from tests.support.serving_cases import Alone

    return Alone(chat_checkpoint)


@pytest.fixture(scope="module")
def served(chat_checkpoint: Path):
    """`serving_cases.Served`: a server in this process."""
    from tests.support.serving_cases import serving

    with serving(chat_checkpoint) as server:
        yield server
