"""foretoken.py compare: where tokens came from, what is drawn of two passes, and what is said of them."""

import io
import json
import os
import pty
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench import RunConfig, Session
from bench.config import Sizes, Target
from engine.drafters.self_speculation import SelfConfig
from engine.requests import Outcome, Progress
from engine.stats import acceptance_text
from kv_cache.streaming import Streaming
from terminal.compare import first_difference
from terminal.panes import Panes, Token, Track, printable
from tests.support.programs import ROOT, run

COMPARE = "foretoken.py compare"
TEXTS = ["Call me Ishmael & co.", "It was the best of times, it was the worst of times", "No"]
SIZES = "--gen_len 24 --dtype float64 --device cpu --draft_budget 16"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    return path


def test_origins_are_those_of_the_rounds(checkpoint: Path) -> None:
    """Three prompts in two rows, each of which some token or the limit ends; rows that accept different numbers."""
    draft = SelfConfig(gamma=3, policy=Streaming(16), draft_dtype="same")
    target = Target(model=str(checkpoint), device="cpu", dtype="float64")
    session = Session.open(RunConfig(target=target, sizes=Sizes(B=2, gen_len=40), draft=draft), TEXTS)
    assert session.tokenizer is not None
    recorder, rounds, drawn = Progress(), defaultdict[int, list[tuple[Outcome, int]]](list), list[float]()
    recorder.decoded = lambda request, outcome, n_kept: rounds[request.index].append((outcome, n_kept))
    track = Track(recorder, session.tokenizer, 3, lambda: drawn.append(track.seconds))
    out = session.generate(session.drafter(), progress=track)
    for index, (row, tokens) in enumerate(zip(track.rows, out.tokens, strict=True)):
        expected = [False]
        for outcome, n_kept in rounds[index]:
            assert len(outcome.drafts) == 3
            block = [place < len(outcome.block) - 1 for place in range(len(outcome.block))]
            expected += block[:n_kept]
        assert [token.drafted for token in row] == expected
        assert "".join(token.text for token in row) == printable(session.tokenizer.decode(tokens))
        assert [token.seconds for token in row] == sorted(token.seconds for token in row)
    accepted = [sum(token.drafted for token in row) for row in track.rows]
    assert accepted == [row.accepted for row in out.stats.rows] and len(set(accepted)) > 1 and min(accepted) > 0
    assert track.seconds >= sum(one.seconds for one in out.stats.rounds) * 0.9 and drawn == sorted(drawn)


def frame(rows: list[list[Token]], seconds: float, n_plain: int = 3, **how: Any) -> list[tuple[str, str]]:
    """Lines of both columns, of a terminal of 80 x 24 characters, while the second pass runs."""
    console = Console(width=80, file=io.StringIO())
    panes = Panes(["prompt"] * len(rows), console)
    tokenizer = SimpleNamespace(decode=lambda ids: "")
    for name, own in (("baseline", [row[:n_plain] for row in rows]), ("speculation", rows)):
        panes.tracks[name] = Track(Progress(), tokenizer, len(rows))
        panes.tracks[name].rows, panes.tracks[name].seconds = own, seconds
    panes.tracks["speculation"].rejected = ["nope" for _ in rows]
    console.print(panes.frame(80, 24, **how))
    lines = console.file.getvalue().splitlines()
    return [(left.strip(), right.strip()) for left, _, right in (line.partition("│") for line in lines)]


def test_the_first_pass_is_shown_again_at_its_own_pace() -> None:
    rows = [[Token(f" {name}{i}", i % 2 == 1, float(i)) for i in range(6)] for name in "ab"]
    lines = frame(rows, 2.5)
    assert ("a0 a1 a2", "a0 a1 a2nope") in lines and ("b0 b1 b2", "b0 b1 b2nope") in lines
    assert lines[0] == ("plain decoding", "speculation")
    # Four tokens after the prompts' own: of a pass that took 2 s, and of one that goes on.
    assert lines[1] == ("4 tokens, 2.0 tokens/s", "4 tokens, 1.6 tokens/s")
    assert ("a0", "a0nope") in frame(rows, 0.5)
    assert ("a0 a1 a2", "a0 a1 a2 a3 a4 a5") in frame(rows, 2.5, is_running=False)


def test_the_first_difference_is_found() -> None:
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert first_difference([[1, 2], [3, 4, 5], [0]], [[1, 2], [3, 4, 6], [1]]) == {"row": 1, "token": 2}
    assert first_difference([[1, 2]], [[1]]) == {"row": 0, "token": 1}


def test_what_is_piped_is_plain_lines_and_a_record(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    ended = run(COMPARE, f"{checkpoint} --prompts {prompts} {SIZES} --output {tmp_path / 'out.jsonl'}".split())
    record = ended.record
    assert "\x1b" not in ended.out + ended.err and "has no chat template" in ended.err
    assert re.search(r"identical rows +- +3 of 3$", ended.out, re.MULTILINE)
    assert acceptance_text(record) in ended.out and "tokens per second" in ended.out
    assert record["acceptance_standard_error"] is None, "three rows say little of an error"
    asked = {"benchmark": "compare", "identical_sequences": 3, "first_difference": None, "prompts": str(prompts)}
    assert {name: record[name] for name in asked} == asked and record["prefix_len"] == 1 + max(map(len, TEXTS))
    assert json.loads((tmp_path / "out.jsonl").read_text()) == record


def test_samples_are_those_of_plain_decoding_by_default(checkpoint: Path, prompts: Path) -> None:
    """With every draft, so that drafts are compared on one text."""
    flags = f"{checkpoint} {{}} --prompts {prompts} --gen_len 12 --dtype float64 --device cpu --temperature 1 --seed 3"
    records = [run(COMPARE, flags.format(draft).split()).record for draft in ("self --draft_budget 16", "ngram")]
    assert [(one["verification"], one["identical_sequences"]) for one in records] == [("coupled", 3)] * 2
    assert len({one["tokens_sha256"] for one in records}) == 1
    assert len({one["acceptance_rate"] for one in records}) == 2, "the drafts are meant to differ"


@pytest.mark.slow
def test_a_terminal_sees_both_columns_grow(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"compare {checkpoint} --prompts {prompts} --gen_len 60 --device cpu --draft_budget 16".split()
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "100"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    parts = list[bytes]()
    command = [sys.executable, str(ROOT / "foretoken.py"), *words]
    code = pty.spawn(command, lambda terminal: parts.append(os.read(terminal, 1 << 16)) or parts[-1])
    sent = b"".join(parts).decode(errors="replace").replace("\r\n", "\n")
    assert code == 0, sent
    assert len({*re.findall(r"\d+ tokens\b", sent)}) > 4 and "\x1b[1A" in sent and "\x1b[32m" in sent
    assert "3 of 3" in sent and '{"benchmark"' not in sent, "records are for programs"
