"""Many requests at once: their tokens are those that each gets alone, and whoever leaves frees a row."""

import gc
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psutil
import pytest
from serving_cases import Alone, Served, serving, slow

from engine.sampling import SamplingParams
from serving.jobs import Job
from serving.scheduler import Update

LONG = {"max_new_tokens": 200}
STREAM, TGI, V1, CHATS = "/generate_stream", "/generate", "/v1/completions", "/v1/chat/completions"


def n_rows(served: Served) -> int:
    return served.server.service.scheduler.n_running


def n_rounds(served: Served) -> float:
    return served.metrics()["foretoken_rounds_total"]


def first_event(connection) -> bytes:
    """Of a stream that has begun; its socket stays open."""
    return connection.getresponse().readline()


class Mixed:
    """Valid requests of every kind, and what each of them gets alone."""

    def __init__(self, alone: Alone) -> None:
        self.rng, self.alone = random.Random(1), alone
        # Some are asked more than once, so that rows also meet what they held before.
        self.known = [self._make() for _ in range(10)]

    def _make(self) -> tuple[str, dict[str, Any], list[int]]:
        rng = self.rng
        prompt = " ".join(rng.choice(["tea", "ünder", "x", "0123456789", "the"]) for _ in range(rng.randint(1, 16)))
        n_new, temperature, seed = rng.randint(1, 50), rng.choice([0.0, 0.6, 1.2]), rng.randrange(2**40)
        sampling = SamplingParams(temperature, seed=seed if temperature else 0)
        if rng.random() < 0.3:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": n_new}
            ids = self.alone.tokenizer.encode(f"[user]{prompt}\n[a]", add_bos=False)
            expected = self.alone.tokens(ids, n_new, sampling)
            return CHATS, body | {"temperature": temperature, "seed": seed}, expected
        how: dict[str, Any] = {"temperature": temperature, "seed": seed} if temperature else {}
        how |= {"max_new_tokens": n_new, "details": True, "speculate": rng.random() < 0.9}
        return (
            rng.choice([TGI, STREAM]),
            {"inputs": prompt, "parameters": how},
            self.alone.tokens(prompt, n_new, sampling),
        )

    def check(self, served: Served) -> None:
        path, body, expected = self.rng.choice(self.known)
        answer = served.ask(path, body)
        assert answer.status == 200, answer.body
        if path == CHATS:
            assert answer.json["choices"][0]["message"]["content"] == self.alone.tokenizer.decode(expected)
            assert answer.json["usage"]["completion_tokens"] == len(expected)
        elif path == TGI:
            assert [token["id"] for token in answer.json["details"]["tokens"]] == expected
        else:
            assert [event["token"]["id"] for event in answer.events] == expected

    def leave(self, served: Served) -> None:
        """Ask for much, and go before it is done."""
        path = self.rng.choice([TGI, STREAM])
        with closing(served.begin(path, {"inputs": "a b c", "parameters": LONG})) as connection:
            if path == STREAM and self.rng.random() < 0.7:
                first_event(connection)
            else:
                time.sleep(self.rng.random() / 20)

    def misuse(self, served: Served) -> None:
        bad = [b"{", {"inputs": "a", "parameters": {"temperature": -1}}, {"inputs": "a" * 500}, {"inputs": [1]}]
        assert served.ask(TGI, self.rng.choice(bad)).status in (400, 422)


def ask_mixed(mixed: Mixed, served: Served, n_request: int) -> None:
    """Of every ten, seven that are answered, two that leave and one that is refused, 16 at a time."""
    kinds = [mixed.check] * 7 + [mixed.leave] * 2 + [mixed.misuse]
    with ThreadPoolExecutor(16) as pool:
        done = [pool.submit(kinds[number % 10], served) for number in range(n_request)]
        for one in done:
            one.result(120)
    served.until_idle()


@pytest.mark.slow
def test_memory_stays_flat_over_five_hundred_requests(served: Served, alone: Alone):
    mixed, process = Mixed(alone), psutil.Process()
    ask_mixed(mixed, served, 100)
    gc.collect()
    before = process.memory_info().rss
    ask_mixed(mixed, served, 500)
    gc.collect()
    assert process.memory_info().rss - before < 30e6


def test_answers_under_load_are_those_that_each_gets_alone(served: Served, alone: Alone):
    ask_mixed(Mixed(alone), served, 60)
    metrics = served.metrics()
    for name in ("tgi_batch_current_size", "tgi_queue_size", "foretoken_kv_use"):
        assert metrics[name] == 0, name
    assert not served.server.service._tasks


@pytest.mark.parametrize("path", [TGI, STREAM])
def test_a_client_that_leaves_frees_its_row(served: Served, path):
    with slow(served):
        gone = [served.begin(path, {"inputs": f"{i}", "parameters": LONG}) for i in range(4)]
        served.until(lambda: n_rows(served) == 4, "rows in use")
        before = n_rounds(served)
        if path == STREAM:
            assert first_event(gone[0]).startswith(b"data: ")
        for connection in gone:
            connection.close()
        answer = served.generate("next", max_new_tokens=2)  # waits for a row
        served.until_idle()
        assert answer["generated_text"] and n_rounds(served) - before < LONG["max_new_tokens"] / 5
    metrics = served.metrics()
    assert metrics["tgi_batch_current_size"] == metrics["foretoken_kv_use"] == 0


def test_a_stop_string_frees_the_row(served: Served, alone: Alone):
    text = alone.text("stop", 8)
    with slow(served, 0.03):
        before = n_rounds(served)
        answer = served.generate("stop", max_new_tokens=250, stop=[text[:2]])
        served.until_idle()
        assert n_rounds(served) - before < 250 / 5 and answer["generated_text"] == text[:2]


def test_one_that_leaves_while_it_waits_never_starts(served: Served, monkeypatch):
    decoder, started = served.server.service.scheduler._decoder, []
    submit = decoder.submit
    monkeypatch.setattr(decoder, "submit", lambda request: (started.append(len(request.prompt)), submit(request)))
    with slow(served):
        running = [served.begin(TGI, {"inputs": f"{i}", "parameters": LONG}) for i in range(4)]
        served.until(lambda: n_rows(served) == 4, "rows in use")
        waiting = served.begin(TGI, {"inputs": "x" * 77, "parameters": LONG})
        served.until(lambda: len(served.server.service.jobs) == 5, "a request that waits")
        served.until(lambda: served.metrics()["tgi_queue_size"] == 1, "its place in the queue")
        waiting.close()
        served.until(lambda: len(served.server.service.jobs) == 4, "its end")
        for connection in running:
            connection.close()
        served.until_idle()
    assert started == [2] * 4


def test_a_full_queue_is_told(chat_checkpoint):
    with serving(chat_checkpoint, "--max_queue 1") as one, slow(one):
        taken = [one.begin(TGI, {"inputs": "a", "parameters": {"max_new_tokens": 60}}) for _ in range(5)]
        one.until(lambda: len(one.server.service.jobs) == 5, "full")
        refused = one.ask(TGI, {"inputs": "b"})
        assert refused.status == 429 and refused.json["error_type"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        refused = one.ask(V1, {"prompt": "b"})
        assert refused.status == 429 and refused.json["error"]["type"] == "rate_limit_error"
        assert [connection.getresponse().status for connection in taken] == [200] * 5
        assert one.ask(TGI, {"inputs": "b", "parameters": {"max_new_tokens": 2}}).status == 200
        assert one.counted_failures() == {"overloaded": 2}


def test_a_request_that_cannot_be_told_is_nobody_elses_loss(served: Served, alone: Alone, monkeypatch, capsys):
    take = Job.take

    def failing(self: Job, update: Update) -> None:
        if len(self.request.prompt) == 6:
            raise IndexError("no such token")
        take(self, update)

    monkeypatch.setattr(Job, "take", failing)
    with slow(served), ThreadPoolExecutor(3) as pool:
        bodies = [{"inputs": text, "parameters": {"max_new_tokens": 30}} for text in ("abc", "12345", "abcd")]
        answers = [*pool.map(lambda body: served.ask(TGI, body), bodies)]
    assert [answer.status for answer in answers] == [200, 500, 200]
    assert answers[1].json == {"error": "the server has failed (IndexError)", "error_type": "internal"}
    assert [answers[i].json["generated_text"] for i in (0, 2)] == [alone.text(text, 30) for text in ("abc", "abcd")]
    assert "no such token" in capsys.readouterr().err
    served.until_idle()


def test_requests_take_no_longer_than_they_may(chat_checkpoint):
    with serving(chat_checkpoint, "--request_seconds 0.4 --max_batch 1") as one, slow(one, 0.05):
        streamed = one.begin(STREAM, {"inputs": "a", "parameters": LONG})
        assert first_event(streamed)
        waits = one.begin(V1, {"prompt": "b", "max_tokens": 50})
        late = one.begin(CHATS, {"messages": [{"role": "user", "content": "a"}], "stream": True})
        for connection in (waits, late):
            answer = connection.getresponse()
            assert answer.status == 504 and json.loads(answer.read())["error"]["code"] == "timeout"
        again = one.ask(STREAM, {"inputs": "a", "parameters": LONG})
        assert again.status == 200 and len(again.events) > 2
        assert again.events[-1] == {"error": "not done within 0.4 seconds", "error_type": "timeout"}
        one.until_idle()


def test_the_end_of_a_server_waits_for_what_was_asked(chat_checkpoint, alone: Alone):
    with serving(chat_checkpoint, "--max_batch 2") as one, slow(one):
        kept_open = one.connect()
        kept_open.request("GET", "/health")
        assert kept_open.getresponse().read() == b""
        asked = [one.begin(TGI, {"inputs": f"{i}", "parameters": {"max_new_tokens": 50}}) for i in range(6)]
        one.until(lambda: len(one.server.service.jobs) == 6, "six requests")
        one.server.end(20)
        one.until(lambda: one.server.service.down is not None, "the end has begun")
        kept_open.request("POST", TGI, b'{"inputs": "a"}', {"Content-Type": "application/json"})
        refused = kept_open.getresponse()
        assert refused.status == 503 and b"shutting down" in refused.read()
        answers = [json.loads(connection.getresponse().read())["generated_text"] for connection in asked]
        assert answers == [alone.text(f"{i}", 50) for i in range(6)]
        one.thread.join(20)
        assert not one.thread.is_alive() and not one.failures


def test_the_end_of_a_server_does_not_wait_forever(chat_checkpoint):
    with serving(chat_checkpoint, "--max_batch 1") as one, slow(one, 0.05):
        whole, waiting = (one.begin(TGI, {"inputs": "a", "parameters": LONG}) for _ in range(2))
        one.until(lambda: len(one.server.service.jobs) == 2, "two requests")
        one.server.end(0.2)
        for connection in (whole, waiting):
            answer = connection.getresponse()
            assert answer.status == 503 and b"not done within 0.2 seconds" in answer.read()
        one.thread.join(10)
        assert not one.thread.is_alive()


def test_an_engine_that_fails_is_told_to_everyone(chat_checkpoint, monkeypatch):
    with serving(chat_checkpoint, "--max_batch 1") as one:
        decoder = one.server.service.scheduler._decoder
        with slow(one):
            streamed, waiting = (one.begin(path, {"inputs": "a", "parameters": LONG}) for path in (STREAM, TGI))
            response = streamed.getresponse()
            assert b'"index": 1,' in response.readline()
            monkeypatch.setattr(decoder, "step", lambda: 1 // 0)
            *_, last = response.read().split(b"\n\n")[:-1]
        assert json.loads(last.removeprefix(b"data: "))["error_type"] == "unavailable"
        refused = waiting.getresponse()
        assert refused.status == 503 and b"ZeroDivisionError" in refused.read()
        one.thread.join(10)
        assert [type(error) for error in one.failures] == [ZeroDivisionError]


def test_logits_that_are_not_finite_end_one_request(chat_checkpoint, monkeypatch):
    with serving(chat_checkpoint) as one:
        from engine.requests import Request

        emit = Request.emit

        def failing(self: Request, block: Any) -> int:
            if len(self.prompt) == 9:
                self.fail(9)
                return 0
            return emit(self, block)

        monkeypatch.setattr(Request, "emit", failing)
        bad = one.ask(TGI, {"inputs": "12345678"})
        assert bad.status == 424 and bad.json["error_type"] == "generation" and "NaN or infinite" in bad.json["error"]
        assert one.generate("1234567", max_new_tokens=3)["details"]["generated_tokens"] == 3
        one.until_idle()
