"""compare.py: drafters next to plain decoding, by context, prompt, kind of text, category and storage."""

import json
import os
import shutil
import signal
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench import few_rounds, passes
from bench.table import LOOPING
from models.checkpoints.model_source import find_model
from reproduce.helpers import llama_cpp
from tests.support.programs import run, saved

SCRIPT = "reproduce/compare.py"
HOW = "--B 2 --gen_len 12 --device cpu --dtype float64 --gamma 2 --draft_dtype same"


def test_every_drafter_decodes_the_same_tokens_by_context(call, tmp_path: Path):
    """Batches are of unlike size; each drafter has its options, and knows nothing of its other runs."""
    drafters = ["oracle@1", "suffix+self", "suffix", "ngram@heuristic", "self:snapkv@confidence", "self@auto"]
    flags = f"{HOW.replace('12', '8')} --contexts 40 60 --num_prompts 3 --repeats 2 --draft_budget 16 --text_match 2"
    flags += " --snapkv_window 8 --auto_drafts suffix --confidence_threshold auto"
    flags += f" --output {tmp_path / 'out.jsonl'} --drafters"
    ended = call(SCRIPT, f"{flags} {' '.join(drafters)}")
    assert ended.code == 0, ended.err
    records = saved(tmp_path / "out.jsonl")
    assert [record["prefix_len"] for record in records] == [40, 60] and len(ended.record["rows"]) == 14
    for record in records:
        rows = {row["drafter"]: row for row in record["rows"]}
        assert list(rows) == [*drafters, "self:full"] and record["repeats"] == 2
        for row in rows.values():
            assert row["identical_sequences"] == row["sequences"] == 3 and row["emitted"] == 2 * 3 * 7
            assert len(row["speedups"]) == 2 and min(row["drafting_ms"], row["baseline_step_ms"], row["speedup"]) > 0
        assert [row["gamma"] for row in rows.values()] == [1, 2, 2, 2, 2, "auto", 2]
        assert [row.get("auto_drafts") for row in rows.values()] == [*[None] * 5, ["suffix"], None]
        assert [row["draft_budget"] for row in rows.values()] == [None, 16, None, None, 16, 16, None]
        assert rows["oracle@1"]["acceptance_rate"] == 1.0 > rows["suffix"]["acceptance_rate"]
        assert len(rows["self@auto"]["measured_costs"]) == 2, "measured anew for each repeat"
    assert all(name in ended.out for name in drafters) and "3 of 3" in ended.out


def test_acceptance_on_kinds_of_text(call):
    """Every draft decodes the same texts, also sampled ones; forced texts have no speed."""
    flags = f"{HOW.replace('12', '16')} --contexts 80 --snapkv_window 8 --texts greedy sampled book --top_p 0.9"
    rows = (ended := call(SCRIPT, f"{flags} --budgets 16 40 200 --drafters oracle self self:snapkv")).record["rows"]
    assert "self:snapkv with budget 200" in ended.err and max(map(len, ended.lines)) <= 140
    found = {(row["text"], row["draft_policy"], row["draft_budget"]): row for row in rows}
    assert len(found) == len(rows) == 3 * (2 * 2 + 1) + 2, "the ceiling in place of 200; no oracle of forced text"
    for (text, policy, _), row in found.items():
        assert row["verified"] > 0 and 0 <= row["distinct_4gram_fraction"] <= 1
        assert row["temperature"] == (0.6 if text == "sampled" else 0)
        assert row["verification"] == ("coupled" if text == "sampled" else "greedy")
        assert row["top_p"] == (0.9 if text == "sampled" else 1.0)
        assert ("speedup" in row) == (text != "book") and row.get("identical_sequences", 2) == 2
        assert row["acceptance_rate"] == 1 or row["draft_budget"] in (16, 40), "the target, over the same cache"
        assert (row["draft_budget"] is None) == (policy in (None, "full")) and "identical 2 of 2" not in ended.out
    assert min(row["acceptance_rate"] for row in rows) < 1
    assert len({(row["text"], row["tokens_sha256"]) for row in rows}) == 3
    looping = {row["text"] for row in rows if row["distinct_4gram_fraction"] < LOOPING}
    assert {text for text in ("greedy", "sampled", "book") if f"{text}: the text repeats" in ended.out} == looping


def test_repeats_make_no_rate_more_certain(call):
    """A speedup of few rounds has a note, and is printed without its standard error."""
    flags = f"{HOW.replace('12', '5')} --contexts 60 --num_prompts 4 --drafters self:snapkv --draft_budget 40"
    ended = [call(SCRIPT, f"{flags} --temperature 1 --seed 2 --repeats {n}") for n in (1, 2)]
    (once,), (twice,) = (each.record["rows"] for each in ended)
    assert once["verification"] == "coupled" and once["identical_sequences"] == 4
    assert once["acceptance_standard_error"] == twice["acceptance_standard_error"] > 0
    for row, each in zip((once, twice), ended, strict=True):
        assert row["speedup_standard_error"] > 0 and f" {row['speedup']:.2f} ± " not in each.out
        assert few_rounds(row)[0] in each.out and "±: one standard error" in each.out


# Categories of one to three conversations of different lengths, which do not all go on.
TALKS = [("math", ["What is 3 + 4 + 3 + 4?", "Why?"]), ("letters", ["a b a b a b a b a b a b", "b a"])]
TALKS += [("math", ["No."]), ("math", ["One and one and one and one", "and one?"]), ("end", ["xyzxyzxyzxyz"])]


@pytest.fixture
def chat(chat_checkpoint: Path, tmp_path: Path):
    """Runs the program on those conversations."""
    rows = [{"question_id": i, "category": name, "turns": turns} for i, (name, turns) in enumerate(TALKS)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = f"{HOW} --model {chat_checkpoint} --chat --prompts {tmp_path / 'set.jsonl'} --draft_budget 16"
    return lambda more: run(SCRIPT, f"{flags} --output {tmp_path / 'out.jsonl'} {more}".split())


def test_categories_have_records_and_sums(chat, tmp_path: Path):
    ended = chat("--drafters self oracle")
    rows = ended.record["rows"]
    assert [record["conversations"] for record in saved(tmp_path / "out.jsonl")] == [3, 1, 1]
    each = [(name, category) for name in ("self", "oracle") for category in ("math", "letters", "end", "all")]
    assert [(row["drafter"], row["category"]) for row in rows] == each
    for *parts, whole in (rows[:4], rows[4:]):
        assert [row["sequences"] for row in (*parts, whole)] == [5, 2, 1, 8], "turns"
        for name in ("identical_sequences", "rounds", "drafted", "verified", "accepted", "emitted"):
            assert whole[name] == sum(part[name] for part in parts)
        assert whole["identical_sequences"] == 8 and len(parts[0]["by_row"]) == 3, "conversations"
        assert whole["mean_accepted_length"] == pytest.approx(whole["emitted"] / whole["rounds"], abs=1e-4)
    assert rows[-1]["acceptance_rate"] in (1.0, None) and "8 of 8" in ended.out


@pytest.mark.parametrize("sampling", ["", "--temperature 1.5 --seed 3 --verification rejection"])
def test_a_later_turn_follows_the_answers_of_plain_decoding(chat, chat_checkpoint, monkeypatch, sampling: str):
    """For every drafter, also where its own samples were others; rows whose conversation has ended are left out."""
    calls: list[tuple[str, Any, Any]] = []

    def decode(session: Any, name: str, *rest: Any, **more: Any) -> Any:
        calls.append((name.partition(",")[0], session, original(session, name, *rest, **more)))
        return calls[-1][2]

    original = passes.decode
    monkeypatch.setattr("bench.decode", decode)
    ended = chat(f"--categories math letters --drafters ngram self {sampling}")
    assert ended.code == 0, ended.err
    names, batches = [name for name, *_ in calls], [calls[start : start + 3] for start in range(0, len(calls), 3)]
    order = ["plain", "ngram", "self"]
    expected = [order, order[::-1], order, order, order[::-1]]  # three batches of math, two of letters
    assert names == [name for each in expected for name in each]
    template, answers = find_model(str(chat_checkpoint), "pth", None, "--model").chat_template(), dict[int, str]()
    firsts = [[session.numbered_from for _, session, _ in batch] for batch in batches]
    assert firsts == [[n] * 3 for n in (0, 2, 3, 0, 1)], "requests are numbered within their category"
    for batch, asked in zip(batches, ([0, 2], [3], [0, 3], [1], [1]), strict=True):
        ((_, session, plain),) = [each for each in batch if each[0] == "plain"]
        assert all(other.prompts == session.prompts for _, other, _ in batch)
        for row, prompt, tokens in zip(asked, session.prompts, plain.tokens, strict=True):
            first, *more = ({"role": "user", "content": turn} for turn in TALKS[row][1])
            talk = [first, {"role": "assistant", "content": answers[row]}, *more] if row in answers else [first]
            assert prompt == template.encode(talk)
            answers[row] = template.tokenizer.decode(tokens)
    others = [out.tokens != batch[0][2].tokens for batch in batches for _, _, out in batch[1:]]
    assert any(others) == bool(sampling)
    assert all((row["identical_sequences"] is None) == bool(sampling) for row in ended.record["rows"])


def fake_rows(gguf: str, prompt: list[int], rows: int, room: int, threads: int, entries: str) -> SimpleNamespace:
    """Stand in for llama.cpp: a step takes as many ms as a row has tokens in it."""
    assert len(prompt) == 60 and rows == 2 and gguf.endswith("tiny.Q4_1.gguf") and entries in ("f16", "q8_0")
    return SimpleNamespace(steps=lambda n_token, n_steps: [n_token] * n_steps)


def test_storages_are_compared_with_llama_cpp(checkpoint: Path, books: Path, tmp_path: Path, monkeypatch):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    flags = f"{HOW} --model {model} --dataset {books} --contexts 60 --draft_budget 16 --llama_cpp"
    words = f"{flags} --drafters self --storages float32 bfloat16-int8 --texts greedy sampled".split()
    assert "GGUF" in run(SCRIPT, words).refusal
    (model / "tiny.Q4_1.gguf").touch()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert "llama-cpp-python" in (refused := run(SCRIPT, words)).refusal and "prefill" not in refused.err
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    monkeypatch.setattr(llama_cpp, "LlamaRows", fake_rows)
    monkeypatch.setattr(llama_cpp, "new_process", lambda: ThreadPoolExecutor(1))  # a process would lack the stand-in
    assert run(SCRIPT, [*words, "--output", str(tmp_path / "out.jsonl")]).code == 0
    *ours, f16, q8_0 = saved(tmp_path / "out.jsonl")
    stored = [(x["storage"], x["dtype"], x["kv_dtype"], x["rows"][0]["draft_dtype"]) for x in ours]
    assert stored == [("float32", *["float32"] * 3), ("bfloat16-int8", "bfloat16", "int8", "bfloat16")]
    for record in ours:
        assert [(row["text"], row["identical_sequences"]) for row in record["rows"]] == [("greedy", 2), ("sampled", 2)]
    for peer in (f16, q8_0):
        assert peer["rows"] == [{"baseline_step_ms": 1, "baseline_tokens_per_second": 2000.0, "verify_step_ms": 3}]


def end_this_process(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGILL)


def test_a_peer_whose_process_dies_is_left_out(monkeypatch, capsys) -> None:
    monkeypatch.setattr(llama_cpp, "step_ms", end_this_process)
    monkeypatch.setattr(llama_cpp, "new_process", lambda: ProcessPoolExecutor(1, get_context("fork")))
    peer, batch = llama_cpp.Peer(Path("tiny.Q4_1.gguf"), "f16", 2, 3), SimpleNamespace(prompts=[[1, 2], [3, 4]])
    for repeat in range(2):
        peer.run(batch, repeat)  # type: ignore[arg-type]
    assert set(peer.row().values()) == {None} and capsys.readouterr().err.count("f16 ended its process") == 1
