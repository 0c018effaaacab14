"""Records survive kill -9: no whole line is lost, none is there twice, and a torn one is dropped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.provenance import append_record

ROOT = Path(__file__).resolve().parents[1]
N_RECORDS = 400
RESUME = f"""
import sys
from engine.provenance import append_record
path, done = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
for number in range(done, {N_RECORDS}):
    append_record(path, {{"number": number, "text": "x" * 2000}})
"""


def whole_lines(path: Path) -> list[dict]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_resuming_after_kill_9_loses_no_record_and_repeats_none(tmp_path):
    path, rng, kills = tmp_path / "results.jsonl", random.Random(0), 0
    while len(whole_lines(path)) < N_RECORDS:
        command = [sys.executable, "-c", RESUME, str(path), str(len(whole_lines(path)))]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        child.stdout.readline()
        if kills < 4:
            time.sleep(rng.uniform(0.0, 0.02))
            child.kill()
            kills += 1
        child.wait()
        child.stdout.close()
    assert kills and [record["number"] for record in whole_lines(path)] == list(range(N_RECORDS))


@pytest.mark.parametrize("cut", [1, 5, 14])
def test_a_torn_line_is_dropped_and_the_lines_before_it_stay(tmp_path, cut):
    path = tmp_path / "results.jsonl"
    append_record(str(path), {"a": 1})
    path.write_bytes(path.read_bytes() + b'{"b": 2, "c": 3}'[:cut])
    append_record(str(path), {"d": 4})
    assert path.read_text() == '{"a": 1}\n{"d": 4}\n'


def test_a_whole_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}')
    append_record(str(path), {"d": 4})
    assert path.read_text() == '{"a": 1}\n{"d": 4}\n'
