"""Many requests at once: each gets its tokens, whoever leaves frees a row, and metrics and the log add up."""

import errno
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from engine.requests import Request
from serving.answers import Answer
from serving.scheduler import Update
from tests.support.serving_cases import STREAM, TGI, V1, Alone, Served, serving, slow

LONG = {"max_new_tokens": 200}


def n_rows(served: Served) -> int:
    requests = list(served.server.service.scheduler.requests.values())
    return sum(request.started > 0 for request in requests)


def n_rounds(served: Served) -> float:
    return served.server.service.scheduler.n_rounds


@pytest.mark.parametrize("path", [TGI, STREAM, V1])
def test_a_client_that_leaves_frees_its_rows(served: Served, path):
    """All samples of the request go, and their rows are free."""
    samples = {"prompt": "a", "n": 4, "max_tokens": 200, "stream": True}
    with slow(served):
        bodies = [samples] if path == V1 else [{"inputs": f"{i}", "parameters": LONG} for i in range(4)]
        gone = [served.begin(path, body) for body in bodies]
        served.until(lambda: n_rows(served) == 4, "rows in use")
        before = n_rounds(served)
        if path != TGI:
            assert gone[0].getresponse().readline().startswith(b"data: ")
        for connection in gone:
            connection.close()
        assert served.generate("next", max_new_tokens=2)["generated_text"]  # waits for a row
        served.until_idle()
        assert n_rounds(served) - before < LONG["max_new_tokens"] / 5


def test_a_stop_string_frees_the_row(served: Served, alone: Alone):
    """It ends the text of text-generation-inference, and is left out of OpenAI's."""
    text = alone.text("stop", 9)
    stop = text[3:5]
    with slow(served, 0.03):
        before = n_rounds(served)
        answer = served.generate("stop", max_new_tokens=250, stop=["never", stop])
        served.until_idle()
        assert n_rounds(served) - before < 250 / 5 and answer["generated_text"] == text[: text.index(stop) + 2]
    body = {"prompt": "stop", "max_tokens": 250, "temperature": 0, "stop": stop}
    choice = served.ask(V1, body).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    chunks = [event["choices"][0] for event in served.ask(V1, body | {"stream": True}).events[:-1]]
    assert ("".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]) == (choice["text"], "stop")


def test_a_request_whose_client_leaves_while_it_waits_never_starts(served: Served, monkeypatch):
    decoder, submitted = served.server.service.scheduler._decoder, []
    submit = decoder.submit
    monkeypatch.setattr(decoder, "submit", lambda request: (submitted.append(request), submit(request)))
    with slow(served):
        running = [served.begin(TGI, {"inputs": f"{i}", "parameters": LONG}) for i in range(4)]
        served.until(lambda: n_rows(served) == 4, "rows in use")
        waiting = served.begin(TGI, {"inputs": "x" * 77, "parameters": LONG})
        served.until(lambda: served.metrics()["tgi_queue_size"] == 1, "a request that waits")
        waiting.close()
        served.until(lambda: len(served.answers) == 4, "its end")
        for connection in running:
            connection.close()
        served.until_idle()
    assert [len(request.prompt) for request in submitted if request.started] == [2] * 4


def test_a_full_queue(chat_checkpoint):
    with serving(chat_checkpoint, "--max_queue 1 --max_batch 2") as server, slow(server):
        taken = [server.begin(TGI, {"inputs": "a", "parameters": {"max_new_tokens": 60}}) for _ in range(3)]
        server.until(lambda: len(server.answers) == 3, "full")
        refused = server.ask(TGI, {"inputs": "b"})
        assert refused.status == 429 and refused.json["error_type"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        refused = server.ask(V1, {"prompt": "b"})
        assert refused.status == 429 and refused.json["error"]["type"] == "rate_limit_error"
        assert [connection.getresponse().status for connection in taken] == [200] * 3
        assert server.ask(TGI, {"inputs": "b", "parameters": {"max_new_tokens": 2}}).status == 200


def test_a_mistake_of_the_server_fails_a_single_request(served: Served, alone: Alone, monkeypatch, capsys, caplog):
    take = Answer.take

    def failing(self: Answer, update: Update) -> None:
        if len(self.request.prompt) == 6:
            raise IndexError("no such token")
        take(self, update)

    monkeypatch.setattr(Answer, "take", failing)
    with slow(served), ThreadPoolExecutor(3) as pool:
        bodies = [{"inputs": text, "parameters": {"max_new_tokens": 30}} for text in ("abc", "12345", "abcd")]
        answers = [*pool.map(lambda body: served.ask(TGI, body), bodies)]
    assert [answer.status for answer in answers] == [200, 500, 200] and answers[1].json["error_type"] == "internal"
    assert [answers[i].json["generated_text"] for i in (0, 2)] == [alone.text(text, 30) for text in ("abc", "abcd")]
    served.until_idle()
    assert "no such token" in capsys.readouterr().err + caplog.text


def test_logits_that_are_not_finite_end_a_single_request(served: Served, monkeypatch):
    emit = Request.emit

    def failing(self: Request, block: Any) -> int:
        if len(self.prompt) == 9:
            self.fail(9)
            return 0
        return emit(self, block)

    monkeypatch.setattr(Request, "emit", failing)
    bad = served.ask(TGI, {"inputs": "12345678"})
    assert bad.status == 424 and bad.json["error_type"] == "generation"
    assert served.generate("1234567", max_new_tokens=3)["details"]["generated_tokens"] == 3
    served.until_idle()


def test_failures_are_counted_by_their_kinds(chat_checkpoint):
    """Requests that take too long are a kind."""
    flags = "--api_key k --request_seconds 0.5 --max_batch 1 --max_body_bytes 900"
    with serving(chat_checkpoint, flags) as server, slow(server, 0.05):
        key, body = {"Authorization": "Bearer k"}, {"inputs": "a", "parameters": LONG}
        assert server.ask(TGI, body).status == 401
        assert server.ask(TGI, {"inputs": 3}, key).status == server.ask(TGI, {"inputs": ""}, key).status == 422
        assert server.ask(TGI, {"inputs": "a" * 1000}, key).status == 413
        assert server.ask(TGI, {"inputs": "a" * 400}, key).status == 422
        late = server.ask(TGI, body, key)
        assert late.status == 504 and late.headers["x-should-retry"] == "false"
        late = server.ask(STREAM, body, key)
        assert late.status == 200 and len(late.events) > 2 and late.events[-1]["error_type"] == "timeout"
        with closing(server.connect()) as gone:
            gone.request("POST", TGI, json.dumps(body), {"Content-Type": "application/json", **key})
            server.until(lambda: bool(server.answers), "a request")
        server.until(lambda: not server.answers, "its end")
        kinds = {"validation": 2, "too_large": 1, "context_length_exceeded": 1, "timeout": 2, "cancelled": 1}
        expected = {f'tgi_request_failure{{err="{kind}"}}': n for kind, n in (kinds | {"unauthorized": 1}).items()}
        server.until(lambda: expected.items() <= server.metrics(**key).items(), "all are counted")


def test_metrics_and_the_log_add_up(chat_checkpoint, capsys):
    with serving(chat_checkpoint) as server:
        with ThreadPoolExecutor(6) as pool:
            parameters = [{"max_new_tokens": n, "temperature": 0.9, "seed": n} for n in range(5, 35, 5)]
            parameters += [how | {"stop": ["e", "q", "(", "7", "Z"]} for how in parameters]
            details = [*pool.map(lambda how: server.generate("hello", **how)["details"], parameters)]
        server.until_idle()
        metrics = server.metrics()
    sums = {name: sum(each["speculation"][name] for each in details) for name in ("rounds", "drafted", "accepted")}
    n_new = sum(each["generated_tokens"] for each in details)
    assert metrics["tgi_request_skipped_tokens_sum"] == sums["accepted"] > 0
    assert metrics["tgi_request_skipped_tokens_count"] == sums["rounds"]
    assert metrics["vllm:spec_decode_num_drafts_total"] == sums["rounds"]
    assert metrics["vllm:spec_decode_num_draft_tokens_total"] == sums["drafted"]
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] == sums["accepted"]
    at = [metrics[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)]
    assert sum(at) == sums["accepted"] and at == sorted(at, reverse=True)
    assert metrics["foretoken_decode_tokens_total"] == metrics["tgi_request_generated_tokens_sum"] == n_new
    assert metrics["foretoken_prefill_tokens_total"] + metrics["foretoken_reused_prompt_tokens_total"] == 12 * 6
    assert metrics["tgi_request_count"] == metrics["tgi_request_success"] == 12 and metrics["foretoken_rounds_total"]
    n_longer = sum(each["generated_tokens"] > 1 for each in details)
    assert metrics["tgi_request_mean_time_per_token_duration_count"] == n_longer
    for name in ("queue_duration", "inference_duration", "duration"):
        assert metrics[f"tgi_request_{name}_count"] == 12
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert sum(line["timings"]["predicted_n"] for line in lines) == n_new
    assert "hello" not in json.dumps(lines), "texts are logged only if that is wanted"
    assert all(0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"] for line in lines)


def test_draining_answers_what_is_there(chat_checkpoint, alone: Alone):
    with serving(chat_checkpoint, "--max_batch 2") as server, slow(server):
        waiting = [server.begin(TGI, {"inputs": f"{i}", "parameters": {"max_new_tokens": 40}}) for i in range(4)]
        server.until(lambda: len(server.answers) == 4, "four requests")
        server.server.drain(20)
        time.sleep(0.3)
        with pytest.raises(OSError):
            server.get("/health")
        answers = [json.loads(connection.getresponse().read())["generated_text"] for connection in waiting]
        assert answers == [alone.text(f"{i}", 40) for i in range(4)]
        server.thread.join(20)
        assert not server.thread.is_alive() and not server.failures


def test_draining_has_an_end(chat_checkpoint):
    with serving(chat_checkpoint, "--max_batch 1") as server, slow(server, 0.05):
        whole, waiting = (server.begin(TGI, {"inputs": "a", "parameters": LONG}) for _ in range(2))
        server.until(lambda: len(server.answers) == 2, "two requests")
        server.server.drain(0.2)
        assert [connection.getresponse().status for connection in (whole, waiting)] == [503, 503]
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_an_engine_that_fails_ends_every_request(chat_checkpoint, monkeypatch):
    with serving(chat_checkpoint, "--max_batch 1") as server:
        with slow(server):
            streamed, waiting = (server.begin(path, {"inputs": "a", "parameters": LONG}) for path in (STREAM, TGI))
            response = streamed.getresponse()
            assert b'"index": 1,' in response.readline()
            monkeypatch.setattr(server.server.service.scheduler._decoder, "step", lambda: 1 // 0)
            *_, last = response.read().split(b"\n\n")[:-1]
        assert json.loads(last.removeprefix(b"data: "))["error_type"] == "unavailable"
        refused = waiting.getresponse()
        assert refused.status == 503 and b"ZeroDivisionError" in refused.read()
        server.thread.join(10)
        assert [type(error) for error in server.failures] == [ZeroDivisionError]


def test_used_up_descriptors_are_reported_once_a_second(served: Served, alone: Alone, monkeypatch, capsys, caplog):
    """Clients wait meanwhile, and are answered when there are descriptors again."""
    accept, tries = socket.socket.accept, []

    def failing(self: socket.socket) -> Any:
        tries.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(socket.socket, "accept", failing)
        waiting = [pool.submit(served.generate, text, max_new_tokens=n) for text, n in (("a", 3), ("b c", 9))]
        served.until(lambda: bool(tries) and tries[-1] - tries[0] >= 2, "further tries")
        assert len(tries) <= 2 + tries[-1] - tries[0]
        patched.setattr(socket.socket, "accept", accept)
        texts = [answer.result(20)["generated_text"] for answer in waiting]
    assert texts == [alone.text("a", 3), alone.text("b c", 9)]
    assert capsys.readouterr().err.count("Too many open files") == len(tries) and not caplog.records
