"""Parameters of requests on every route, under load: speculation changes nothing in an answer.

In the greedy and the coupled mode, whole answers are those of plain rounds: text, ids, log-probabilities, usage and
reasons. With rejection, samples depend on the load; tests of the joint law check their distribution.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.sampling import SamplingParams
from tests.support.serving_cases import CHATS as V1_CHATS
from tests.support.serving_cases import TEMPLATE, TGI, V1, Alone, Served, serving

Fields = dict[str, Any]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
# The path of each route, and what makes it stream.
ROUTES: dict[str, tuple[str, Fields]] = {
    "completion": (V1, {}),
    "completion stream": (V1, USAGE),
    "chat": (V1_CHATS, {}),
    "chat stream": (V1_CHATS, USAGE),
    "generate": (TGI, {}),
    "generate stream": (TGI, {"stream": True}),
}
COMPLETIONS, CHATS, GENERATE = ((name, f"{name} stream") for name in ("completion", "chat", "generate"))
OPENAI = COMPLETIONS + CHATS
MODES: dict[str, Fields] = {"greedy": {"temperature": 0, "seed": 5}, "coupled": {"temperature": 0.9, "seed": 5}}
Cell = tuple[str, str]  # a route and a mode
CELLS: list[Cell] = [(route, mode) for route in ROUTES for mode in MODES]
# Fields of answers that depend on the load.
VARIES = ("id", "created", "seed", "timings", "speculation", "prompt_tokens_details", "completion_tokens_details")
GROWS = ("text", "content", "arguments")


def on(*routes: str, **fields: Any) -> dict[str, Fields]:
    """Return fields for some routes, all if none is named."""
    return dict.fromkeys(routes or ROUTES, fields)


FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Oslo", "Bergen"]}, "n": {"type": "integer"}}}
SCHEMA |= {"required": ["name", "n"], "additionalProperties": False}

# The fields of each parameter by route; a route that is absent lacks the parameter.
PARAMETERS: dict[str, dict[str, Fields]] = {
    "filters": on(temperature=1.3, top_k=40, top_p=0.8, seed=2**40),
    "do_sample": on(*GENERATE, do_sample=True, temperature=2.0),
    "stop": on(stop=["e", "q", "(", "7"]),
    "truncate": on(truncate=4),
    "logprobs": on(*COMPLETIONS, logprobs=None) | on(*CHATS, logprobs=False) | on(*GENERATE, details=False),
    "chat_template_kwargs": on(*CHATS, chat_template_kwargs={"enable_thinking": False}),
    "chat": on(*GENERATE, chat=True),
    "neutral": on(*OPENAI, n=1, model="m", user="u") | on(*GENERATE, typical_p=1, watermark=False),
    "penalties": on(repetition_penalty=1.7, presence_penalty=1.5, frequency_penalty=0.7),
    "logit_bias": on(logit_bias={"40": 3, "50": -100, "60": 2.5}),
    "bad_words": on(bad_words=["I", "Z"]),
    "min_tokens": on(min_tokens=9, logit_bias={"2": 6}),
    "ignore_eos": on(ignore_eos=True, logit_bias={"2": 6}),
    "n": on(*OPENAI, n=3),
    "best_of": on("completion", n=2, best_of=3) | on("generate", best_of=3),
    "echo": on(*COMPLETIONS, echo=True, logprobs=2, stop=["e", "7"]),
    "roles": on(
        *CHATS,
        tools=[{"type": "function", "function": FUNCTION}],
        messages=[
            {"role": "system", "content": "be"},
            {"role": "developer", "content": [{"type": "text", "text": "brief"}]},
            {"role": "user", "content": "How warm is it?", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4 degrees", "tool_call_id": "c"},
        ],
    ),
    "tools": on(*CHATS, tools=[{"type": "function", "function": FUNCTION}], parallel_tool_calls=False),
    "prediction": on(*CHATS, prediction={"type": "content", "content": "IZZ|oIj7 the cat and the hat"}),
}
if find_spec("llguidance"):
    PARAMETERS |= {
        "json_object": on(*OPENAI, response_format={"type": "json_object"}),
        "json_schema": on(
            *OPENAI,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            max_tokens=40,
        )
        | on(*GENERATE, grammar={"type": "json", "value": SCHEMA}, max_new_tokens=40),
        "tool_choice": on(
            *CHATS, tools=[{"type": "function", "function": FUNCTION}], tool_choice="required", max_tokens=80
        ),
        "regex": on(*GENERATE, grammar={"type": "regex", "value": "[0-9]{3}-[a-z]{4,8}"}),
    }
# Request fields that are fields of `SamplingParams`, too.
OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "repetition_penalty", "presence_penalty"}
OF_SAMPLING |= {"frequency_penalty", "logit_bias"}
WITHOUT_EFFECT = ("neutral", "prediction")


@pytest.fixture(scope="module")
def loaded(chat_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose chat template reads tools and a variable, and that drafts by texts, too."""
    folder = tmp_path_factory.mktemp("loaded") / "model"
    shutil.copytree(chat_checkpoint, folder)
    reads = "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking is false %}!{% endif %}"
    (folder / "chat_template.jinja").write_text(reads + TEMPLATE)
    with serving(folder, "--max_batch 8 --max_length 399 --text_drafts suffix --text_match 2") as server:
        yield server


def prompt_of(cell: Cell) -> str:
    return f"{cell[1]} " * (1 + CELLS.index(cell) % 5) + cell[0]


def request_of(cell: Cell, fields: Fields, **more: Any) -> tuple[str, Fields]:
    """Return the path and the body of a cell's request with the fields of a parameter; prompts differ between cells."""
    (route, mode), prompt = cell, prompt_of(cell)
    path, streams = ROUTES[route]
    base: dict[str, Fields] = {
        TGI: {"max_new_tokens": 16, "details": True},
        V1: {"prompt": prompt, "max_tokens": 16, "logprobs": 0},
        V1_CHATS: {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "logprobs": True},
    }
    spec = base[path] | MODES[mode] | fields
    spec |= ({"temperature": 0} if mode == "greedy" else {}) | more
    if path == TGI:
        return path, {"inputs": prompt, "parameters": spec, **streams}
    return path, spec | streams


def ask(served: Served, cell: Cell, fields: Fields, **more: Any) -> Any:
    """Return a cell's answer, a stream's as a whole."""
    path, body = request_of(cell, fields, **more)
    answer = served.json(path, body)
    if path == TGI or not body.get("stream"):
        return answer
    *events, end = answer
    assert end == "[DONE]"
    whole = None
    for event in events:
        whole = joined(whole, event)
    return whole


def joined(old: Any, new: Any, name: str = "") -> Any:
    """Return two chunks of a stream as one: texts and lists grow, and what has an index joins what has the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: joined(old.get(key), new.get(key), key) for key in {**old, **new}}
    if isinstance(old, list) and isinstance(new, list):
        if all(isinstance(each, dict) and "index" in each for each in (*old, *new)):
            by_index = {each["index"]: each for each in old}
            for each in new:
                by_index[each["index"]] = joined(by_index.get(each["index"]), each)
            return [by_index[index] for index in sorted(by_index)]
        return old + new
    if isinstance(old, str) and isinstance(new, str) and name in GROWS:
        return old + new
    return old if new is None else new


def steady(answer: Any) -> Any:
    """Return an answer without the fields that depend on the load."""
    if isinstance(answer, dict):
        return {key: steady(value) for key, value in answer.items() if key not in VARIES}
    return [steady(each) for each in answer] if isinstance(answer, list) else answer


def alike(one: Any, other: Any) -> bool:
    """True for answers that are equal, log-probabilities up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return one == other and type(one) is type(other)


def text_of(answer: Any) -> str:
    last = answer[-1] if isinstance(answer, list) else answer
    if "generated_text" in last:
        return last["generated_text"]
    (choice,) = last["choices"]
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"])["content"]


def total(answer: Any, key: str) -> int:
    """Return the sum of the numbers with this key, wherever they are."""
    if isinstance(answer, list):
        return sum(total(each, key) for each in answer)
    if not isinstance(answer, dict):
        return 0
    return sum(value if name == key and type(value) is int else total(value, key) for name, value in answer.items())


def leave(served: Served, cell: Cell, fields: Fields) -> None:
    """Send a long request, read the beginning of its stream, and leave."""
    length = {"max_new_tokens" if cell[0] in GENERATE else "max_tokens": 100}
    with closing(served.begin(*request_of(cell, fields, **length))) as connection:
        if cell[0].endswith("stream"):
            connection.getresponse().readline()


def answers(served: Served, parameter: dict[str, Fields], cells: Sequence[Cell]) -> dict[Cell, tuple[Any, Any]]:
    """Return the answers of cells that have the parameter, with drafts and in plain rounds. Some clients leave."""
    fields = {cell: parameter[cell[0]] for cell in cells if cell[0] in parameter}
    with ThreadPoolExecutor(16) as pool:
        futures, leaving = [], []
        for place, cell in enumerate(fields):
            futures.append(pool.submit(ask, served, cell, fields[cell]))
            if place % 3 == 0:
                leaving.append(pool.submit(leave, served, cell, fields[cell]))
        drafted = [future.result(60) for future in futures]
        assert all(future.result(60) is None for future in leaving)
        plain = [*pool.map(lambda cell: ask(served, cell, fields[cell], speculate=False), fields)]
    return dict(zip(fields, zip(drafted, plain, strict=True), strict=True))


@pytest.fixture(scope="module")
def usual(loaded: Served) -> dict[Cell, tuple[Any, Any]]:
    """Answers without parameters."""
    return answers(loaded, on(), CELLS)


def check(given: dict[Cell, tuple[Any, Any]]) -> None:
    wrong = {cell: pair for cell, pair in given.items() if not alike(*map(steady, pair))}
    assert not wrong, f"not those of plain rounds: {[*wrong]}, such as {next(iter(wrong.values()))}"


def by_plain_decoding(alone: Alone, cell: Cell, fields: Fields) -> str:
    """Return the text of a cell's answer with fields of `SamplingParams`, decoded without a server."""
    prompt, is_chat = prompt_of(cell), ROUTES[cell[0]][0] == V1_CHATS
    how = MODES[cell[1]] | fields | ({"temperature": 0} if cell[1] == "greedy" else {})
    how |= {"logit_bias": {int(id_): bias for id_, bias in how.get("logit_bias", {}).items()}}
    ids = alone.tokenizer.encode(f"[user]{prompt}\n[a]", add_bos=False) if is_chat else prompt
    return alone.text(ids, 16, SamplingParams(**how))


def test_answers_without_parameters_are_those_of_plain_decoding(usual, alone: Alone):
    check(usual)
    for cell, (drafted, _) in usual.items():
        assert text_of(drafted) == by_plain_decoding(alone, cell, {}), cell
    for drafted, plain in usual.values():
        assert total(drafted, "drafted") > total(drafted, "accepted") and total(plain, "drafted") == 0
    assert sum(total(drafted, "accepted") for drafted, _ in usual.values()) > len(usual)


@pytest.mark.parametrize("name", PARAMETERS)
def test_answers_are_those_of_plain_rounds(loaded: Served, alone: Alone, usual, name, record_property):
    """Those with parameters of sampling alone are those of plain decoding without a server, too."""
    turn = [*PARAMETERS].index(name)
    cells = [cell for place, cell in enumerate(CELLS) if (place + place // 2 + turn) % 2]  # each route in a mode
    given = answers(loaded, PARAMETERS[name], cells)
    check(given)
    record_property("count: served answers equal to those of plain rounds", len(given))
    if {field for fields in PARAMETERS[name].values() for field in fields} <= OF_SAMPLING:
        for cell, (drafted, _) in given.items():
            assert text_of(drafted) == by_plain_decoding(alone, cell, PARAMETERS[name][cell[0]]), cell
    changed = [cell for cell, (_, plain) in given.items() if not alike(steady(plain), steady(usual[cell][1]))]
    assert changed or name in WITHOUT_EFFECT
