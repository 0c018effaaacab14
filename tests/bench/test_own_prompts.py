"""`--prompts`: one's own prompts, whole and of any lengths."""

import ast
import json
from pathlib import Path

import pytest

from bench.config import Target
from tests.support.programs import run

BASELINE, SELFSPEC = "tests/baseline_benchmark.py", "tests/selfspec_benchmark.py"
TEXTS = ["Call me Ishmael.", "It was the best of times, it was the worst of times", "No"]
SIZES = "--gen_len 12 --dtype float64 --device cpu"


def written(folder: Path, kind: str) -> Path:
    """Write the texts, and return the path of the folder or file."""
    folder.mkdir()
    if kind == "folder":
        for name, text in zip("bca", TEXTS[1:] + TEXTS[:1], strict=True):
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        (folder / "notes.md").write_text("no prompt")
        return folder
    path = folder / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps({"turns": [text, "more"]}) for text in TEXTS), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["folder", "turns"])
def test_prompts_are_taken_whole_from_every_kind_of_file(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """In the order of names, or of lines, no more rows than prompts; the ends of what is continued are printed."""
    prompts = written(tmp_path / "own", kind)
    flags = f"--model {checkpoint} --prompts {prompts} --B 8 {SIZES} --draft_budget 24 --printoutput"
    ended = run(SELFSPEC, flags.split())
    record = ended.record
    ends = [line.partition(": ")[2] for line in ended.lines if line.startswith("prompt ")]
    assert [ast.literal_eval(end) for end in ends] == [text[-32:] for text in TEXTS]
    assert record["config"]["rows"]["prompts"] == str(prompts)
    asked = {"dataset": None, "B": 3, "sequences": 3, "identical_sequences": 3}
    asked |= {"prefix_len": 1 + max(map(len, TEXTS)), "tokens_generated": 3 * 12}
    assert {name: record[name] for name in asked} == asked


def test_chat_puts_prompts_into_the_models_template(chat_checkpoint: Path, tmp_path: Path) -> None:
    prompts, source = written(tmp_path / "own", "turns"), Target(str(chat_checkpoint)).source()
    ended = run(BASELINE, f"--model {chat_checkpoint} --prompts {prompts} --chat {SIZES} --printoutput".split())
    template, tokenizer = source.chat_template(), source.tokenizer()
    ids = [template.encode([{"role": "user", "content": text}]) for text in TEXTS]
    ends = [line.partition(": ")[2] for line in ended.lines if line.startswith("prompt ")]
    assert [ast.literal_eval(end) for end in ends] == [tokenizer.decode(prompt[-32:]) for prompt in ids]
    assert ended.record["prefix_len"] == max(map(len, ids))
    unused = run(
        BASELINE, f"--model {chat_checkpoint} --dataset {prompts.parent} --chat {SIZES} --prefix_len 9".split()
    )
    assert "--chat" in unused.err
