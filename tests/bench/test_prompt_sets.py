"""Prompt sets: their formats, from files and by name, what is refused, and the set of this project."""

import hashlib
import json
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench import data
from bench.data import SPEED_BENCH, Prompt, by_category, load_prompts
from common.errors import ConfigError, DataError

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write a letter.", "Shorter."], "reference": ["no", "yes"]},
    {"question_id": 241, "category": "qa", "turns": ["Who?"]},
]
SPEED = {"question_id": "a", "category": "rag", "sub_category": "s", "turns": ["One.", "Two."], "source": "x"}
SPEED |= {"src_id": "7", "difficulty": "easy", "multiturn": True}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
MASKED = SPEED | {"question_id": "b", "turns": [PLACEHOLDER]}


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_spec_bench_keeps_all_turns(tmp_path: Path) -> None:
    found = load_prompts(str(jsonl(tmp_path / "question.jsonl", SPEC_BENCH)))
    assert found == [Prompt("81", "writing", ("Write a letter.", "Shorter.")), Prompt("241", "qa", ("Who?",))]


def test_longbench_asks_behind_its_context(tmp_path: Path) -> None:
    rows = [
        {"_id": "x1", "dataset": "hotpotqa", "context": "A text.", "input": "Whose?", "answers": ["his"], "length": 2},
        {"dataset": "gov_report", "context": "A report.", "input": "", "answers": [], "length": 2},
    ]
    found = load_prompts(str(jsonl(tmp_path / "tasks.jsonl", rows)))
    assert found == [Prompt("x1", "hotpotqa", ("A text.\n\nWhose?",)), Prompt("3", "gov_report", ("A report.",))]


def test_speed_bench_leaves_out_placeholders_and_says_how_many(tmp_path: Path, capsys) -> None:
    found = load_prompts(str(parquet(tmp_path / "test.parquet", [MASKED, SPEED, MASKED])))
    assert found == [Prompt("a", "rag", ("One.", "Two."))]
    assert "3 prompts, 2 of them placeholders" in capsys.readouterr().err
    with pytest.raises(DataError, match="2 prompts, 2 of them placeholders"):
        load_prompts(str(parquet(tmp_path / "none.parquet", [MASKED, MASKED])))


@pytest.mark.parametrize(
    "rows, said",
    [
        ([{"turns": ["a"]}, {"turns": []}], r"line 3: \['turns'\]"),
        ([{"context": "c", "input": 5}], r"line 1: \['context', 'input'\]"),
        ([{"prompt": "a"}, "b"], r"line 3: str"),
        ([], "0 prompts"),
    ],
)
def test_a_line_without_prompts_is_named(tmp_path: Path, rows, said) -> None:
    with pytest.raises(DataError, match=said):
        load_prompts(str(jsonl(tmp_path / "bad.jsonl", rows)))


@pytest.mark.parametrize(
    "name, split", [("speed-bench", "qualitative"), ("speed-bench/throughput_8k", "throughput_8k")]
)
def test_speed_bench_comes_from_the_hub(snapshot, name: str, split: str) -> None:
    folder, calls = snapshot
    for one in ("qualitative", "throughput_8k"):
        parquet(folder / one / "test-00000-of-00001.parquet", [SPEED | {"question_id": one}])
    assert [prompt.id for prompt in load_prompts(name)] == [split]
    wanted = {"repo_type": "dataset", "revision": SPEED_BENCH[1], "allow_patterns": f"{split}/test-*.parquet"}
    assert calls == [(SPEED_BENCH[0], wanted)]
    with pytest.raises(DataError, match=r"other/test-\*\.parquet"):
        load_prompts("speed-bench/other")


def test_spec_bench_is_fetched_once_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, asked = jsonl(tmp_path / "there.jsonl", SPEC_BENCH).read_bytes(), []

    def answer(url: str, timeout: float) -> BytesIO:
        asked.append(url)
        if len(asked) == 1:
            raise URLError("no route")
        return BytesIO(content)

    monkeypatch.setattr(data, "urlopen", answer)
    monkeypatch.setattr(data, "SPEC_BENCH_FILE", tmp_path / "data" / "question.jsonl")
    for said in ("no route", "sha256 [0-9a-f]{64}\n"):
        with pytest.raises(DataError, match=rf"spec-bench could not be fetched[\s\S]*{said}"):
            load_prompts("spec-bench")
        assert not data.SPEC_BENCH_FILE.exists()
    monkeypatch.setattr(data, "SPEC_BENCH_SHA256", hashlib.sha256(content).hexdigest())
    assert [load_prompts("spec-bench")[i].id for i in (0, 1)] == ["81", "241"]
    assert len(asked) == 3 and data.SPEC_BENCH_REVISION in asked[0]


def test_categories_are_chosen_and_cut() -> None:
    prompts = [Prompt(str(i), category, ("t",)) for i, category in enumerate(["b", "math", "b", "coding", "math", "b"])]
    ids = {name: [one.id for one in each] for name, each in by_category(prompts).items()}
    assert ids == {"b": ["0", "2", "5"], "math": ["1", "4"], "coding": ["3"]} and list(ids) == ["b", "math", "coding"]
    chosen = by_category(prompts, ["coding", "b"], 2)
    assert [(name, len(each)) for name, each in chosen.items()] == [("coding", 1), ("b", 2)]
    with pytest.raises(ConfigError, match=r"no such category[\s\S]*maths[\s\S]*b, math, coding"):
        by_category(prompts, ["b", "maths"])
