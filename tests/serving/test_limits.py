"""Requests and servers that are refused, by the name of the field and in the words of the route's family."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import product
from typing import Any

import pytest

from common import cli
from common.errors import ConfigError
from models.checkpoints.chat_template import _compiled
from serving import serve, service
from serving.app import make_app
from serving.schemas import NEUTRAL, Body, ChatCompletion, Completion, Message, Parameters, StreamOptions, Tool
from serving.serve import API_KEY, Http, Serve, Server
from tests.support.serving_cases import CHATS, PLAIN, TGI, V1, Served, serving

LIMITS = "--max_queue 1 --max_new_tokens 8 --max_stop_sequences 2 --max_body_bytes 4000 --max_input_length 60"
MESSAGES = [{"role": "user", "content": "a"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def strict(chat_checkpoint):
    with serving(chat_checkpoint, f"{LIMITS} --no_plain_requests") as server:
        yield server


def refused_field(served: Served, path: str, body: Any) -> str:
    answer = served.ask(path, body)
    assert answer.status == (400 if path.startswith("/v1") else 422), answer.body
    if path.startswith("/v1"):
        assert answer.json["error"].keys() == {"message", "type", "param", "code"}
        return answer.json["error"]["param"] or "body"
    assert answer.json.keys() == {"error", "error_type"}
    return answer.json["error"].partition(":")[0]


# The place of each class in a request, and the prefix of its fields in errors.
PLACES: dict[type[Body], tuple[str, Callable[[Any], Any], str]] = {
    Parameters: (TGI, lambda fields: {"inputs": "a", "parameters": fields | {"max_new_tokens": 2}}, "parameters."),
    Completion: (V1, lambda fields: fields | {"prompt": "a", "max_tokens": 2}, ""),
    ChatCompletion: (CHATS, lambda fields: fields | CHAT, ""),
    Message: (CHATS, lambda fields: CHAT | {"messages": [fields | MESSAGES[0]]}, "messages.0."),
    Tool: (CHATS, lambda fields: CHAT | {"tools": [fields | TOOL], "tool_choice": "none"}, "tools.0."),
    StreamOptions: (CHATS, lambda fields: CHAT | {"stream": True, "stream_options": fields}, "stream_options."),
}


@pytest.mark.parametrize("kind", PLACES)
def test_fields_that_the_server_lacks_are_refused_unless_they_ask_for_nothing(strict: Served, kind):
    path, body, prefix = PLACES[kind]
    for name in ("n", "response_format", "nonsense"):
        assert refused_field(strict, path, body({name: 7})) == prefix + name
    for place in (0, -1):
        neutral = {name: values[place] for name, values in NEUTRAL.items()}
        assert strict.ask(path, body(neutral | {"nonsense": None})).status == 200


CALLED = "messages.0.tool_calls.0.function.arguments"


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def of_tgi(**parameters: Any) -> tuple[str, dict[str, Any]]:
    return TGI, {"inputs": "a", "parameters": parameters}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (of_tgi(temperature=float("nan")), "parameters.temperature"),
        (of_tgi(min_tokens=9, max_new_tokens=8), "parameters.min_tokens"),
        (of_tgi(logit_bias={"5000000": 1}), "parameters.logit_bias"),
        (of_tgi(bad_words=[""]), "parameters.bad_words.0"),
        (of_tgi(top_k=True), "parameters.top_k"),
        (of_tgi(max_new_tokens=9), "parameters.max_new_tokens"),
        (of_tgi(stop=["a", "b", "c"]), "parameters.stop"),
        (of_tgi(speculate=False), "parameters.speculate"),
        ((TGI, {"inputs": ""}), "inputs"),
        ((TGI, {"inputs": "a" * 60}), "inputs"),
        (of_tgi(top_n_tokens=21), "parameters.top_n_tokens"),
        (("/generate_stream", of_tgi(decoder_input_details=True)[1]), "parameters.decoder_input_details"),
        ((V1, {"prompt": "a", "n": 3, "best_of": 2}), "best_of"),
        ((V1, {"prompt": "a", "n": 2, "best_of": 3, "stream": True}), "best_of"),
        ((V1, {"prompt": ["a"] * 6}), "prompt"),
        ((V1, {"prompt": ["a", [1, "b"]]}), "prompt.1.1"),
        ((V1, {"prompt": [1, 10**6]}), "prompt"),
        ((CHATS, CHAT | {"top_logprobs": 3}), "top_logprobs"),
        ((CHATS, {"messages": [{"role": "user", "content": None}]}), "messages.0"),
        ((CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages.0.content.0.type"),
        ((CHATS, CHAT | {"user": "\ud800"}), "user"),
        ((CHATS, CHAT | {"prediction": {"type": "content", "content": 7}}), "prediction.content"),
        ((CHATS, CHAT | {"tools": [TOOL]}), "tools"),  # the template reads none
        (
            (CHATS, CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice",
        ),
        ((CHATS, CHAT | {"chat_template_kwargs": {"a": "\ud800"}}), "chat_template_kwargs"),
        ((CHATS, {"messages": [{"role": "assistant", "tool_calls": [called("f", "[1]")]}]}), CALLED),
        ((CHATS, {"messages": MESSAGES, "max_tokens": 9}), "max_tokens"),
        ((CHATS, {"messages": MESSAGES, "max_completion_tokens": 9}), "max_completion_tokens"),
        ((CHATS, CHAT | {"max_completion_tokens": 2}), "max_tokens"),
    ],
)
def test_wrong_values_are_refused_by_name(strict: Served, request_, field):
    assert refused_field(strict, *request_).startswith(field)


def test_a_row_has_an_end(served: Served):
    """Prompt and answer have to fit into a row, whatever the largest --max_new_tokens."""
    body = {"inputs": "a" * 299, "parameters": {"max_new_tokens": 17}}
    assert refused_field(served, TGI, body) == "parameters.max_new_tokens"
    for how in ({"prompt": [5] * 400}, {"prompt": "a" * 299, "max_tokens": 17}, {"prompt": "a", "max_tokens": 316}):
        error = served.ask(V1, how).json["error"]
        is_long = how.get("max_tokens") != 316
        assert error["code"] == ("context_length_exceeded" if is_long else "invalid_value"), error
        assert error["type"] == "invalid_request_error" and "2048" not in error["message"]
    assert served.ask(TGI, {"inputs": "a" * 299, "parameters": {"max_new_tokens": 16}}).status == 200
    assert served.generate("a" * 400, truncate=9, max_new_tokens=1)["details"]["input_length"] == 9


@pytest.mark.parametrize("path", [TGI, V1, "/", "/v1/models", "/nowhere"])
def test_bodies_are_bounded(strict: Served, path):
    """A length in the headers is refused on every path; a body in pieces, where it is read."""

    def pieces() -> Iterator[bytes]:
        yield from (b'{"inputs": "', b"x" * 3000, b"y" * 2000, b'"}')

    for method in ("GET", "POST"):
        answer = strict.ask(path, {"inputs": "a" * 4000}, method=method)
        assert answer.status == 413 and "4014" in message_of(answer.json, path)
        with closing(strict.connect()) as connection:
            connection.request(method, path, pieces(), {"Content-Type": "application/json"}, encode_chunked=True)
            response = connection.getresponse()
            status, body = response.status, response.read()
        assert status == 413 or method == "GET" or path not in (TGI, V1, "/")
        assert status == 200 or message_of(json.loads(body), path)


def message_of(body: Any, path: str) -> str:
    return body["error"]["message"] if path.startswith("/v1") else body["error"]


@pytest.mark.parametrize("data", [b"{", b'{"inputs": "\xff\xfe"}', b"[" * 3000, b"", b'{"inputs": "\\ud800"}'])
@pytest.mark.parametrize("path", ["/", V1])
def test_bodies_that_are_no_json(strict: Served, path, data):
    answer = strict.ask(path, data)
    assert answer.status in (400, 422) and answer.json["error"]
    answer = strict.ask(path, b"{}", {"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status == (400 if path == V1 else 422) and "application/json" in str(answer.json["error"])


def test_a_chat_template_that_refuses(served: Served, monkeypatch):
    template = served.server.service.intake.template
    raising = _compiled("{{ raise_exception('roles must alternate') }}")
    refusing = type(template)(template.path, raising, {}, template.tokenizer)
    monkeypatch.setattr(served.server.service.intake, "template", refusing)
    assert refused_field(served, CHATS, CHAT) == "messages"
    served.until_idle()


@pytest.mark.parametrize("key", ["secret\nb", "a\rsecret", "secret\0", "secret\udc80", " "])
def test_a_key_that_no_header_carries_is_refused(key):
    with pytest.raises(ConfigError) as refused:
        Http(api_key=key).key()
    assert "secret" not in str(refused.value)


METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "get", "BREW")
OPEN = {(method, path) for method in ("GET", "HEAD") for path in ("/", "/health")}


KEY = "sécret à"


def test_the_page_and_health_alone_need_no_key(chat_checkpoint, monkeypatch):
    """Every method of every path, routes or not; what needs no key is not for pages that lead here by another name."""
    monkeypatch.setenv(API_KEY, KEY)
    with serving(chat_checkpoint, "--max_new_tokens 1") as server:
        paths = {*paths_of(make_app(server.server.service, KEY, []).routes)}
        assert {"/", "/health", "/generate", "/v1/chat/completions", "/v1/models/name", "/openapi.json"} <= paths
        for method, path in product(METHODS, [*paths, "/nowhere", "//", "/health/", "/v1/../health", "*"]):
            body = b'{"inputs": "a", "prompt": "a"}' if method == "POST" else b""
            for named, wrong in (({}, ("", f"{KEY}2")), ({"Host": "rebound.example"}, ())):
                keys = [{}, *map(bearer, (*wrong, KEY))]
                *without, with_key = (server.ask(path, body, named | key, method).status for key in keys)
                if (method, path) in OPEN:
                    assert with_key == 200 and {*without} == {400 if named else 200}, (method, path)
                else:
                    assert {*without} == {401} and with_key != 401, (method, path)


def paths_of(routes: Iterable[Any]) -> Iterator[str]:
    for route in routes:
        if hasattr(route, "path"):
            yield re.sub("{.*}", "name", route.path)
        else:  # FastAPI's, for the routes of a router
            yield from paths_of(route.original_router.routes)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"bearer {key}".encode().decode("latin-1")}


def test_other_names_lead_nowhere_without_a_key(served: Served):
    for host in (served.url.removeprefix("http://"), "localhost:1", "LOCALHOST", "[::1]:8000"):
        assert served.get("/info", Host=host).status == 200, host
    for host in ("rebound.example", "127.0.0.1.example", "localhost:1:2", ""):
        answer = served.get("/v1/models", Host=host)
        assert answer.status == 400 and host[:5] in answer.json["error"]["message"], host


IMPOSSIBLE = ["--api_key=", "--port 99999", "--prefill_tokens 0", "--request_seconds nan", "--data_parallel 2"]
IMPOSSIBLE += ["--gamma auto --draft self@3", "--draft oracle"]
IMPOSSIBLE += ["--text_drafts suffix --keep_answers 9 --no_prefix_reuse"]


@pytest.mark.parametrize("words", [*IMPOSSIBLE, "--draft suffix --keep_answers -1"])
def test_impossible_servers_are_refused(chat_checkpoint, words):
    flags = cli.read(Serve, [f"--model={chat_checkpoint}", *PLAIN.split(), *words.split()], prog="serving")
    with pytest.raises(ConfigError):
        flags.config()
        flags.http.bind()


@pytest.mark.parametrize(("host", "named"), [("no.such.host.invalid", "--host"), ("127.0.0.1", "--port")])
def test_an_address_that_cannot_be_used_is_named_alone(host, named):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as error:
        Http(host=host, port=taken.getsockname()[1]).bind()
    assert {*re.findall("--host|--port", str(error.value))} == {named}


def test_a_server_that_hangs_is_not_healthy(chat_checkpoint, monkeypatch):
    monkeypatch.setattr(service, "HUNG_SECONDS", 0.3)
    with serving(chat_checkpoint) as server:
        goes_on, decoder = threading.Event(), server.server.service.scheduler._decoder
        step = decoder.step
        decoder.step = lambda: (goes_on.wait(5), step())[1]
        assert server.get("/health").status == 200
        waiting = server.begin(TGI, {"inputs": "a", "parameters": {"max_new_tokens": 3}})
        server.until(lambda: server.get("/health").status == 503, "it is noticed")
        goes_on.set()
        assert waiting.getresponse().status == 200
        server.until(lambda: server.get("/health").status == 200, "it goes on")


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_that_loads_says_so(chat_checkpoint, monkeypatch, fails):
    """It listens at once; the same connection is answered later; if it cannot load, nothing listens any more."""
    urls, open_session = [], serve.open_session

    def asked_meanwhile(*given: Any) -> Any:
        (server,) = urls
        for path in ("/health", "/", TGI, V1, "/nowhere"):
            for method in ("GET", "POST"):
                answer = server.ask(path, {"inputs": "a", "prompt": "a"}, method=method)
                assert answer.status == 503 and int(answer.headers["retry-after"]) and message_of(answer.json, path)
        if fails:
            raise ConfigError(*["it cannot be loaded"] * 5)
        return open_session(*given)

    class Listening(Server):
        def __init__(self, flags: Serve) -> None:
            super().__init__(flags)
            urls.append(Served(self, threading.current_thread(), []))

    monkeypatch.setattr(serve, "open_session", asked_meanwhile)
    monkeypatch.setattr(serve, "Server", Listening)
    if fails:
        with pytest.raises(ConfigError, match="cannot be loaded"), serving(chat_checkpoint):
            pass
        with pytest.raises(OSError):
            urls[0].get("/health")
    else:
        with serving(chat_checkpoint) as server:
            assert server.get("/health").status == 200 and server.generate("a", max_new_tokens=3)["generated_text"]
