"""reproduce/serve_load.py: the requests that it sends, and the figures that it makes of the answers."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from common import cli
from common.errors import ConfigError
from reproduce import serve_load
from reproduce.serve_load import Answer, Endpoint, Flags, Phase, failed, load, summary
from tests.support.programs import FORK, run
from tests.support.serving_cases import FLAGS, Served


def counts(*numbers: int) -> dict[str, int]:
    return dict(zip(("prompt_n", "cache_n", "predicted_n", "rounds", "drafted", "accepted"), numbers, strict=True))


COUNTERS = {f"foretoken_{name}_total": n for name, n in (("decode_tokens", 14.0), ("round_seconds", 2.0))}
COUNTERS |= {"foretoken_between_seconds_total": 0.5}
LONG = Answer(1.0, [2.0, 4.0, 5.0], 10, "long", counts(6, 2, 10, 4, 12, 5))
BRIEF = Answer(0.0, [4.0], 1, "brief", counts(3, 0, 1, 0, 0, 0))
LATE = Answer(3.0, [4.0, 4.5], 3, "late", counts(2, 9, 3, 1, 3, 1))
LOST = Answer(2.0, [3.0], 0, "", {}, "ReadError: gone")


def test_rates_and_percentiles_are_of_all_phases_requests():
    found = summary([Phase([LONG, BRIEF], 6.0, COUNTERS), Phase([LATE, LOST], 2.0, {})])
    assert (found["requests"], found["errors"], found["output_tokens"], found["seconds"]) == (4, 1, 14, 8.0)
    assert found["output_tokens_per_second"] == 14 / 8
    assert found["ttft_ms_p50"] == 1000 and found["ttft_ms_p99"] == pytest.approx(3940)  # of 1, 1 and 4 s
    assert found["tpot_ms_p50"] == pytest.approx(1e3 * (3 / 9 + 0.5 / 2) / 2)  # the brief one has none
    assert (found["prompt_tokens"], found["reused_prompt_tokens"]) == (22, 11)
    assert found["accepted_share"] == 6 / 15 and found["tokens_per_round"] == 11 / 5
    # A request's first token comes with its prefill, not out of a round.
    assert found["decode_tokens_per_second"] == 11 / 2.0
    assert found["between_share"] == 0.2
    assert summary([Phase([BRIEF._replace(counts={"prompt_n": 3})], 1.0, {})])["prompt_tokens"] is None


@contextmanager
def forked(command: list[str], **how: Any) -> Iterator[Any]:
    """Stand in for `subprocess.Popen`: a new process would import PyTorch anew."""
    process = FORK.Process(target=run, args=(command[1], command[2:]))
    process.start()
    yield SimpleNamespace(poll=lambda: process.exitcode, terminate=process.terminate)
    process.join()


def test_a_load_is_recorded_with_what_rounds_did(chat_checkpoint, served: Served, tmp_path, monkeypatch, capsys):
    """Speculation answers as plain rounds do, and as another server with the same model: arithmetic is exact."""
    monkeypatch.setattr(serve_load, "subprocess", SimpleNamespace(Popen=forked, DEVNULL=None))
    book, out = tmp_path / "book.txt", tmp_path / "out.jsonl"
    book.write_text("".join(chr(33 + (7 * i + i // 90) % 90) for i in range(1200)))  # no stretch is like another
    given = iter(f"--model {chat_checkpoint} {FLAGS} --device cpu".split())
    server = [f"{name.removeprefix('--')}={value}" for name, value in zip(given, given, strict=True)]
    words = f"--dataset {book} --shortest 20 --longest 60 --clients 1 3 --requests 2 --repeats 1 --gen_len 12"
    words += f" --peers other={served.url} --output {out}"
    serve_load.main(cli.read(Flags, [*words.split(), "--server", *server], "serve_load.py"))
    said, record = capsys.readouterr().out, json.loads(out.read_text())
    assert json.loads(said.splitlines()[-1]) == record and "git_commit" in record
    rows = {(row["clients"], row["mode"]): row for row in record["rows"]}
    assert list(rows) == [(n, mode) for n in (1, 3) for mode in ("plain", "speculation", "other")]
    for (n, mode), row in rows.items():
        assert row["requests"] == row["identical_answers"] == max(2, n) and row["errors"] == 0
        assert row["output_tokens"] == rows[n, "plain"]["output_tokens"] > 3
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        assert row["reused_prompt_tokens"] <= 3 * row["requests"]  # little more than the BOS of each
        if mode == "plain":
            assert row["tokens_per_round"] == 1 and row["accepted_share"] is None and row["speedup"] == 1
    spoken = rows[3, "speculation"]
    assert spoken["tokens_per_round"] > 1 and 0 < spoken["accepted_share"] <= 1 and 0 < spoken["between_share"] < 1
    assert "over plain" in said


def test_requests_to_a_server_that_is_not_there_count_as_failed():
    phase = asyncio.run(load(Endpoint("http://127.0.0.1:9", {}), ["a", "b"], 2))
    assert "2 of 2: ConnectError" in str(failed(phase.answers)[0]) and failed([LONG, BRIEF]) == []


@pytest.mark.parametrize("peer", ["http://127.0.0.1:9", "plain=http://127.0.0.1:9", "other=http://127.0.0.1:9"])
def test_a_peer_has_a_name_of_its_own_and_answers(peer):
    with pytest.raises(ConfigError, match=re.escape(peer.rpartition("=")[2])):
        flags = Flags(peers=(peer,))
        flags.check()
        flags.endpoints("http://127.0.0.1:8")
