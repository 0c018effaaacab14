"""What no client can do to a server: hold it up, keep it open, stop it, or use it from a page elsewhere."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from programs import ROOT
from serving_cases import Alone, Served, serving, slow

from common import cli
from common.errors import ConfigError
from serving import app, connection, gate
from serving import server as server_module
from serving.flags import API_KEY
from serving.serve import Serve

STREAM, TGI, V1, CHATS = "/generate_stream", "/generate", "/v1/completions", "/v1/chat/completions"
GENERATE = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MANY = 600_000
NAMES = b"".join(b', "k%d": 1' % place for place in range(120_000))
# Of 1.2 to 1.9 MB, and nothing in them is right.
WRONG = {
    "messages": (CHATS, b'{"messages": [' + b"1," * MANY + b"1]}"),
    "parts": (CHATS, b'{"messages": [{"role": "user", "content": [' + b"1," * MANY + b"1]}]}"),
    "stop": (V1, b'{"prompt": "a", "stop": [' + b"1," * MANY + b"1]}"),
    "token ids": (V1, b'{"prompt": [' + b"-1," * MANY + b"1]}"),
    "names": (TGI, b'{"inputs": "a"' + NAMES + b"}"),
    "names of parameters": (TGI, b'{"inputs": "a", "parameters": {"seed": 1' + NAMES + b"}}"),
}


@contextmanager
def raw(served: Served, data: bytes = b"") -> Iterator[socket.socket]:
    host, port = served.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=10)) as one:
        one.sendall(data)
        yield one


def rest(one: socket.socket) -> bytes:
    """What is sent until the server ends it."""
    found = b""
    try:
        while more := one.recv(4096):
            found += more
    except ConnectionResetError:
        pass
    return found


@contextmanager
def busy_tokenizer(served: Served) -> Iterator[threading.Event]:
    """Nothing is tokenised before the event."""
    free = threading.Event()
    served.server.service.prompts._thread.submit(free.wait)
    try:
        yield free
    finally:
        free.set()


@pytest.mark.parametrize("what", WRONG)
def test_a_body_holds_nobody_up(served: Served, what, monkeypatch):
    """It is checked on the event loop, which ends at the first value that is wrong."""
    found, told = [], app._told
    monkeypatch.setattr(app, "_told", lambda error: found.append(error) or told(error))
    path, body = WRONG[what]
    assert served.ask(path, body).status == 422
    assert 1 <= len(found) <= 2  # one of each kind that a value may be


def test_texts_are_refused_by_their_characters(served: Served):
    prompts = served.server.service.prompts
    longest = max(len(piece) for piece in prompts.tokenizer.pieces() if piece)
    text, most = "a" * (prompts.max_input * longest + 1), f"this server takes {prompts.max_input * longest}"
    message = {"role": "user", "content": text}
    bodies = {
        TGI: {"inputs": text, "parameters": {"truncate": 3}},
        V1: {"prompt": text},
        CHATS: {"messages": [message]},
        "/tokenize": {"inputs": text},
    }
    for path, body in bodies.items():
        answer = served.ask(path, body)
        assert answer.status == (400 if path.startswith("/v1") else 422), path
        assert f"has {len(text)} characters; {most}" in str(answer.json), path


def test_texts_that_are_tokenised_have_as_many_tokens_as_prompts(served: Served):
    places = served.ask("/tokenize", {"inputs": "\ufffd" * 90, "add_special_tokens": False}).json
    assert [(one["text"], one["start"], one["stop"]) for one in places] == [
        ("\ufffd", place, place + 1) for place in range(90) for _ in range(3)
    ]
    answer = served.ask("/tokenize", {"inputs": "\ufffd" * 200})
    assert answer.status == 422 and answer.json["error"] == "inputs: has 601 tokens; this server takes 315"


@pytest.mark.parametrize("path", [TGI, "/tokenize"])
def test_requests_count_while_they_are_tokenised(chat_checkpoint, path):
    with serving(chat_checkpoint, "--max_batch 1 --max_queue 1") as one, busy_tokenizer(one) as free:
        jobs, body = one.server.service.jobs, {"inputs": "aä"}
        gone, kept = one.begin(path, body), one.begin(path, body)
        one.until(lambda: len(jobs) == 2, "two requests")
        assert one.ask("/tokenize", body).status == one.ask(TGI, body).status == 429
        gone.close()
        one.until(lambda: len(jobs) == 1, "the end of one")
        one.server.end(10)
        one.until(lambda: one.server.service.down is not None, "the end has begun")
        time.sleep(0.1)
        assert one.thread.is_alive()
        free.set()
        assert kept.getresponse().status == 200


def test_time_passes_while_a_prompt_is_tokenised(chat_checkpoint):
    with serving(chat_checkpoint, "--request_seconds 0.3") as one, busy_tokenizer(one):
        tgi = {"inputs": "a"}
        for path, body in ((TGI, tgi), (STREAM, tgi), ("/tokenize", tgi), (V1, {"prompt": "a"})):
            answer = one.ask(path, body)
            assert answer.status == 504 and "not done within 0.3 seconds" in str(answer.json)
            assert answer.headers["x-should-retry"] == "false"  # or openai's client asks again by itself
        assert not one.server.service.jobs


def test_a_body_that_does_not_arrive(chat_checkpoint, monkeypatch):
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    head = GENERATE + b"Content-Length: 9\r\n\r\n{"
    with serving(chat_checkpoint) as one, raw(one, head) as half:
        assert one.generate("b", max_new_tokens=2)["generated_text"]
        said = rest(half)
        assert said.startswith(b"HTTP/1.1 408") and b'"error_type":"timeout"' in said


def test_connections_without_an_answer_are_ended(chat_checkpoint, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.4)
    monkeypatch.setattr(connection, "BESIDE_SECONDS", 0.1)
    with serving(chat_checkpoint, "--request_seconds 4") as one:
        state = one.server._http.server_state
        with raw(one, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n") as silent:
            assert rest(silent) == b""
        with slow(one):  # an answer may take longer than the head of its request
            started, how = time.perf_counter(), {"max_new_tokens": 70, "speculate": False}
            assert one.ask(TGI, {"inputs": "abc", "parameters": how}).status == 200
            assert time.perf_counter() - started > 0.6
        with raw(one, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1500) as deaf:  # reads nothing
            one.until(lambda: state.total_requests > 0, "an answer")
            one.until(lambda: not state.connections and not state.tasks, "its end")
            assert deaf.fileno() >= 0


def test_connections_are_bounded(chat_checkpoint, monkeypatch):
    monkeypatch.setattr(server_module, "SPARE_CONNECTIONS", 3)
    with serving(chat_checkpoint, "--max_batch 1 --max_queue 0") as one:
        connections = one.server._http.server_state.connections
        assert one.get("/health").status == 200
        one.until(lambda: not connections, "no connection")
        with raw(one), raw(one), raw(one):
            one.until(lambda: len(connections) == 3, "three connections")
            refused = one.get("/health")
            assert (refused.status, refused.headers["connection"]) == (503, "close")
            assert refused.json == {"error": "too many connections: try again later", "error_type": "overloaded"}
            time.sleep(connection.SILENT_SECONDS)
            assert [one.get("/health").status for _ in range(3)] == [200] * 3  # whoever says nothing makes room


@pytest.mark.parametrize("head", [b"", b"Upgrade: h2c\r\nConnection: Upgrade\r\n"])
@pytest.mark.parametrize("path", [TGI, STREAM])
def test_what_lies_behind_a_request_hides_nobody_who_leaves(served: Served, path, head):
    body = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 200}}).encode()
    asked = GENERATE.replace(b"/generate", path.encode()) + head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with slow(served, 0.05):
        with raw(served, asked) as one:
            served.until(lambda: served.server.service.scheduler.n_running == 1, "a row in use")
            one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.1)
        served.until(lambda: served.server.service.scheduler.n_running == 0, "a free row", seconds=1)
        with raw(served, asked) as one:  # who sends as much as this is not waited for
            served.until(lambda: served.server.service.scheduler.n_running == 1, "a row in use")
            with suppress(OSError):
                one.sendall(b"x" * 500_000)
            served.until(lambda: served.server.service.scheduler.n_running == 0, "a free row", seconds=1)
    served.until_idle()


def test_requests_in_one_piece_are_answered_in_turn(served: Served, alone: Alone):
    body = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 9}}).encode()
    one_of_two = GENERATE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with raw(served, one_of_two + one_of_two.replace(b"Host:", b"Connection: close\r\nHost:")) as both:
        said = rest(both)
    assert said.count(b"HTTP/1.1 200") == said.count(json.dumps(alone.text("a", 9), ensure_ascii=False).encode()) == 2


def test_what_is_no_http_is_told_as_json(served: Served):
    with raw(served, b"GARBAGE\r\n\r\n") as one:
        head, _, body = rest(one).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body) == {"error": "Invalid HTTP request received.", "error_type": "validation"}


@pytest.mark.parametrize("path", [TGI, V1])
def test_what_fails_in_the_server_is_told_as_json(served: Served, monkeypatch, capsys, path):
    with monkeypatch.context() as patched:
        patched.setattr(served.server.service.prompts, "limit", lambda *given: 1 // 0)
        answer = served.ask(path, {"inputs": "secret"} if path == TGI else {"prompt": "secret"})
    assert answer.status == 500 and "ZeroDivisionError" in str(answer.json["error"])
    assert answer.json.get("error_type") == "internal" or answer.json["error"]["type"] == "server_error"
    served.until_idle()
    said = capsys.readouterr().err
    line = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert (line["route"], line["status"]) == (path, 500)
    assert "Traceback" in said and "secret" not in said
    assert served.generate("b", max_new_tokens=2)["generated_text"]


def test_other_names_lead_nowhere_without_a_key(served: Served, chat_checkpoint):
    own = served.url.removeprefix("http://")
    for host in (own, "localhost:1", "LOCALHOST", "[::1]", "[::1]:8000"):
        assert served.get("/info", Host=host).status == 200, host
    for host in ("rebound.example", "127.0.0.1.example", "localhost:1:2", ""):
        refused = served.get("/info", Host=host)
        assert refused.status == 400, host
        says = f"this server is 127.0.0.1 or localhost or [::1], not {host or 'nameless'}"
        assert refused.json["error"] == says
    with serving(chat_checkpoint, "--api_key k") as one:
        for scheme, status in (("Bearer", 200), ("bearer", 200), ("BEARER ", 200), ("Basic", 401)):
            assert one.get("/info", Host="name.example", Authorization=f"{scheme} k").status == status


def test_an_empty_key_is_refused(monkeypatch):
    monkeypatch.delenv(API_KEY, raising=False)
    assert cli.read(Serve, [], prog="serving").http.key() is None
    for words, outside in (["--api_key", ""], "right"), (["--api_key", " "], None), ([], ""), ([], " "):
        if outside is not None:
            monkeypatch.setenv(API_KEY, outside)
        with pytest.raises(ConfigError, match="the key is empty"):
            cli.read(Serve, words, prog="serving").check()
    assert cli.read(Serve, ["--api_key", "k"], prog="serving").http.key() == "k"


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name", ["request_seconds", "drain_seconds"])
def test_limits_are_numbers(name, value):
    with pytest.raises(ConfigError, match="a limit is no number"):
        cli.read(Serve, [f"--{name}", value], prog="serving").check()


def test_a_port_that_is_taken_is_told(served: Served):
    with pytest.raises(ConfigError, match=r"(?s)cannot listen there.*fix: +use --port 0"):
        server_module._bound("127.0.0.1", int(served.url.rpartition(":")[2]))


def test_a_server_that_hangs_is_not_healthy(chat_checkpoint, monkeypatch):
    monkeypatch.setattr(app, "HUNG_SECONDS", 0.3)
    with serving(chat_checkpoint) as one:
        goes_on = threading.Event()
        decoder = one.server.service.scheduler._decoder
        step = decoder.step
        decoder.step = lambda: (goes_on.wait(5), step())[1]
        time.sleep(0.4)
        assert one.get("/health").status == 200  # nothing is asked
        asked = one.begin(TGI, {"inputs": "a", "parameters": {"max_new_tokens": 3}})
        one.until(lambda: one.get("/health").status == 503, "it is noticed")
        assert "has not ended a step for" in one.get("/health").json["error"]
        goes_on.set()
        assert asked.getresponse().status == 200
        one.until(lambda: one.get("/health").status == 200, "it goes on")


def test_plain_rounds_on_demand_can_be_refused(chat_checkpoint):
    with serving(chat_checkpoint, "--no_plain_requests") as one:
        answer = one.ask(TGI, {"inputs": "a", "parameters": {"speculate": False}})
        assert answer.status == 422 and answer.json["error"].startswith("parameters.speculate: is false")
        assert one.ask(V1, {"prompt": "a", "speculate": False}).json["error"]["param"] == "speculate"
        assert one.ask(V1, {"prompt": "a", "speculate": True}).status == 200


def test_the_page_names_every_metric(served: Served):
    said = served.get("/metrics").body.decode()
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    shown = {name for name in re.findall(r"^# TYPE (\S+) ", said, re.MULTILINE) if not name.endswith("_created")}
    assert {*re.findall(r"`((?:tgi_|vllm:|foretoken_)\w+)", page)} == shown
    assert {"tgi_request_count", "tgi_request_success", "tgi_request_failure"} <= shown
