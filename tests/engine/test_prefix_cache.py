"""Prefilled prompts that later runs take over bit by bit; what is no file in a cache folder is never opened."""

import faulthandler
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine import ModelRunner
from engine.prefix_store import PrefixStore
from models import Transformer
from models.kernels.build import BuildChoice, remembered
from tests.support.programs import benchmark
from tests.support.tiny import full_cache, random_prompts, tiny_model, tiny_runner

PROMPTS = random_prompts([5, 38, 17])


def store(folder: Path, max_bytes: int = 1 << 30, key: str = "a") -> PrefixStore:
    return PrefixStore(folder, key, max_bytes)


def runner_over(
    prefixes: PrefixStore | None, model: Transformer | None = None, kv_dtype: torch.dtype | None = None
) -> ModelRunner:
    model = model or tiny_model()
    return ModelRunner(model, full_cache(model, 3, kv_dtype=kv_dtype), prefill_chunk=8, prefixes=prefixes)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_a_row_that_is_taken_over_has_the_bits_of_one_that_ran(tmp_path: Path, kv_dtype: torch.dtype | None) -> None:
    first, second = (runner_over(store(tmp_path), kv_dtype=kv_dtype) for _ in range(2))
    for row, prompt in enumerate(PROMPTS):
        second.prefill(row, random_prompts([60], seed=row)[0])  # what the row held before goes
        mine, theirs = first.prefill(row, prompt), second.prefill(row, prompt)
        assert torch.equal(mine.logits, theirs.logits) and mine.prompt == theirs.prompt
        assert torch.equal(first.cache.positions[row], second.cache.positions[row])
        for a, b in zip(first.cache.tensors[:-1], second.cache.tensors[:-1], strict=True):
            a, b = (x[:, :, row, :, : len(prompt)].view(torch.uint8) for x in (a, b))
            assert torch.equal(a, b)
    assert (first.prefixes.n_taken_over, second.prefixes.n_taken_over) == (0, 3)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:-9] + b"x" + data[-8:]])
def test_a_damaged_file_is_prefilled_anew(tmp_path: Path, damage) -> None:
    wanted = runner_over(store(tmp_path)).prefill(0, PROMPTS[1]).logits
    (path,) = tmp_path.glob("prefix-*")
    path.write_bytes(damage(path.read_bytes()))
    for n_taken in (0, 1):
        runner = runner_over(store(tmp_path))
        assert torch.equal(runner.prefill(0, PROMPTS[1]).logits, wanted) and runner.prefixes.n_taken_over == n_taken


def test_the_least_recently_used_prompts_make_room_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    runner = runner_over(store(tmp_path))
    for age, prompt in ((300, [1] * 20), (200, [2] * 20)):
        runner.prefill(0, prompt)
        newest = max(tmp_path.glob("prefix-*"), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (newest.stat().st_mtime - age,) * 2)
    size = max(path.stat().st_size for path in tmp_path.glob("prefix-*"))
    runner_over(store(tmp_path)).prefill(0, [1] * 20)  # now the other is the older
    runner_over(store(tmp_path, max_bytes=2 * size)).prefill(0, [3] * 20)
    assert (tmp_path / "model.safetensors").exists()
    for prompt, n_taken in (([1] * 20, 1), ([3] * 20, 1), ([2] * 20, 0)):
        runner = runner_over(store(tmp_path))
        runner.prefill(0, prompt)
        assert runner.prefixes.n_taken_over == n_taken


def test_another_key_or_prompt_or_a_folder_that_cannot_be_written_is_a_miss(tmp_path: Path, capfd) -> None:
    runner_over(store(tmp_path)).prefill(0, PROMPTS[1])
    (tmp_path / "file").touch()
    for prefixes, prompt in (
        (store(tmp_path, key="b"), PROMPTS[1]),
        (store(tmp_path), PROMPTS[1][:-1]),
        (store(tmp_path / "file"), PROMPTS[1]),
    ):
        runner = runner_over(prefixes)
        assert torch.equal(runner.prefill(0, prompt).logits, tiny_runner(3, prefill_chunk=8).prefill(0, prompt).logits)
        assert runner.prefixes.n_taken_over == 0
    assert "not kept" in capfd.readouterr().err


def test_a_second_run_takes_prompts_over_unless_its_storage_is_another(
    checkpoint: Path, books: Path, tmp_path: Path
) -> None:
    def run(*flags: str) -> dict:
        paths = f"--model {checkpoint / 'model.pth'} --dataset {books} --prefix_cache {tmp_path / 'kept'}"
        sizes = "--B 2 --prefix_len 40 --gen_len 9 --draft_budget 16"
        return benchmark("selfspec", [*paths.split(), *sizes.split(), *flags]).record

    first, second = run(), run("--by_length", "4", "--benchmark")
    assert first["tokens_sha256"] == second["tokens_sha256"]
    assert [record["prefill_taken_over"] for record in (first, second, run("--kv_dtype", "int8"))] == [0, 2, 0]
    stretches = second["by_length"]
    assert [row["generated"] for row in stretches] == [[0, 4], [4, 8], [8, 9]][: len(stretches)]
    for row in range(2):
        for name in ("drafted", "verified", "accepted", "emitted", "rounds"):
            assert sum(each["by_row"][row][name] for each in stretches) == second["by_row"][row][name]
    assert all(stretches[0][name] > 0 for name in ("draft_ms", "verify_ms", "baseline_step_ms", "round_ms"))
    emitted = sum(row["rounds"] * row["mean_accepted_length"] for row in stretches)
    assert emitted == pytest.approx(second["emitted"], abs=0.01)


@pytest.fixture(params=["FIFO", "device"])
def replace(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """Function that puts a FIFO or a device in a path's place. The process ends if a test waits for a writer."""

    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path) if request.param == "FIFO" else path.symlink_to("/dev/zero")

    faulthandler.dump_traceback_later(60, exit=True)
    yield replace
    faulthandler.cancel_dump_traceback_later()


def test_a_prompt_without_a_file_runs_again(replace: Callable[[Path], None], tmp_path: Path) -> None:
    seen = []
    for _ in "12":
        runner = tiny_runner(1, prefixes=store(tmp_path))
        seen.append(runner.prefill(0, [*range(38)]).logits.tolist())
        (path,) = tmp_path.glob("prefix-*")
        replace(path)
    assert seen[0] == seen[1] and runner.prefixes is not None and runner.prefixes.n_taken_over == 0


def test_the_choice_of_a_build_without_a_file_is_made_again(replace: Callable[[Path], None], tmp_path: Path) -> None:
    choice, memory = BuildChoice("plain", []), tmp_path / "choice.json"
    for suffix in (".json", ".lock", ".partial"):
        replace(memory.with_suffix(suffix))
    assert remembered(memory, "choosing", lambda: choice) == choice
    assert BuildChoice(**json.loads(memory.read_text())) == choice
