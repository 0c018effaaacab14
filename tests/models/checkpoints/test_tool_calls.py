"""Calls of tools: found in texts of both formats however they come, and sent to OpenAI's client."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI

from models.checkpoints.chat_template import _compiled
from models.checkpoints.tool_calls import ToolCallParser, parse
from tests.support.serving_cases import Alone, Served

NAMES = ["get_weather", "search"]
PARIS, FIND = {"city": "Paris", "note": "</tool_call> {né"}, {"query": "cat", "limit": 3}


def hermes(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def llama(name: str, arguments: object) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


WEATHER, SEARCH = ("get_weather", PARIS), ("search", FIND)
CASES: list[tuple[str, str, list[tuple[str, object]]]] = [
    (hermes(*WEATHER), "", [WEATHER]),
    (f"\nI look.\n{hermes(*WEATHER)}\n{hermes(*SEARCH)}\n", "\nI look.\n", [WEATHER, SEARCH]),
    (hermes(*WEATHER) + " Done.", "Done.", [WEATHER]),
    (hermes(*WEATHER).removesuffix("\n</tool_call>"), "", [WEATHER]),
    ('<tool_call>{"name": "search", "arguments": {"query": "a\nb"}}</tool_call>', "", [("search", {"query": "a\nb"})]),
    (llama(*WEATHER), "", [WEATHER]),
    (f"\n{llama(*WEATHER)}; {llama(*SEARCH)}", "", [WEATHER, SEARCH]),
    (f"<|python_tag|>{llama(*WEATHER)}", "", [WEATHER]),
    (f"Look: <|python_tag|>{llama(*SEARCH)};{llama(*SEARCH)}", "Look: ", [SEARCH, SEARCH]),
]
TEXTS = [
    hermes("another", {}),
    hermes("search", "cat"),
    hermes(*WEATHER)[:-20],
    llama(*WEATHER)[:-1],
    f"As JSON: {llama(*WEATHER)}",
    '{"answer": [1, 2]}',
    '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>',
    '{"name": "search", "parameters": {"limit": NaN}}',
    '{"name": "search", "parameters": {"limit": 1e999}}',
    '{"name": "search", "parameters": ' + "[" * 5000,
    "<|python_tag|>print(3)",
    "if a <tool_cal",
    "",
]
CASES += [(text, text, []) for text in TEXTS]


@pytest.mark.parametrize(("text", "rest", "calls"), CASES)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_calls_are_found_however_a_text_comes(text, rest, calls, data):
    at = sorted(data.draw(st.lists(st.integers(0, min(len(text), 200)), max_size=9)))
    parser, sent = ToolCallParser(NAMES), ""
    for start, end in pairwise([0, *at, len(text)]):
        sent += parser.add(text[start:end])
        assert rest.startswith(sent)
    sent += parser.add("", is_last=True)
    assert sent == rest
    assert [(call["name"], json.loads(call["arguments"])) for call in parser.found] == calls


def test_text_before_a_mark_is_sent_at_once():
    parser = ToolCallParser(NAMES)
    pieces = {"I ": "I ", "<b>": "<b>", " <tool": " ", "s> <tool_call>{": "<tools> ", "}": ""}
    assert [*map(parser.add, pieces)] == [*pieces.values()]


def test_without_tools_nothing_is_a_call():
    text = hermes(*WEATHER)
    assert ToolCallParser().add(text) == text
    assert parse(text, []) == (text, [])


TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
MESSAGES = [{"role": "user", "content": "hello"}]
SHORT = [("get_weather", {"city": "Paris"}), ("search", {"query": "é"})]
SAYS = f"I look.\n{hermes(*SHORT[0])}\n{hermes(*SHORT[1])}"


@pytest.fixture
def saying(served: Served, alone: Alone, monkeypatch):
    """Function that has the server say a text, whatever the model says, under a template that reads tools."""
    scheduler, template = served.server.service.scheduler, served.server.service.template
    reads = _compiled(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content or m.tool_calls[0].function.arguments.city }}{% endfor %}"
    )
    monkeypatch.setattr(served.server.service, "template", type(template)(template.path, reads, {}, template.tokenizer))
    publish = scheduler.publish

    def say(text: str) -> None:
        served.until_idle()
        ids = alone.tokenizer.encode(text, add_bos=False)

        def instead(updates):
            changed = []
            for update in updates:
                n = len(ids) if update.finish else 5
                tokens, ids[:] = ids[:n], ids[n:]
                changed.append(update._replace(tokens=tokens, finish=None if ids else "stop"))
            publish(changed)

        monkeypatch.setattr(scheduler, "publish", instead)

    yield say
    served.until_idle()


def test_openais_client_gets_calls_and_answers_them(served: Served, saying):
    client = OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    how = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "stop": ["ELSE"], "max_tokens": 40}
    saying(SAYS)
    (choice,) = client.chat.completions.create(**how).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.\n")
    first, second = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in (first, second)] == SHORT
    assert first.id != second.id
    saying(SAYS)
    (choice,) = client.chat.completions.create(parallel_tool_calls=False, **how).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    saying(SAYS)
    with client.chat.completions.stream(**how) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices
    assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I look.\n")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed.message.tool_calls] == SHORT
    saying(hermes(*SHORT[0]))
    message = client.chat.completions.create(**how).choices[0].message
    assert message.content is None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    saying("It rains.")
    answer = client.chat.completions.create(**how | {"messages": [*MESSAGES, message, *results]})
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "It rains.")
    prompt = served.server.service.tokenizer.encode(
        f"{''.join(map(json.dumps, TOOLS))}[user]hello[assistant]Paris[tool]rain", add_bos=False
    )
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_calls_are_text_where_no_tool_may_be_called(served: Served, saying, body):
    saying(SAYS)
    answer = served.ask(
        "/v1/chat/completions", {"messages": MESSAGES, "temperature": 0.0, "max_tokens": 40, **body}
    ).json
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": SAYS}
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["prompt_tokens"] == len("[user]hello")
