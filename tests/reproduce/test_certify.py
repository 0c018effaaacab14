"""reproduce/certify.py, as a user runs it."""

import json

import pytest
import torch

from engine import ModelRunner
from kv_cache import WriteThroughKVCache

SIZES = "--B 3 --tokens 100 --prefix_len 60 --calibration_positions 30 --gamma 3 --streamingllm_budget 16"


@pytest.fixture
def certified(call, tmp_path, monkeypatch):
    """Runs the script in this process with more flags."""
    monkeypatch.chdir(tmp_path)
    return lambda more: call("reproduce/certify.py", f"{SIZES} --output records.jsonl {more}")


def test_bfloat16_is_certified_beside_earlier_records(certified, tmp_path):
    (tmp_path / "records.jsonl").write_text('{"an": "earlier record"}\n')
    ended = certified("--dtype bfloat16")
    assert any("certificate" in line and line.endswith("holds") for line in ended.lines)
    record = ended.record
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[1]) == record
    expected = {"B": 3, "rows": 3, "prefix_len": 60, "gen_len": 34, "tokens": 102, "gamma": 3, "draft_budget": 16}
    expected |= {"dtype": "bfloat16", "device": "cpu", "verification": "greedy", "temperature": 0.0, "seed": None}
    expected |= {"flips_outside_near_ties": 0, "holds": True, "shortest_prompt": 50, "calibration_positions": 3 * 32}
    assert record.items() >= expected.items()
    assert 0 < record["eps"] < 0.5
    assert record["flips"] <= record["near_ties"] < record["tokens"] / 2
    assert 0 < record["acceptance_rate"] < 1
    assert 0 < record["distinct_4gram_fraction"] <= 1
    assert {"git_commit", "torch_version", "machine", "calibration_flips", "largest_gap_at_flip"} <= set(record)


class Faulty(ModelRunner):
    """A runner whose verifications are off by up to 3; forwards of one token are right."""

    def step(self, tokens, positions, cache=None):
        logits = super().step(tokens, positions, cache)
        return logits + 6 * torch.rand_like(logits) - 3 if isinstance(cache, WriteThroughKVCache) else logits


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_certificate_that_fails_ends_with_code_1(certified, tmp_path, monkeypatch, temperature):
    """The fault is in speculation alone; the record of the failure is kept."""
    monkeypatch.setattr("bench.session.ModelRunner", Faulty)
    ended = certified(f"--dtype bfloat16 --temperature {temperature}")
    record = json.loads(ended.out.splitlines()[-1])
    assert ended.code == 1 and any(line.endswith("FAILS") for line in ended.lines)
    assert record["holds"] is False and record["flips_outside_near_ties"] > 0
    assert json.loads((tmp_path / "records.jsonl").read_text()) == record
