"""A server's rows: costs measured before the first request, prompts in chunks, prefixes that stay."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from bench.session import Session
from common import cli
from engine.graphs import CapturedParts
from engine.parallel.ranks import ALONE
from engine.requests import Request
from engine.sampling.distribution import SamplingParams
from serving.scheduler import Scheduler, open_session
from serving.serve import Serve
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.serving_cases import FLAGS, PLAIN, serving
from tests.support.tiny import decode


def test_rounds_captured_at_the_start_decode_whatever_clients_ask_for(chat_checkpoint, monkeypatch):
    graphs: list[RecordedGraph] = []
    of_plan = Session.of_plan

    def capturing(plan, **given):
        session = of_plan(plan, **given)
        session.runner.graphs = CapturedParts(RecordedGraphs(session.runner.device, graphs), ALONE)
        return session

    monkeypatch.setattr(Session, "of_plan", capturing)
    words = FLAGS.replace("--max_batch 4", "--max_batch 2").split()
    flags = cli.read(Serve, [f"--model={chat_checkpoint}", *words], prog="serving")
    session, controller = open_session(flags.config(), flags.batch)
    decoder, n_captured = Scheduler(session, controller, flags.batch)._decoder, len(graphs)
    for filters in ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"temperature": 2.0, "top_p": 0.3}):
        decode(decoder, Request([1, 2, 3], 9, sampling=SamplingParams(**filters)))
    assert len(graphs) == n_captured > 0 and not any(graph.is_destroyed for graph in graphs)


def test_rows_are_no_longer_than_the_context(chat_checkpoint, capsys):
    with serving(chat_checkpoint, "--gamma 0 --max_length 4000", PLAIN) as server:
        assert server.get("/info").json["max_total_tokens"] == 399
    assert "rows hold 400 tokens" in capsys.readouterr().err


def test_verified_drafts_are_logged(chat_checkpoint, tmp_path, capsys):
    """As many as the answers say; when the file can no longer be written, answers go on."""
    logged, texts = tmp_path / "verified.jsonl", ("abc", "tea for two")

    def lines() -> list[dict[str, Any]]:
        return [*map(json.loads, logged.read_text().splitlines())]

    def is_replaced() -> bool:
        """Put a folder in the place of the file, which the last round may be writing."""
        logged.unlink(missing_ok=True)
        with suppress(FileExistsError):
            logged.mkdir()
        return logged.is_dir()

    with serving(chat_checkpoint, f"--log_prompts --log_verification {logged}") as server:
        with ThreadPoolExecutor() as pool:
            answers = [*pool.map(lambda text: server.generate(text, max_new_tokens=40), texts)]
        counts = [answer["details"]["speculation"] for answer in answers]
        n_accepted = sorted(each["accepted"] for each in counts)
        server.until(lambda: sum(line["accepted"] for line in lines()) == sum(n_accepted), "drafts")
        accepted = Counter(line["request"] for line in lines() if line["accepted"])
        assert sorted(accepted.values()) == n_accepted and n_accepted[0] > 0
        assert len(lines()) <= sum(each["verified"] for each in counts)
        assert all(0 <= line[name] <= 1 for line in lines() for name in ("p", "q"))
        server.until(is_replaced, "a folder")
        assert len(server.ids("abc", max_new_tokens=40)) == 40
    said = capsys.readouterr().err
    requests = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert {request["prompt"].removeprefix("<s>") for request in requests} == {*texts}
    assert accepted.keys() <= {request["id"] for request in requests}
    assert said.count("no draft tokens are logged") == 1


def test_graphs_go_with_the_server(chat_checkpoint, monkeypatch):
    """A communicator would wait for them. On a CPU, rounds are captured under another name than "cpu"."""
    graphs: list[RecordedGraph] = []
    monkeypatch.setattr("bench.session.CudaGraphs", partial(RecordedGraphs, recorded=graphs))
    monkeypatch.setattr("bench.plan.resolve_device", lambda name: "cpu:0")
    monkeypatch.setattr("bench.memory.available_bytes", lambda device: 2**40)
    with serving(chat_checkpoint, "--attention torch") as server:
        server.generate("abc", max_new_tokens=20)
        assert graphs and not all(graph.is_destroyed for graph in graphs)
    assert all(graph.is_destroyed for graph in graphs)
