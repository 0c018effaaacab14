"""Answers under a grammar parse, and drafts change nothing of them: every drafter and mode, and over HTTP."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import InferenceClient
from jinja2 import Template
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig

from convert_hf_checkpoint import convert
from engine import Decoder, ModelRunner, Request, SamplingParams
from engine.drafters.ngram import NGram
from engine.requests import Progress
from engine.sampling.grammars import Grammar, Grammars
from models import load_model
from models.checkpoints.reasoning import CLOSE, OPEN, TAGS, parted
from models.checkpoints.tokenizer import load_tokenizer
from tests.support.checkpoint_folders import ALPHABET, BOS, save_tokenizer
from tests.support.drafters import Drafters
from tests.support.hf_tiny import SHAPE, random_model
from tests.support.policies import Size
from tests.support.recorded_graph import RecordedGraph, RecordedGraphs
from tests.support.serving_cases import TEMPLATE, Served, serving
from tests.support.tiny import decode, full_cache


def an_object(**properties: dict) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMA = an_object(
    colour={"enum": ["red", "green"]},
    count={"type": "integer", "minimum": -99, "maximum": 99},
    name={"type": "string", "maxLength": 5},
    at=an_object(given={"type": "boolean"}),
    sizes={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
)
JSON, PLATE = ("json_schema", json.dumps(SCHEMA)), ("regex", "[A-Z]{2}-[0-9]{3}")
# A text has several splits into tokens, so that few bytes that are certain are a certain token.
MERGES = [("{", '"'), ('"', ":"), ('"', ","), ("c", "o"), ("o", "u"), ("co", "l"), ("t", "h"), ('"', "}")]
VOCABULARY = [BOS, *ALPHABET, *(a + b for a, b in MERGES)]
END = 0  # a control token, so that no text contains it
PROMPTS = ["a", "of the cat and the hat", "Näher " * 5, '{"colour": "red", "count": 1']
WAYS = [SamplingParams(0.8, seed=3), SamplingParams(1.1, top_k=20, seed=4), SamplingParams(), SamplingParams(1, seed=5)]


# The end of a prompt: reasoning is left out, has begun, or may begin.
OPENINGS = "{% if shows %}{% for m in messages %}{{ m.reasoning_content }}{% endfor %}{% endif %}"
OPENINGS += "{% if not thinking %}<think>\n\n</think>\n\n{% elif thinking == 'begun' %}<think>\n{% endif %}"


def add_tags(folder: Path, is_control: bool, tags: Sequence[str] = TAGS) -> None:
    """Add tags, by default those of reasoning, to a tokenizer, as tokens whose text is read or as control tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, special=is_control, normalized=False) for tag in tags])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("grammars")
    shape = SHAPE | {"vocab_size": len(VOCABULARY) + 3, "max_position_embeddings": 400}
    random_model(LlamaConfig(**shape, bos_token_id=0, eos_token_id=END)).save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY, MERGES, adds_bos=True)
    add_tags(folder, is_control=False)
    convert(folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE + OPENINGS)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder / "model.pth", dtype=torch.float64)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer, model) -> Grammars:
    return Grammars(tokenizer, model.config.vocab_size, [END])


DRAFTERS = ("streaming", "combined, standalone, full", "speculated, ngram")
KINDS = {"greedy": DRAFTERS[2:], "coupled": DRAFTERS, "rejection": DRAFTERS[:2]}


def answers(kind: str, mode: str, model, tokenizer, grammars, new_graphs=None) -> list[Request]:
    """Decode four requests in three rows: JSON, no grammar, JSON, and a regular expression."""
    runner = ModelRunner(model, full_cache(model, 3, 300), new_graphs=new_graphs)
    specs, ways = [JSON, None, JSON, PLATE], WAYS if mode != "greedy" else [SamplingParams()] * 4
    requests = [
        Request(tokenizer.encode(prompt), 150 if spec else 30, [END], way, i, grammar=spec and grammars.start(*spec))
        for i, (prompt, spec, way) in enumerate(zip(PROMPTS, specs, ways, strict=True))
    ]
    drafter = Drafters(runner, 4, Size(3, 300, n_kept=2, window=14, dtype=torch.float64))(kind)
    decode(Decoder(runner, drafter=drafter, verification=mode), *requests)
    for request, spec in zip(requests, specs, strict=True):
        if spec:
            text = tokenizer.decode(request.tokens)
            assert request.finish_reason == "stop", text
            require(text, spec)
    return requests


def require(text: str, spec: tuple[str, str] = JSON) -> None:
    """Assert that a text follows the grammar."""
    if spec is PLATE:
        assert len(text) == 6 and text[:2].isupper() and text[2] == "-" and text[3:].isdigit()
        return
    found = json.loads(text)
    assert [*found] == SCHEMA["required"] and found["colour"] in ("red", "green") and -99 <= found["count"] <= 99
    assert len(found["name"]) <= 5 and found["at"]["given"] in (True, False)
    assert len(found["sizes"]) <= 3 and all(0 <= size <= 9 for size in found["sizes"])


@pytest.mark.parametrize("mode", KINDS)
def test_drafts_change_no_answer(mode, model, tokenizer, grammars):
    """In the coupled mode, rounds with drafts are captured."""
    plain, graphs = answers("none", mode, model, tokenizer, grammars), list[RecordedGraph]()
    for kind in KINDS[mode]:
        captures = mode == "coupled" and not kind.startswith("combined")
        new_graphs = partial(RecordedGraphs, recorded=graphs) if captures else None
        drafted = answers(kind, mode, model, tokenizer, grammars, new_graphs)
        assert mode == "rejection" or [r.tokens for r in drafted] == [r.tokens for r in plain], kind
        rounds = [(ours.counts.rounds, theirs.counts.rounds) for ours, theirs in zip(drafted, plain, strict=True)]
        # Tokens that the grammar forces are drafted, whatever the drafter is.
        assert mode == "rejection" or all(ours < theirs for ours, theirs in (rounds[0], rounds[2])), kind
    assert mode != "coupled" or any(graph.replays for graph in graphs)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_a_grammar_begins_after_reasoning_that_ends_among_drafts(mode, model, tokenizer, grammars):
    """Reasoning has begun, or may begin. Its end is among accepted drafts, with tokens of the grammar after it."""
    opening, closing = (tokenizer.pieces().index(tag) for tag in TAGS)
    likely = ((opening, 8.0), (closing, 2.0))
    texts: dict[str, list[list[int]]] = {}
    for kind in ("none", "streaming"):
        runner, progress, accepted = ModelRunner(model, full_cache(model, 3, 300)), Progress(), list[list[int]]()
        progress.decoded = lambda request, outcome, n_kept, accepted=accepted: accepted.append(outcome.block[:-1])
        drafter = Drafters(runner, 4, Size(3, 300, n_kept=2, window=14, dtype=torch.float64))(kind)
        ways = [replace(way, temperature=1.0, logit_bias=likely) for way in WAYS[:3]]
        given = [*zip(PROMPTS, ways, [True, None, True], [JSON, JSON, PLATE], strict=False)]
        requests = [
            Request(tokenizer.encode(prompt), 200, [END], way, i, grammar=grammars.start(*spec, reasons))
            for i, (prompt, way, reasons, spec) in enumerate(given)
        ]
        decode(Decoder(runner, drafter=drafter, verification=mode, progress=progress), *requests)
        for request, (_, _, reasons, spec) in zip(requests, given, strict=True):
            reasoning, answer = parted(tokenizer.decode(request.tokens), reasons, is_last=True)
            assert request.finish_reason == "stop" and closing in request.tokens, (reasoning, answer)
            require(answer, spec)
        assert kind == "none" or any(closing in drafts[:-1] for drafts in accepted)
        texts[kind] = [request.tokens for request in requests]
    assert mode == "rejection" or texts["streaming"] == texts["none"]


@pytest.mark.parametrize("is_control", [False, True])
def test_tags_are_tokens_with_or_without_a_text(is_control, tmp_path):
    save_tokenizer(tmp_path, VOCABULARY, MERGES, adds_bos=True)
    add_tags(tmp_path, is_control)
    tokenizer = load_tokenizer(tmp_path)
    grammars = Grammars(tokenizer, len(VOCABULARY) + 3, [END])
    thought, answers = "so <b", {"json_schema": '{"type": "boolean"}', "regex": "true|false", "lark": 'start: "true"'}
    for kind, text in answers.items():
        for reasons, before in ((True, ""), (None, OPEN), (None, None), (False, None)):
            whole = "true" if before is None else f"{before}{thought}{CLOSE}\n\ntrue"
            grammar = grammars.start(kind, text, reasons)
            grammar.advance(tokenizer.encode_chat(whole, control=True))
            grammar.advance([END])
            assert not grammar.error and not grammar.forced(), (kind, whole)
            outside = grammars.start(kind, text, reasons)
            outside.advance(tokenizer.encode_chat(whole.replace("true", "trie"), control=True))
            assert outside.error


def test_parameters_that_exclude_all_that_a_grammar_allows_give_way(model, tokenizer, grammars):
    runner, (end, red) = ModelRunner(model, full_cache(model, 1, 300)), (END, tokenizer.encode("A", add_bos=False)[0])
    sampling = SamplingParams(1.0, seed=1, min_tokens=9, bad_words=[[red]])
    request = Request([5, 6], 20, [end], sampling, grammar=grammars.start("regex", "A|AA"))
    decode(Decoder(runner, drafter=NGram(runner, gamma=3), verification="coupled"), request)
    assert tokenizer.decode(request.tokens) in ("A", "AA") and request.finish_reason == "stop"


def test_an_answer_whose_grammar_cannot_go_on_is_an_error(model, tokenizer, grammars):
    from llguidance import LLMatcher, LLParserLimits

    text, limits = LLMatcher.grammar_from_json_schema({"enum": ["red", "green"]}), LLParserLimits(max_lexer_states=10)
    matcher = LLMatcher(grammars._tokenizer, text, limits=limits, log_level=0)
    runner = ModelRunner(model, full_cache(model, 2, 300))
    failing = Request([5, 6], 20, [END], grammar=Grammar(matcher))
    other = Request([5, 7], 150, [END], grammar=grammars.start(*JSON))
    decode(Decoder(runner, drafter=NGram(runner, gamma=3)), failing, other)
    assert failing.finish_reason == "error" and "grammar" in failing.error
    require(tokenizer.decode(other.tokens))


@pytest.fixture(scope="module")
def structured(folder):
    with serving(folder) as server:
        yield server


FORMATS = {
    "json_schema": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}},
    "json_object": {"type": "json_object"},
    "text": {"type": "text"},
}


def test_clients_get_json_on_every_route(structured: Served):
    openai, hub = structured.openai, InferenceClient(model=structured.url)
    how = {"model": "m", "max_tokens": 150, "seed": 3, "response_format": FORMATS["json_schema"]}
    messages = [{"role": "user", "content": "hello"}]
    chat = openai.chat.completions.create(messages=messages, **how).choices[0].message
    require(chat.content)
    assert not hasattr(chat, "reasoning_content")
    chunks = openai.chat.completions.create(messages=messages, stream=True, **how)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.content
    require(structured.json("/v1/completions", {"prompt": "q", **how})["choices"][0]["text"])
    plate = {"type": "regex", "value": PLATE[1]}
    require(structured.generate("q", grammar=plate, seed=5, do_sample=True)["generated_text"], PLATE)
    require(hub.text_generation("q", max_new_tokens=150, grammar={"type": "json", "value": SCHEMA}))
    json_object = {"response_format": FORMATS["json_object"]}
    cut = openai.completions.create(model="m", prompt="q", max_tokens=3, seed=3, extra_body=json_object)
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].text.startswith("{")


@pytest.mark.parametrize("thinking,form", [("begun", "json_schema"), ("begun", "text"), ("free", "json_schema")])
def test_reasoning_is_apart_from_answers(structured: Served, thinking: str, form: str):
    """Whole with drafts, and streamed in plain rounds, with a grammar and without; answers may be sent back."""
    opening, closing = (structured.server.service.intake.tokenizer.pieces().index(tag) for tag in TAGS)
    ask = partial(structured.openai.chat.completions.create, model="m", max_tokens=100, seed=4)
    bias = {str(opening): 8 if thinking == "free" else -100, str(closing): 2}
    more = {"logit_bias": bias, "chat_template_kwargs": {"thinking": thinking}}
    messages: list = [{"role": "user", "content": "hello"}]
    how = {"messages": messages, "response_format": FORMATS[form]}
    whole = ask(**how, logprobs=True, extra_body=more).choices[0]
    given = (getattr(whole.message, "reasoning_content", ""), whole.message.content)
    deltas = [chunk.choices[0].delta for chunk in ask(**how, stream=True, extra_body=more | {"speculate": False})]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (reasoning, "".join(delta.content or "" for delta in deltas)) == given
    text = "".join(each.token for each in whole.logprobs.content)
    assert CLOSE in text and CLOSE not in reasoning and reasoning in text and not reasoning.startswith("\n")
    assert reasoning or thinking == "free"  # drawn at once, the closing tag leaves none
    if form != "text":
        require(given[1])
    messages += [{"role": "assistant", "content": "yes", "reasoning_content": "hm"}, messages[0]]
    shown, hidden = ({"thinking": thinking, "shows": shows} for shows in (True, False))
    n_shown, n_hidden = (
        ask(messages=messages, extra_body=more | {"chat_template_kwargs": kwargs}).usage.prompt_tokens
        for kwargs in (shown, hidden)
    )
    assert n_shown == n_hidden + 2


WRONG_FORMATS: tuple[dict, ...] = (
    {"type": "json_schema"},
    {"type": "xml"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}},
    {"type": "json_schema", "json_schema": {"schema": {"title": "\ud800"}}},
    {"type": "json_schema", "json_schema": {"schema": {}, "schemas": {}}},
)


def test_a_wrong_grammar_is_a_wrong_field(structured: Served):
    given = [
        ("/v1/completions", {"prompt": "a", "response_format": wrong}, "response_format") for wrong in WRONG_FORMATS
    ]
    ignores = {"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True}
    given.append(("/v1/completions", ignores, "ignore_eos"))
    for value in ("(a", {}):
        parameters = {"grammar": {"type": "regex", "value": value}}
        given.append(("/generate", {"inputs": "a", "parameters": parameters}, "parameters.grammar"))
    for route, body, names in given:
        answer = structured.ask(route, body)
        assert answer.status in (400, 422) and names in str(answer.json["error"]), body


@pytest.mark.parametrize("is_hermes", [True, False])
def test_a_required_call_streams_the_arguments_of_the_whole_answer(
    structured: Served, monkeypatch, tmp_path, is_hermes
):
    text = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}<think></think>"
    service, source = structured.server.service, tmp_path / "template"
    source.write_text(text + "{# <tool_call> #}" * is_hermes)
    reads_tools = replace(service.intake.template, path=source, template=Template(text))
    monkeypatch.setattr(service.intake, "template", reads_tools)
    how = {"model": "m", "max_tokens": 200, "tool_choice": "required"}
    referring = {"$ref": "#/$defs/note", "$defs": {"note": SCHEMA}}  # as pydantic writes schemas
    how["tools"] = [{"type": "function", "function": {"name": "note", "parameters": referring}}]
    for content, temperature in (("hi", 0), ("a", 1.2)):
        given = how | {"messages": [{"role": "user", "content": content}], "temperature": temperature, "seed": 5}
        (whole,) = structured.openai.chat.completions.create(**given).choices
        chunks = [chunk.choices[0] for chunk in structured.openai.chat.completions.create(stream=True, **given)]
        ((first,), *others) = filter(None, (chunk.delta.tool_calls for chunk in chunks))
        (call,) = whole.message.tool_calls
        assert (first.function.name, first.function.arguments) == ("note", "") and len(others) > 5
        assert "".join(part.function.arguments for (part,) in others) == call.function.arguments
        require(call.function.arguments)
        assert chunks[-1].finish_reason == whole.finish_reason == "tool_calls"


def test_without_the_library_grammars_are_refused(structured: Served, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    structured.server.service.intake.__dict__.pop("_grammars", None)
    answer = structured.ask("/v1/completions", {"prompt": "a", "response_format": FORMATS["json_object"]})
    assert answer.status in (400, 422) and "pip install -r requirements-grammar.txt" in answer.json["error"]["message"]
    assert structured.ask("/v1/completions", {"prompt": "a"}).status == 200
