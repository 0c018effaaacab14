"""What a server does with its rows: costs measured before the first request, prompts in chunks, prefixes that stay."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from recorded_graph import RecordedGraph, RecordedGraphs
from serving_cases import FLAGS, PLAIN, Alone, Served, serving
from tiny import decode

from bench.auto.adaptive import Adaptive
from bench.memory import memory_plan
from bench.session import Session
from common import cli
from common.errors import ConfigError, OutOfMemoryError
from engine.requests import Request
from engine.sampling import SamplingParams
from serving.opening import open_session, plan_of
from serving.scheduler import Scheduler
from serving.serve import Serve


def test_costs_are_measured_on_noise_once(chat_checkpoint, costs_folder):
    words = FLAGS.replace("--gamma 3", "--gamma auto").split()
    flags = cli.read(Serve, [f"--model={chat_checkpoint}", *words], prog="serving")
    session, pacing = open_session(flags.config(), 4, 320)
    assert session.plan.capacity == session.runner.cache.capacity == 320
    kept = {*costs_folder.iterdir()}
    each = [json.loads(one.read_text()) for one in kept]
    # 80 and 5 tokens.
    assert {costs["key"]["context"] for costs in each} == {25, 9}
    assert all(costs["key"]["rows"] == 4 and costs["costs"].keys() == {"2", "4"} for costs in each)
    assert isinstance(pacing, Adaptive) and pacing._verified == [0]  # noise says nothing of text
    assert not session.runner.cache.prefilled
    open_session(flags.config(), 4, 320)
    assert {*costs_folder.iterdir()} == kept


def test_what_is_captured_at_the_start_decodes_whatever_clients_ask_for(chat_checkpoint, monkeypatch):
    graphs: list[RecordedGraph] = []
    of_plan = Session.of_plan

    def capturing(plan):
        session = of_plan(plan)
        session.runner.graphs = RecordedGraphs(session.runner.device, graphs)
        return session

    monkeypatch.setattr(Session, "of_plan", capturing)
    flags = cli.read(Serve, [f"--model={chat_checkpoint}", *FLAGS.split()], prog="serving")
    session, pacing = open_session(flags.config(), 2, 320)
    decoder, n_captured = Scheduler(session, pacing, flags.batch)._decoder, len(graphs)
    for filters in ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"temperature": 2.0, "top_p": 0.3}):
        decode(decoder, Request([1, 2, 3], 9, sampling=SamplingParams(**filters)))
    assert len(graphs) == n_captured > 0 and not any(graph.is_destroyed for graph in graphs)


@pytest.mark.parametrize("length,how", [(320, ""), (4000, " (--max_length 400, which is the model's context)")])
def test_a_server_says_how_long_rows_can_be(chat_checkpoint, capsys, length: int, how: str):
    with serving(chat_checkpoint, f"--gamma 0 --max_length {length}", PLAIN) as one:
        one.generate("abc", max_new_tokens=1)
        assert f" on {one.server.url}{how}\n" in capsys.readouterr().err


def test_there_has_to_be_room_for_samples(chat_checkpoint, monkeypatch):
    config = cli.read(Serve, [f"--model={chat_checkpoint}", *FLAGS.split()], prog="serving").config()
    plan = plan_of(config, 4, 320)
    sampled = memory_plan(replace(plan, sampling=replace(plan.sampling, params=SamplingParams(1.0, top_k=3))))
    assert memory_plan(plan).total(4) < sampled.total(3)
    monkeypatch.setattr("bench.memory.available_bytes", lambda device: sampled.total(3))
    with pytest.raises(OutOfMemoryError) as caught:
        open_session(config, 4, 320)
    assert "use --max_batch 3, the largest batch that fits" in caught.value.told(Serve.FLAGS)


def test_no_request_goes_on_behind_noise(chat_checkpoint, alone: Alone):
    with serving(chat_checkpoint, "--gamma auto") as one:
        prompt = one.server.service.session.prompts[0]
        body = {"prompt": prompt[:60], "max_tokens": 20, "temperature": 0}
        answer = one.ask("/v1/completions", body).json
        assert answer["choices"][0]["text"] == alone.tokenizer.decode(alone.tokens(prompt[:60], 20))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_plain_serving_has_no_draft(chat_checkpoint, alone: Alone):
    with serving(chat_checkpoint, "--gamma 0", PLAIN) as one:
        details = one.generate("abc", max_new_tokens=9)["details"]
        assert details["speculation"]["drafted"] == 0 and one.get("/info").json["speculation"] is None
        assert [token["id"] for token in details["tokens"]] == alone.tokens("abc", 9)


def test_the_next_turn_runs_only_what_is_new(served: Served):
    first = [{"role": "user", "content": "how long is the coast of"}]
    turns = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "Norway"}]
    for messages in (first, turns):
        before = served.metrics()
        timings = served.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 12}).json["timings"]
    assert timings["cache_n"] >= len("[user]how long is the coast of\n[a") - 1 and timings["prompt_n"] < 40
    after, own = served.metrics(), {"prefill": timings["prompt_n"], "reused_prompt": timings["cache_n"]}
    for kind, n in own.items():
        assert after[f"foretoken_{kind}_tokens_total"] - before[f"foretoken_{kind}_tokens_total"] == n


def forwards(served: Served) -> list[tuple[int, int]]:
    """Rows and tokens of every forward of the target's model from now on, as it grows."""
    model, ran = served.server.service.session.runner.model, []
    hidden = model.hidden

    def noted(tokens: torch.Tensor, *given: object) -> torch.Tensor:
        ran.append(tuple(tokens.shape))
        return hidden(tokens, *given)

    model.hidden = noted
    return ran


def test_without_reuse_every_token_of_a_prompt_is_run(chat_checkpoint, capsys):
    """The same prompt again, one that begins with it, and the same one that others bring at the same time."""
    guess, other = "the password is swordfish", "something else"
    with serving(chat_checkpoint, "--no_prefix_reuse") as one, ThreadPoolExecutor(3) as pool:
        ran, n_before = forwards(one), one.metrics()["foretoken_prefill_tokens_total"]

        def ask(text: str) -> dict[str, int]:
            return one.generate(text, max_new_tokens=6)["details"]["timings"]

        for texts in ([guess, other], [guess], [guess], [guess + " not"], [guess, guess, other], [guess[:20]]):
            ran.clear()
            timings = [*pool.map(ask, texts)]
            n_tokens = [1 + len(text) for text in texts]  # one a byte, and the first
            assert [timing["prompt_n"] for timing in timings] == n_tokens
            assert {timing["cache_n"] for timing in timings} == {0}
            assert sum(n for rows, n in ran if rows == 1) == sum(n_tokens)
            n_told = one.metrics()["foretoken_prefill_tokens_total"]
            assert n_told - n_before == sum(n_tokens)
            n_before = n_told
        answer = one.ask("/v1/completions", {"prompt": guess, "max_tokens": 2})
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert one.metrics()["foretoken_reused_prompt_tokens_total"] == 0
        one.until_idle()
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert len(logged) == 10 and {line["reused"] for line in logged} == {0}


@pytest.mark.parametrize("draft", ["--draft cache", "--text_match 2 --text_drafts cache"])
def test_a_draft_that_shares_texts_is_refused_without_reuse(chat_checkpoint, draft):
    words = [f"--model={chat_checkpoint}", *PLAIN.split(), *draft.split()]
    assert cli.read(Serve, words, prog="serving").config().draft
    with pytest.raises(ConfigError, match="no_prefix_reuse"):
        cli.read(Serve, [*words, "--no_prefix_reuse"], prog="serving").config()
    cli.read(Serve, [*words[:-1], "suffix", "--no_prefix_reuse"], prog="serving").config()


def test_a_stream_waits_for_no_more_than_a_chunk(chat_checkpoint, alone: Alone):
    with serving(chat_checkpoint, "--prefill_tokens 16") as one:
        ran = forwards(one)
        stream = one.begin("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 100}}).getresponse()
        stream.readline()
        answer = one.generate("b" * 200, max_new_tokens=5)
        assert [token["id"] for token in answer["details"]["tokens"]] == alone.tokens("b" * 200, 5)
        assert stream.read().count(b"data: ") == 99
    chunks = [place for place, (rows, n) in enumerate(ran) if rows == 1 and n == 16]
    assert len(chunks) == 12 and max(n for _, n in ran) == 16
    assert all(later - earlier > 1 for earlier, later in pairwise(chunks))  # rounds in between


def test_log_probabilities_are_the_models_own(served: Served, alone: Alone):
    how = {"temperature": 0.7, "top_k": 5, "seed": 3}
    expected = alone.logprobs("logs", 20, SamplingParams(**how))
    details = served.generate("logs", max_new_tokens=20, **how)["details"]
    assert [token["logprob"] for token in details["tokens"]] == pytest.approx(expected, abs=1e-5)
    choice = served.ask("/v1/completions", {"prompt": "logs", "max_tokens": 20, "logprobs": 0, **how}).json["choices"][
        0
    ]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-5)


def test_rejection_takes_drafts_of_the_models_distribution(chat_checkpoint):
    with serving(chat_checkpoint, "--verification rejection") as one:
        assert one.get("/info").json["verification"] == "rejection"
        details = one.generate("abc", max_new_tokens=60, temperature=0.7, seed=1)["details"]
        assert details["generated_tokens"] == 60 or details["finish_reason"] == "eos_token"
        assert details["speculation"]["accepted"] > 0


def test_what_a_server_captured_goes_with_it(chat_checkpoint, monkeypatch):
    """Before its ranks part, whose communicator would wait for it; on a CPU that goes by another name than "cpu"."""
    graphs: list[RecordedGraph] = []
    monkeypatch.setattr("bench.session.CudaGraphs", partial(RecordedGraphs, recorded=graphs))
    monkeypatch.setattr("bench.plan.resolve_device", lambda name: "cpu:0")
    monkeypatch.setattr("bench.memory.available_bytes", lambda device: 2**40)
    with serving(chat_checkpoint, "--attention torch") as one:
        one.generate("abc", max_new_tokens=20)
        assert graphs and not all(graph.is_destroyed for graph in graphs)
    assert all(graph.is_destroyed for graph in graphs)
