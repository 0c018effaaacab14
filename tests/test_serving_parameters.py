"""Parameters of requests on every route, under load: speculation changes nothing in an answer.

In the greedy and the coupled mode, whole answers are those of plain rounds: text, ids, log-probabilities, usage and
reasons. With rejection, samples depend on the load; tests of the joint law check their distribution.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from serving_cases import Served, serving

Fields = dict[str, Any]
Parameter = dict[str, Fields]  # the fields that a kind of route gets; a kind that is absent lacks the parameter
COMPLETIONS, CHATS, TGI = "completions", "chats", "tgi"
# The path of each route, its kind, and what makes it stream.
ROUTES: dict[str, tuple[str, str, Fields]] = {
    "completion": ("/v1/completions", COMPLETIONS, {}),
    "completion stream": ("/v1/completions", COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}}),
    "chat": ("/v1/chat/completions", CHATS, {}),
    "chat stream": ("/v1/chat/completions", CHATS, {"stream": True, "stream_options": {"include_usage": True}}),
    "generate": ("/generate", TGI, {}),
    "generate stream": ("/generate", TGI, {"stream": True}),
}
MODES: dict[str, Fields] = {"greedy": {"temperature": 0, "seed": 5}, "coupled": {"temperature": 0.9, "seed": 5}}
Cell = tuple[str, str]  # a route and a mode
CELLS: list[Cell] = [(route, mode) for route in ROUTES for mode in MODES]
N_LEAVING = 4  # of 16 requests in flight
# Fields of answers that depend on the load.
VARIES = ("id", "created", "timings", "speculation", "prompt_tokens_details")
GROWS = ("text", "content", "arguments")


def on_all(**fields: Any) -> Parameter:
    return {COMPLETIONS: fields, CHATS: fields, TGI: fields}


def openai(**fields: Any) -> Parameter:
    return {COMPLETIONS: fields, CHATS: fields}


# A line for each parameter. Those of WITHOUT_EFFECT may leave every answer as it is.
PARAMETERS: dict[str, Parameter] = {
    "temperature": on_all(temperature=0.5),
    "top_k": on_all(top_k=3),
    "top_p": on_all(top_p=0.5),
    "seed": on_all(seed=2**40),
    "filters": on_all(temperature=1.3, top_k=40, top_p=0.8, seed=3),
    "do_sample": {TGI: {"do_sample": True, "temperature": 1.0}},
    "stop": on_all(stop=["e", "q", "(", "7"]),
    "max_tokens": openai(max_tokens=5) | {TGI: {"max_new_tokens": 5}},
    "max_completion_tokens": {CHATS: {"max_tokens": None, "max_completion_tokens": 3}},
    "truncate": on_all(truncate=4),
    "logprobs": {COMPLETIONS: {"logprobs": None}, CHATS: {"logprobs": False}, TGI: {"details": False}},
    "prompt": {COMPLETIONS: {"prompt": [[5, 6, 7, 8] * 9]}},
    "messages": {
        CHATS: {"messages": [{"role": role, "content": f"{role}?"} for role in ("system", "user", "assistant", "user")]}
    },
    "chat_template_kwargs": {CHATS: {"chat_template_kwargs": {"enable_thinking": False}}},
    "chat": {TGI: {"chat": True}},
    "return_full_text": {TGI: {"return_full_text": True}},
    "neutral": openai(n=1, model="m", user="u") | {TGI: {"typical_p": 1, "watermark": False}},
}
WITHOUT_EFFECT = ("neutral", "chat_template_kwargs")


@pytest.fixture(scope="module")
def loaded(chat_checkpoint) -> Iterator[Served]:
    with serving(chat_checkpoint, "--max_batch 8") as server:
        yield server


def request_of(cell: Cell, fields: Fields, **more: Any) -> tuple[str, Fields]:
    """Return the path and the body of a cell's request with the fields of a parameter; prompts differ between cells."""
    route, mode = cell
    path, kind, streams = ROUTES[route]
    prompt = f"{mode} " * (1 + CELLS.index(cell) % 5) + route
    usual = {TGI: {"max_new_tokens": 16, "details": True}, CHATS: {"logprobs": True}, COMPLETIONS: {"logprobs": 0}}[
        kind
    ]
    spec = {"max_tokens": 16} if kind != TGI else {}
    spec |= usual | MODES[mode] | fields | ({"temperature": 0} if mode == "greedy" else {}) | more
    if kind == TGI:
        return path, {"inputs": prompt, "parameters": spec, **streams}
    where = {"messages": [{"role": "user", "content": prompt}]} if kind == CHATS else {"prompt": prompt}
    return path, where | spec | streams


def ask(served: Served, cell: Cell, fields: Fields, **more: Any) -> Any:
    """Return a cell's answer, a stream's as a whole."""
    path, body = request_of(cell, fields, **more)
    answer = served.ask(path, body)
    assert answer.status == 200, (cell, answer.body)
    if not body.get("stream"):
        return answer.json
    if path == "/generate":
        return answer.events
    *events, end = answer.events
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


def total(answer: Any, key: str) -> int:
    """Return the sum of the numbers with this key, wherever they are."""
    if isinstance(answer, list):
        return sum(total(each, key) for each in answer)
    if not isinstance(answer, dict):
        return 0
    return sum(value if name == key and type(value) is int else total(value, key) for name, value in answer.items())


def leave(served: Served, cell: Cell, fields: Fields, reads: bool) -> None:
    """Send a long request, read the beginning of its answer or nothing, and leave."""
    length = {"max_new_tokens" if ROUTES[cell[0]][1] == TGI else "max_tokens": 200}
    with closing(served.begin(*request_of(cell, fields, **length))) as connection:
        if reads:
            connection.getresponse().readline()


def answers(served: Served, parameter: Parameter) -> dict[Cell, tuple[Any, Any]]:
    """Return the answers of a parameter's cells, with drafts and in plain rounds. Clients that leave are among them."""
    cells = [cell for cell in CELLS if ROUTES[cell[0]][1] in parameter]
    fields = {cell: parameter[ROUTES[cell[0]][1]] for cell in cells}
    streams = [cell for cell in cells if cell[0].endswith("stream")]
    with ThreadPoolExecutor(16) as pool:
        futures = []
        leaving = [streams[i % len(streams)] for i in range(math.ceil(len(cells) * N_LEAVING / len(CELLS)))]
        for place, cell in enumerate(cells):
            futures.append(pool.submit(ask, served, cell, fields[cell]))
            if place < len(leaving):
                pool.submit(leave, served, leaving[place], fields[leaving[place]], place % 2 == 0)
        drafted = [future.result(60) for future in futures]
        plain = [*pool.map(lambda cell: ask(served, cell, fields[cell], speculate=False), cells)]
    return dict(zip(cells, zip(drafted, plain, strict=True), strict=True))


@pytest.fixture(scope="module")
def usual(loaded: Served) -> dict[Cell, tuple[Any, Any]]:
    """Answers without parameters."""
    return answers(loaded, on_all())


def check(given: dict[Cell, tuple[Any, Any]]) -> None:
    wrong = {cell: pair for cell, pair in given.items() if not alike(*map(steady, pair))}
    assert not wrong, f"not those of plain rounds: {wrong}"


def test_answers_without_parameters_are_those_of_plain_rounds(usual):
    check(usual)
    for drafted, plain in usual.values():
        assert total(drafted, "drafted") > total(drafted, "accepted") and total(plain, "drafted") == 0
    assert sum(total(drafted, "accepted") for drafted, _ in usual.values()) > len(usual)


@pytest.mark.parametrize("name", PARAMETERS)
def test_answers_are_those_of_plain_rounds(loaded: Served, usual, name):
    given = answers(loaded, PARAMETERS[name])
    check(given)
    changed = [cell for cell, (_, plain) in given.items() if not alike(steady(plain), steady(usual[cell][1]))]
    assert changed or name in WITHOUT_EFFECT
