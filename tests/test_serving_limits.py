"""What a server refuses, by name and in its family's words; never with a 500."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_cases import PLAIN, Served, serving

from serving.schemas import MOST_TOKENS, Body, ChatCompletion, Message, Parameters, StreamOptions, TextCompletion

LIMITS = "--max_queue 1 --max_new_tokens 8 --max_stop_sequences 2 --max_body_bytes 4000 --max_input_length 60"
MESSAGES = [{"role": "user", "content": "a"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}
PART = {"type": "text", "text": "a"}
IMAGE = {"image_url": {"url": "x"}, "type": "image_url"}
TGI, V1, CHATS = "/generate", "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def strict(chat_checkpoint):
    with serving(chat_checkpoint, LIMITS) as one:
        yield one


def refusal(served: Served, path: str, body: Any, status: int = 422) -> tuple[str, str]:
    """What a refusal is about, and its message."""
    answer = served.ask(path, body)
    assert answer.status == status, answer.body
    if path.startswith("/v1"):
        assert answer.json.keys() == {"error"}
        error = answer.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error["param"], error["message"]
    assert answer.json.keys() == {"error", "error_type"}
    return answer.json["error"].partition(":")[0], answer.json["error"]


# Where each class is in a request, and what errors call that place.
PLACES: dict[type[Body], tuple[str, Callable[[Any], Any], str]] = {
    Parameters: (TGI, lambda own: {"inputs": "a", "parameters": own | {"max_new_tokens": 2}}, "parameters."),
    TextCompletion: (V1, lambda own: own | {"prompt": "a", "max_tokens": 2}, ""),
    ChatCompletion: (CHATS, lambda own: own | CHAT, ""),
    Message: (CHATS, lambda own: CHAT | {"messages": [own | MESSAGES[0]]}, "messages.0."),
    StreamOptions: (CHATS, lambda own: CHAT | {"stream": True, "stream_options": own}, "stream_options."),
}


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(strict: Served, kind):
    path, body, place = PLACES[kind]
    assert kind.REFUSED
    for name in kind.REFUSED:
        param, message = refusal(strict, path, body({name: 7}))
        assert param == place + name and "not supported" in message
    for number in (0, 1, -2):  # null, and the first and the last value that asks for nothing
        own = {name: [None, *values, None][number] for name, values in kind.REFUSED.items()}
        answer = strict.ask(path, body(own))
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TGI, {"inputs": "a", "parameters": {"temperature": 0}}, "parameters.temperature"),
        (TGI, {"inputs": "a", "parameters": {"temperature": 1e-9}}, "parameters.temperature"),
        (TGI, {"inputs": "a", "parameters": {"temperature": float("nan")}}, "parameters.temperature"),
        (TGI, {"inputs": "a", "parameters": {"temperature": float("inf")}}, "parameters.temperature"),
        (TGI, {"inputs": "a", "parameters": {"top_p": 1.01}}, "parameters.top_p"),
        (TGI, {"inputs": "a", "parameters": {"top_k": 0}}, "parameters.top_k"),
        (TGI, {"inputs": "a", "parameters": {"top_k": True}}, "parameters.top_k"),
        (TGI, {"inputs": "a", "parameters": {"seed": -1}}, "parameters.seed"),
        (TGI, {"inputs": "a", "parameters": {"seed": 2**63}}, "parameters.seed"),
        (TGI, {"inputs": "a", "parameters": {"seed": 10**300}}, "parameters.seed"),
        (TGI, {"inputs": "a", "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens"),
        (TGI, {"inputs": "a", "parameters": {"max_new_tokens": "3"}}, "parameters.max_new_tokens"),
        (TGI, {"inputs": "a", "parameters": {"truncate": 0}}, "parameters.truncate"),
        (TGI, {"inputs": "a", "parameters": {"nonsense": 1}}, "parameters.nonsense"),
        (TGI, {"inputs": 3}, "inputs"),
        (TGI, {}, "inputs"),
        (TGI, [], "body"),
        (TGI, {"inputs": ""}, "inputs"),
        (TGI, {"inputs": "a", "stream": True}, "stream"),
        (V1, {"prompt": "a", "temperature": 1e-9}, "temperature"),
        (V1, {"prompt": "a", "logprobs": 2}, "logprobs"),
        (V1, {"prompt": []}, "prompt"),
        (V1, {"prompt": [3, "a"]}, "prompt.1"),
        (V1, {"prompt": "a", "temperature": True}, "temperature"),
        (TGI, {"inputs": "a", "parameters": {"temperature": "0.5"}}, "parameters.temperature"),
        (TGI, {"inputs": "a", "parameters": {"top_p": True}}, "parameters.top_p"),
        (V1, {"prompt": "a", "speculate": "no"}, "speculate"),
        (V1, {"prompt": [1, 10**6]}, "prompt"),
        (CHATS, {"messages": []}, "messages"),
        (CHATS, {"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
        (CHATS, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        (CHATS, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        (CHATS, CHAT | {"stop": ["x", 3]}, "stop.1"),
        (CHATS, CHAT | {"stop": ["x"] * 300}, "stop"),
        (CHATS, CHAT | {"user": "\ud800"}, "user"),
        (CHATS, CHAT | {"model": "\ud800"}, "model"),
        (CHATS, CHAT | {"\ud800": 1}, "?"),
        (CHATS, CHAT | {"tool_choice": "required"}, "tool_choice"),
        (CHATS, CHAT | {"max_completion_tokens": 2}, "max_tokens"),
        (CHATS, CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
        (V1, {"prompt": "a", "stream": False, "stream_options": {}}, "stream_options"),
        (CHATS, {"messages": [*MESSAGES, {"role": "user"}]}, "messages.1.content"),
        (CHATS, {"messages": [{"role": "system", "content": None}]}, "messages.0.content"),
        (V1, {"prompt": [[]]}, "prompt"),
        (V1, {"prompt": [[[1]]]}, "prompt"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(strict: Served, path, body, param):
    about, _ = refusal(strict, path, body)
    assert about.startswith(param)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (TGI, {"inputs": "a" * 60}, "inputs", "has 61 tokens; this server takes 60"),
        (
            TGI,
            {"inputs": "a", "parameters": {"max_new_tokens": 9}},
            "parameters.max_new_tokens",
            "is 9; this server gives 8",
        ),
        (CHATS, {"messages": MESSAGES, "max_completion_tokens": 9}, "max_completion_tokens", "is 9"),
        (
            TGI,
            {"inputs": "a", "parameters": {"stop": ["a", "b", "c"]}},
            "parameters.stop",
            "3 strings; this server takes 2",
        ),
        (V1, {"prompt": "a", "stop": ["a", ""]}, "stop", "empty"),
        (V1, {"prompt": "a", "stop": "a" * 257}, "stop", "more than 256"),
        (V1, {"prompt": "a", "stop": ["x"] * 300}, "stop", "at most 256 items"),
        (CHATS, {"messages": [{"role": "user", "content": [PART] * 33}]}, "messages.0.content", "at most 32 items"),
        (V1, {"prompt": [5, 10**6]}, "prompt", "token id 1000000"),
    ],
)
def test_limits_are_told(strict: Served, path, body, param, says):
    about, message = refusal(strict, path, body)
    assert about == param and says in message


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], ["a", 3], [[1], "a"]])
def test_one_prompt_is_asked_for_at_a_time(strict: Served, prompt):
    assert refusal(strict, V1, {"prompt": prompt}) == ("prompt", "prompt: is not one prompt: a text, or its token ids")
    for one in ("a", ["a"], [5, 6], [[5, 6]]):
        assert strict.ask(V1, {"prompt": one, "max_tokens": 2}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (V1, {"prompt": [5] * 61}, "prompt: has 61 tokens; this server takes 60"),
        (V1, {"prompt": "a" * 60}, "prompt: has 61 tokens"),
        (V1, {"prompt": "a" * 3000}, "prompt: has 3000 characters"),
        (CHATS, {"messages": [{"role": "user", "content": "a" * 60}]}, "messages: has "),
    ],
)
def test_a_prompt_that_is_too_long_is_told_as_openai_does(strict: Served, path, body, says):
    answer = strict.ask(path, body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
    assert error["message"].startswith(says)


def test_a_completion_that_names_no_length_takes_what_room_there_is(served: Served):
    for n_room in (40, 16, 5, 1):
        body = {"prompt": "a" * (315 - n_room), "temperature": 0.0}
        for asked in (body, body | {"max_tokens": None}):
            answer = served.ask(V1, asked)
            assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == min(16, n_room), answer.body


def test_a_list_of_too_many_token_ids_is_a_prompt_that_is_too_long(chat_checkpoint):
    with serving(chat_checkpoint, "--gamma 0 --max_body_bytes 4000000", PLAIN) as one:
        error = one.ask(V1, b'{"prompt": [' + b"1," * MOST_TOKENS + b"1]}").json["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_a_row_has_an_end(served: Served):
    body = {"inputs": "a" * 299, "parameters": {"max_new_tokens": 17}}
    assert (
        refusal(served, TGI, body)[1]
        == "parameters.max_new_tokens: is 17; behind 300 prompt tokens there is room for 16"
    )
    body["parameters"] = {"max_new_tokens": 16}
    assert served.ask(TGI, body).status == 200
    assert refusal(served, TGI, {"inputs": "a" * 400})[1] == "inputs: has 401 tokens; this server takes 315"
    short = served.ask(TGI, {"inputs": "a" * 400, "parameters": {"truncate": 9, "details": True, "max_new_tokens": 1}})
    assert short.json["details"]["input_length"] == 9


def test_bodies_are_bounded(strict: Served):
    for path in (TGI, V1):
        _, message = refusal(strict, path, {"inputs": "a" * 4000}, 413)
        assert "too large" in message.lower()

    def pieces() -> Iterator[bytes]:
        for piece in (b'{"inputs": "', b"x" * 3000, b"y" * 2000, b'", "parameters": {"max_new_tokens": 1}}'):
            yield piece
            time.sleep(0.05)  # the server has read it

    in_pieces = strict.connect()
    in_pieces.request("POST", TGI, pieces(), {"Content-Type": "application/json"}, encode_chunked=True)
    assert in_pieces.getresponse().status == 413


@pytest.mark.parametrize("data", [b"{", b'{"inputs": "\xff\xfe"}', b"[" * 3000, b"", b"nul", b'{"inputs": "\\ud800"}'])
@pytest.mark.parametrize("path", ["/", TGI, "/generate_stream", "/tokenize", V1, CHATS])
def test_bodies_that_are_no_json(strict: Served, path, data):
    answer = strict.ask(path, data)
    assert answer.status in (400, 422) and "error" in answer.json, answer.body
    error = answer.json["error"]
    param, message = (error["param"], error["message"]) if path.startswith("/v1") else (None, error)
    said = {
        b"{": "body: is no JSON: Expecting property name enclosed in double quotes at character 1",
        b"nul": "body: is no JSON: Expecting value at character 0",
        b'{"inputs": "\xff\xfe"}': "body: 'utf-8' codec can't decode byte 0xff in position 12: invalid start byte",
        b"[" * 3000: "body: maximum recursion depth exceeded",
    }
    assert data not in said or (param is None and message.startswith(said[data]))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_has_to_say_that_it_is_json(strict: Served, kind):
    for path, body in ((TGI, b'{"inputs": "a"}'), (CHATS, json.dumps(CHAT).encode())):
        answer = strict.ask(path, body, {"Content-Type": kind})
        assert answer.status == 415 and "the Content-Type has to be application/json" in str(answer.json["error"])


def test_an_assistant_may_have_said_nothing(strict: Served):
    messages = [*MESSAGES, {"role": "assistant", "content": None}, {"role": "assistant"}, *MESSAGES]
    assert strict.ask(CHATS, CHAT | {"messages": messages}).status == 200
    assert strict.ask(CHATS, CHAT | {"stream": True, "stream_options": {"include_usage": True}}).status == 200


def test_a_chat_template_that_refuses(chat_checkpoint, served: Served, monkeypatch):
    from models.checkpoints.chat_template import _compiled

    prompts = served.server.service.prompts
    template = prompts.template
    raising = _compiled("{{ raise_exception('roles must alternate') }}")
    monkeypatch.setattr(prompts, "template", type(template)(template.path, raising, {}, template.tokenizer))
    assert "chat template refuses" in refusal(served, CHATS, CHAT)[1]


def test_a_key_is_asked_for(chat_checkpoint, monkeypatch):
    monkeypatch.setenv("FORETOKEN_API_KEY", "sécret")
    with serving(chat_checkpoint) as one:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
        for path, asked in ((TGI, body), (V1, {"prompt": "a"}), ("/metrics", None), ("/v1/models", None)):
            method = "GET" if asked is None else "POST"
            for given_key in (None, "Bearer secret", "sécret", "Bearer sécret2", "Bearer "):
                headers = {} if given_key is None else {"Authorization": given_key.encode().decode("latin-1")}
                answer = one.ask(path, asked, headers, method)
                assert answer.status == 401 and "key" in str(answer.json["error"])
            good = {"Authorization": "Bearer sécret".encode().decode("latin-1")}
            assert one.ask(path, asked, good, method).status == 200
        assert one.get("/health").status == one.get("/").status == 200


NASTY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just(10**400)
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FITTING = st.sampled_from([None, 1, 2, 0.5, "a", True, False, 0, ["a"], [3, 4], "auto"])


def bodies(kind: type, **required: Any) -> st.SearchStrategy[Any]:
    names = st.sampled_from([*kind.model_fields, *kind.REFUSED, "unknown"])  # type: ignore[attr-defined]
    fields = st.dictionaries(names, st.one_of(FITTING, FITTING, NASTY), max_size=4)
    return st.one_of(*[fields.map(lambda some: required | some)] * 3, fields.map(lambda some: some | required), NASTY)


REQUESTS = st.one_of(
    bodies(Parameters).map(lambda own: ("/generate", {"inputs": "ab", "parameters": own})),
    bodies(Parameters).map(lambda own: ("/", {"inputs": "ab", "parameters": own, "stream": True})),
    bodies(TextCompletion, prompt="ab").map(lambda own: (V1, own)),
    bodies(ChatCompletion, messages=MESSAGES).map(lambda own: (CHATS, own)),
    bodies(Message, role="user", content="x").map(lambda own: (CHATS, {"messages": [own], "max_tokens": 2})),
    NASTY.map(lambda own: ("/tokenize", {"inputs": own})),
)


@settings(max_examples=250, deadline=None, suppress_health_check=[*HealthCheck])
@given(REQUESTS)
def test_no_request_is_answered_with_a_500(strict: Served, request):
    path, body = request
    try:
        data = json.dumps(body).encode()
    except (ValueError, UnicodeEncodeError):
        return
    answer = strict.ask(path, data)
    assert answer.status in (200, 400, 422), (request, answer.body)
    if answer.status != 200:
        error = answer.json["error"]
        assert error["message"] if path.startswith("/v1") else error and answer.json["error_type"] == "validation"


def test_every_schema_is_in_the_openapi_document(strict: Served):
    document = strict.get("/openapi.json").json
    assert {"/", "/generate", "/generate_stream", "/info", "/tokenize", V1, CHATS} <= document["paths"].keys()
    properties = document["components"]["schemas"]["Parameters"]["properties"]
    assert properties.keys() == Parameters.model_fields.keys() | Parameters.REFUSED.keys()
