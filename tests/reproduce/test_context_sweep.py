"""context_sweep.py: every drafter on one text; markov_table.py: what one of them drafts from."""

import json
from pathlib import Path

import pytest

from tests.support.programs import run

HOW = "--B 2 --gen_len 24 --device cpu --dtype float64 --gamma 2"
SIZES = f"{HOW} --contexts 60 --num_prompts 2"


def test_every_drafter_decodes_the_same_tokens(call, tmp_path: Path):
    drafters = ["oracle@1", "suffix+cache+self", "cache", "ngram", "ngram@heuristic", "self:snapkv@confidence"]
    flags = f"{SIZES} --draft_dtype same --text_match 2 --repeats 2 --output {tmp_path / 'drafters.jsonl'}"
    flags += " --confidence_threshold auto"
    ended = call("reproduce/context_sweep.py", f"{flags} --drafters {' '.join(drafters)}")
    rows = {row["drafter"]: row for row in ended.record["rows"]}
    assert list(rows) == drafters and ended.record["repeats"] == 2
    for row in rows.values():
        assert row["identical_sequences"] == row["sequences"] == 2
        assert row["drafting_ms"] > 0 and row["gamma"] == (1 if row["drafter"] == "oracle@1" else 2)
    assert rows["oracle@1"]["acceptance_rate"] == 1.0 > rows["cache"]["acceptance_rate"], "it knows nothing of the last"
    assert rows["ngram@heuristic"]["acceptance_rate"] > rows["ngram"]["acceptance_rate"], "it drafts less of what fails"
    assert all(name in ended.out for name in drafters) and "2 of 2" in ended.out


def test_whole_prompts_are_compared_together(call, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "again " * n}) + "\n" for n in (4, 9, 6)))
    sizes = "--B 2 --gen_len 12 --device cpu --dtype float64 --gamma 2 --contexts 50"
    ended = call("reproduce/context_sweep.py", f"{sizes} --num_prompts 2 --prompts {prompts} --drafters suffix")
    row, *others = ended.record["rows"]
    assert not others and row["identical_sequences"] == row["sequences"] == 3 and ended.record["text"] == str(prompts)
    assert "--contexts, --num_prompts without effect" in ended.err


def test_drafters_are_compared_by_context(call, tmp_path: Path):
    """Sums over batches of unlike size; each drafter has its options, and a small cache bounds that drafter alone."""
    flags = "--device cpu --dtype float64 --B 2 --num_prompts 3 --gen_len 12 --draft_dtype same --draft_budget 7"
    flags += f" --contexts 40 60 --auto_drafts suffix --gamma 2 --output {tmp_path / 'lengths.jsonl'}"
    ended = call("reproduce/context_sweep.py", f"{flags} --repeats 2 --drafters oracle self self@auto ngram@6")
    records = [json.loads(line) for line in (tmp_path / "lengths.jsonl").read_text().splitlines()]
    assert [record["prefix_len"] for record in records] == [40, 60] and ended.record == records[-1]
    for record in records:
        rows = {row["drafter"]: row for row in record["rows"]}
        assert [row["gamma"] for row in rows.values()] == [2, 2, "auto", 6]
        assert [row.get("auto_drafts") for row in rows.values()] == [None, None, ["suffix"], None]
        assert [row["draft_budget"] for row in rows.values()] == [None, 7, 7, None]
        assert rows["oracle"]["acceptance_rate"] == 1 and rows["oracle"]["mean_accepted_length"] > 2
        for row in rows.values():
            assert row["identical_sequences"] == row["sequences"] == 3 and row["emitted"] == 3 * 11
            assert row["drafting_ms"] > 0 and row["baseline_step_ms"] > 0 and row["speedup"] > 0


@pytest.mark.parametrize(
    "name",
    ["self:snapkv=full", "eagle=full", "ngram:nothing", "ngram:snapkv", "nothing+self", "self@0", "suffix+ngram"],
)
def test_drafters_that_do_not_exist_are_refused(call, name: str):
    assert name in call("reproduce/context_sweep.py", f"{SIZES} --drafters {name}").refusal


def test_samples_are_of_one_text_by_default(call):
    """The oracle, which drafts plain decoding's text, is always right; repeats make no rate more certain."""
    flags = f"{SIZES} --temperature 1 --seed 2 --drafters oracle self:snapkv --draft_budget 40 --repeats"
    ended, again = (call("reproduce/context_sweep.py", f"{flags} {n}") for n in (1, 3))
    oracle, snapkv = ended.record["rows"]
    assert ended.record["verification"] == "coupled"
    assert oracle["identical_sequences"] == snapkv["identical_sequences"] == 2
    assert oracle["acceptance_rate"] == 1 > snapkv["acceptance_rate"]
    assert oracle["acceptance_standard_error"] == 0 < snapkv["acceptance_standard_error"]
    assert again.record["rows"][1]["acceptance_standard_error"] == snapkv["acceptance_standard_error"]


def test_a_table_has_what_stands_behind_what_is_skipped(checkpoint: Path, tmp_path: Path):
    text, table = "in and out " * 18, tmp_path / "table.json"
    (tmp_path / "book.txt").write_text("skipped " + text)
    flags = f"--model {checkpoint} --dataset {tmp_path / 'book.txt'} --skip 8 --max_ngram 4 --markov_table {table}"
    assert run("reproduce/markov_table.py", flags.split()).code == 0
    grams = {text[i - n : i + 1] for n in range(1, 5) for i in range(n, len(text))}
    assert len(json.loads(table.read_text())["grams"]) == len(grams)


def test_a_file_of_the_cache_is_a_table(call, tmp_path: Path):
    file = tmp_path / "cache.json"
    for draft in (f"cache --ngram_cache {file}", f"markov --markov_table {file}"):
        record = call("tests/selfspec_benchmark.py", f"{HOW} --prefix_len 60 --draft {draft}").record
        assert record["identical_sequences"] == 2 and record["draft"] == draft.split()[0]
    assert record["acceptance_rate"] > 0.5 and record["config"]["draft"].get("markov_table", str(file)) == str(file)
