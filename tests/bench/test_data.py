"""Books and prompt sets become prompts: every format, exact lengths, and errors that carry the numbers."""

import hashlib
import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.error import URLError

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import data
from bench.config import Rows, RunConfig, Sizes, Target
from bench.data import SPEED_BENCH, Prompt, by_category, load_books, load_prompts, make_prompts, resolve_dataset
from bench.plan import resolve
from common.errors import ConfigError, DataError
from models.checkpoints.model_source import ModelSource
from tests.support.tiny import TINY

BOS = 7
BOOKS = ["It was the best of times.\n", "Call me Ishmael.\n", "Mädchen, 你好.\n"]
PG19 = [{"short_book_title": f"Book {i}", "text": book} for i, book in enumerate(BOOKS)]


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def write_books(folder: Path, kind: str) -> Path:
    """Write BOOKS into a folder or a file, and return its path."""
    path = folder if kind.endswith("folder") else folder / f"books.{kind}"
    if kind == "txt folder":
        for name, book in zip("abc", BOOKS, strict=True):
            (folder / f"{name}.txt").write_text(book, encoding="utf-8")
        (folder / "notes.md").write_text("not a book")
    elif kind == "jsonl":
        jsonl(path, [{"title": "t", "text": book} for book in BOOKS])
    elif kind == "parquet folder":
        write_parquet(folder / "test-00000-of-00002.parquet", PG19[:2], row_group_size=1)
        write_parquet(folder / "test-00001-of-00002.parquet", PG19[2:])
    else:
        write_parquet(path, PG19)
    return path


@pytest.mark.parametrize("kind", ["txt folder", "jsonl", "parquet folder", "parquet"])
def test_formats_give_the_same_books(tmp_path, kind):
    written = write_books(tmp_path, kind)
    assert list(load_books(str(written))) == BOOKS
    for file in list(tmp_path.iterdir()):
        file.rename(file.with_suffix(file.suffix.upper()))
    written = written if written.is_dir() else written.with_suffix(written.suffix.upper())
    assert list(load_books(str(written))) == BOOKS, "names in other case"


def test_a_single_txt_file_and_the_default_book_without_a_byte_order_mark(tmp_path, monkeypatch):
    book = tmp_path / "book.txt"
    monkeypatch.setattr(data, "DEFAULT_BOOK", book)
    with pytest.raises(DataError, match=r"python download\.py"):
        load_books("default")
    book.write_bytes(b"\xef\xbb\xbf" + BOOKS[0].encode())
    assert list(load_books("default")) == list(load_books(str(book))) == [BOOKS[0]]


def test_any_model_reads_the_built_in_book_unless_it_is_short(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "DEFAULT_BOOK", tmp_path / "book.txt")
    (tmp_path / "book.txt").write_text("one" * 100)
    for name, n, resolved in (("auto", 100, "default"), ("auto", 101, "pg19"), ("pg19", 1, "pg19"), ("b", 9, "b")):
        assert resolve_dataset(name, ModelSource(str(tmp_path), "pth", TINY, "its name"), n) == resolved
        assert ("too short for 101" in capsys.readouterr().err) == (n == 101)
    assert resolve_dataset("auto", ModelSource(str(tmp_path), "dummy", TINY, "its name"), 1) is None


def test_pg19_is_found_in_the_hub_cache_without_a_network(tmp_path, monkeypatch):
    """huggingface_hub leaves a blob, a commit and a link between them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / f"datasets--{data.PG19_REPOSITORY.replace('/', '--')}"
    blob = write_parquet(repository / "blobs" / "29a5", PG19)
    file = repository / "snapshots" / data.PG19_REVISION / "data" / "test-00000-of-00001-29a5.parquet"
    file.parent.mkdir(parents=True)
    file.symlink_to(blob)
    assert list(load_books("pg19")) == BOOKS


DAMAGED = (
    ("bad.txt", b"\xff\xfe\xfa", "UTF-8"),
    ("bad.jsonl", b'{"text": "fine"}\n\n{"text": \n', "line 3"),
    ("deep.jsonl", b'{"text": "fine"}\n' + b"[" * 300_000 + b"\n", "line 2"),
    ("half.jsonl", b'{"text": "fine"}\n{"text": "broken \\ud83d"}\n', "line 2"),
    ("other.parquet", [{"content": "x"}], "content"),
    ("null.parquet", [{"text": "text"}, {"text": None}], "row 2"),
)


@pytest.mark.parametrize(("name", "content", "complaint"), DAMAGED, ids=[name for name, *_ in DAMAGED])
def test_damaged_files_are_named(tmp_path, name, content, complaint):
    (write_parquet if name.endswith(".parquet") else Path.write_bytes)(tmp_path / name, content)
    with pytest.raises(DataError, match=complaint) as error:
        list(load_books(str(tmp_path / name)))
    assert name in str(error.value)


def prompts_of(books, n_prompts: int, prefix_len: int, bos: list[int]) -> list[list[int]]:
    """Return prompts of a token a character."""
    tokenizer = SimpleNamespace(encode=lambda text, add_bos=True: bos * add_bos + [*map(ord, text)])
    return make_prompts(books, tokenizer, n_prompts=n_prompts, prefix_len=prefix_len)


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(st.lists(st.text("ab", max_size=40), max_size=4), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_prompts_are_the_first_stretch_of_every_book_then_the_second(books, n_prompts, length, has_bos):
    """Behind a BOS that is part of the length, none twice, whatever a text repeats."""
    stretches = [book[at : at + length] for at in range(0, 40, length) for book in books]
    distinct = list(dict.fromkeys(stretch for stretch in stretches if len(stretch) == length))
    bos = [BOS] * has_bos
    if len(distinct) < n_prompts:
        with pytest.raises(DataError, match=f"{len(distinct)} distinct prompts of {length + has_bos} tokens"):
            prompts_of(books, n_prompts, length + has_bos, bos)
    else:
        wanted = [bos + list(map(ord, stretch)) for stretch in distinct[:n_prompts]]
        assert prompts_of(books, n_prompts, length + has_bos, bos) == wanted


SPEC_BENCH = [{"question_id": 81, "category": "writing", "turns": ["Write a letter.", "Shorter."], "reference": ["no"]}]
SPEC_BENCH += [{"question_id": 241, "category": "qa", "turns": ["Who?"]}]
SPEED = {"question_id": "a", "category": "rag", "sub_category": "s", "turns": ["One.", "Two."], "source": "x"}
SPEED |= {"src_id": "7", "difficulty": "easy", "multiturn": True}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
MASKED = SPEED | {"question_id": "b", "turns": [PLACEHOLDER]}


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_spec_bench_keeps_all_turns_and_longbench_asks_behind_its_context(tmp_path: Path) -> None:
    asked = {"_id": "x1", "dataset": "hotpotqa", "context": "A text.", "input": "Whose?", "answers": ["his"]}
    rows = [*SPEC_BENCH, asked, {"dataset": "gov_report", "context": "A report.", "input": ""}]
    found = load_prompts(str(jsonl(tmp_path / "rows.jsonl", rows)))
    assert found[:2] == [Prompt("81", "writing", ("Write a letter.", "Shorter.")), Prompt("241", "qa", ("Who?",))]
    assert found[2:] == [Prompt("x1", "hotpotqa", ("A text.\n\nWhose?",)), Prompt("7", "gov_report", ("A report.",))]


def test_speed_bench_leaves_out_placeholders_and_says_how_many(tmp_path: Path, capsys) -> None:
    found = load_prompts(str(write_parquet(tmp_path / "test.parquet", [MASKED, SPEED, MASKED])))
    assert found == [Prompt("a", "rag", ("One.", "Two."))]
    assert "3 prompts, 2 of them" in capsys.readouterr().err
    with pytest.raises(DataError, match="2 prompts, 2 of them"):
        load_prompts(str(write_parquet(tmp_path / "none.parquet", [MASKED, MASKED])))


@pytest.mark.parametrize(
    "name, split", [("speed-bench", "qualitative"), ("speed-bench/throughput_8k", "throughput_8k")]
)
def test_speed_bench_comes_from_the_hub(tmp_path: Path, monkeypatch, name: str, split: str) -> None:
    monkeypatch.setattr(data, "snapshot_download", download := Mock(return_value=str(tmp_path)))
    for one in ("qualitative", "throughput_8k"):
        write_parquet(tmp_path / one / "test-00000-of-00001.parquet", [SPEED | {"question_id": one}])
    assert [prompt.id for prompt in load_prompts(name)] == [split]
    wanted = {"repo_type": "dataset", "revision": SPEED_BENCH[1], "allow_patterns": f"{split}/test-*.parquet"}
    download.assert_called_once_with(SPEED_BENCH[0], **wanted)
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
        with pytest.raises(DataError, match=said):
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
    with pytest.raises(ConfigError, match=r"(?s)maths.*b, math, coding"):
        by_category(prompts, ["b", "maths"])


@pytest.mark.parametrize("kind", ["folder", "turns.jsonl"])
def test_prompts_are_taken_whole_as_they_are_or_in_the_template(kind: str, chat_checkpoint: Path, tmp_path) -> None:
    """In the order of names, or of lines; of several turns the first."""
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
        write_books(path, "txt folder")
    else:
        jsonl(path, [{"turns": [text, "more"]} for text in BOOKS])
    target = Target(str(chat_checkpoint), device="cpu")
    encode, template = target.source().tokenizer().encode, target.source().chat_template()
    for chat in (False, True):
        plan = resolve(RunConfig(target, sizes=Sizes(B=8, gen_len=5), rows=Rows(prompts=str(path), chat=chat)))
        wanted = [template.encode([{"role": "user", "content": text}]) if chat else encode(text) for text in BOOKS]
        assert plan.prompts == wanted and plan.target.n_rows == len(BOOKS)
