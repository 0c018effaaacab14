"""A server's rows: costs measured before the first request, prompts in chunks, prefixes that stay."""

from functools import partial
from itertools import pairwise

import torch

from bench.auto.adaptive import Adaptive
from bench.session import Session
from common import cli
from engine.graphs import CapturedParts
from engine.parallel.ranks import ALONE
from engine.requests import Request
from engine.sampling.distribution import SamplingParams
from serving.scheduler import Scheduler, open_session
from serving.serve import Serve
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.serving_cases import FLAGS, PLAIN, Alone, Served, serving
from tests.support.tiny import decode


def serve_flags(checkpoint, words: str) -> Serve:
    return cli.read(Serve, [f"--model={checkpoint}", *words.split()], prog="serving")


def test_costs_are_measured_on_noise(chat_checkpoint):
    flags = serve_flags(chat_checkpoint, FLAGS.replace("--gamma 3", "--gamma auto"))
    session, controller = open_session(flags.config(), flags.batch)
    assert session.plan.capacity == session.runner.cache.capacity == 320 and session.prompts == []
    assert isinstance(controller, Adaptive) and (controller._contexts, controller._rows) == ([5, 80], [2, 4])
    assert controller._arms[0].verified == 0  # noise says nothing of text
    assert not session.runner.cache.prefilled  # and no request goes on after it


def test_rounds_captured_at_the_start_decode_whatever_clients_ask_for(chat_checkpoint, monkeypatch):
    graphs: list[RecordedGraph] = []
    of_plan = Session.of_plan

    def capturing(plan, **given):
        session = of_plan(plan, **given)
        session.runner.graphs = CapturedParts(RecordedGraphs(session.runner.device, graphs), ALONE)
        return session

    monkeypatch.setattr(Session, "of_plan", capturing)
    flags = serve_flags(chat_checkpoint, FLAGS.replace("--max_batch 4", "--max_batch 2"))
    session, controller = open_session(flags.config(), flags.batch)
    decoder, n_captured = Scheduler(session, controller, flags.batch)._decoder, len(graphs)
    for filters in ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"temperature": 2.0, "top_p": 0.3}):
        decode(decoder, Request([1, 2, 3], 9, sampling=SamplingParams(**filters)))
    assert len(graphs) == n_captured > 0 and not any(graph.is_destroyed for graph in graphs)


def test_rows_are_no_longer_than_the_context(chat_checkpoint, capsys):
    with serving(chat_checkpoint, "--gamma 0 --max_length 4000", PLAIN) as server:
        assert server.get("/info").json["max_total_tokens"] == 399
    assert "--max_length 400" in capsys.readouterr().err


def test_the_next_turn_runs_only_what_is_new(served: Served):
    first = [{"role": "user", "content": "how long is the coast of"}]
    turns = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "Norway"}]
    for messages in (first, turns):
        before = served.metrics()
        timings = served.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 12}).json["timings"]
    assert timings["cache_n"] >= len("[user]how long is the coast of\n[a") - 1 and timings["prompt_n"] < 40
    after = served.metrics()
    for kind, n in {"prefill": timings["prompt_n"], "reused_prompt": timings["cache_n"]}.items():
        assert after[f"foretoken_{kind}_tokens_total"] - before[f"foretoken_{kind}_tokens_total"] == n


def forwards(served: Served) -> list[tuple[int, int]]:
    """Return a list that grows by the rows and tokens of each forward of the target."""
    model, ran = served.server.service.session.runner.model, []
    hidden = model.hidden

    def noted(tokens: torch.Tensor, *given: object) -> torch.Tensor:
        ran.append(tuple(tokens.shape))
        return hidden(tokens, *given)

    model.hidden = noted
    return ran


def test_a_stream_waits_for_no_more_than_a_chunk(chat_checkpoint, alone: Alone):
    with serving(chat_checkpoint, "--prefill_tokens 16") as server:
        ran = forwards(server)
        stream = server.begin("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 100}}).getresponse()
        stream.readline()
        answer = server.generate("b" * 200, max_new_tokens=5)
        assert [token["id"] for token in answer["details"]["tokens"]] == alone.tokens("b" * 200, 5)
        assert stream.read().count(b"data: ") == 99
    chunks = [place for place, (rows, n) in enumerate(ran) if rows == 1 and n == 16]
    assert len(chunks) == 12 and max(n for _, n in ran) == 16
    assert all(later - earlier > 1 for earlier, later in pairwise(chunks))  # rounds in between


def test_rejection_accepts_drafts(chat_checkpoint):
    with serving(chat_checkpoint, "--verification rejection") as server:
        assert server.get("/info").json["verification"] == "rejection"
        details = server.generate("abc", max_new_tokens=60, temperature=0.7, seed=1)["details"]
        assert details["generated_tokens"] == 60 or details["finish_reason"] == "eos_token"
        assert details["speculation"]["accepted"] > 0


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
