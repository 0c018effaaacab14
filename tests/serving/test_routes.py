"""The routes of text-generation-inference and OpenAI, by unmodified clients and as bytes on the wire."""

import shutil

import pytest

from engine.sampling.distribution import SamplingParams
from tests.support.serving_cases import PLAIN, Alone, Served, serving

PROMPTS = ["a", "of the cat and the hat", "Näher " * 9, "1, 2, 3, 4, 5, 6, 7, 8" * 4]
MESSAGES = [{"role": "user", "content": "hello"}]


def test_every_event_says_where_its_token_came_from(served: Served):
    events = served.ask("/generate_stream", {"inputs": PROMPTS[3], "parameters": {"max_new_tokens": 40}}).events
    assert [event["index"] for event in events] == [*range(1, 41)]
    assert all(event["generated_text"] is event["details"] is None for event in events[:-1])
    rounds = [event["speculation"]["round"] for event in events]
    drafted = [event["speculation"]["drafted"] for event in events]
    assert rounds[0] == 0 and not drafted[0] and rounds == sorted(rounds) and {*rounds} == {*range(rounds[-1] + 1)}
    speculation, timings = events[-1]["details"]["speculation"], events[-1]["details"]["timings"]
    assert sum(drafted) == speculation["accepted"] == timings["draft_n_accepted"] > 0
    assert speculation["drafted"] == timings["draft_n"] == 3 * rounds[-1] > speculation["verified"]
    rate = speculation["accepted"] / speculation["verified"]
    assert events[-1]["speculation"]["acceptance_rate"] == pytest.approx(rate, abs=1e-4)
    assert speculation["mean_accepted_length"] == pytest.approx(39 / rounds[-1], abs=1e-4)
    for number in range(1, rounds[-1] + 1):  # drafts come first, then the target's token
        origins = [is_draft for is_draft, of in zip(drafted, rounds, strict=True) if of == number]
        assert origins == sorted(origins, reverse=True) and origins.count(False) <= 1


SAMPLING = [({"temperature": 1.0, "top_p": 1.0}, False), ({"do_sample": False, "temperature": 0.5}, False)]
SAMPLING += [({"do_sample": True}, True), ({"top_k": 9}, True)]


@pytest.mark.parametrize(("parameters", "samples"), SAMPLING)
def test_sampling_parameters_turn_sampling_on(served: Served, alone: Alone, parameters, samples):
    params = {"temperature": 1.0, "seed": 21} | {key: value for key, value in parameters.items() if key != "do_sample"}
    sampling = SamplingParams(**params) if samples else SamplingParams()
    assert served.ids("sample", max_new_tokens=12, seed=21, **parameters) == alone.tokens("sample", 12, sampling)


def test_completions(served: Served, alone: Alone):
    ask = served.openai.completions.create
    answer = ask(model="m", prompt=PROMPTS[1], max_tokens=9, logprobs=0, temperature=0.7, seed=4)
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and len(choice.logprobs.tokens) == 9
    assert choice.logprobs.text_offset[0] == 0 and choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
    assert answer.timings["draft_n"] == answer.speculation["drafted"]
    ids = alone.tokenizer.encode(PROMPTS[1])
    for prompt in (PROMPTS[1], [PROMPTS[1]], ids, [ids]):
        answer = ask(model="m", prompt=prompt, temperature=0)
        assert answer.choices[0].text == alone.text(PROMPTS[1], 16)
    stream = ask(model="m", prompt=PROMPTS[1], max_tokens=30, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == alone.text(PROMPTS[1], 30)
    short = served.ask("/v1/completions", {"prompt": "a" * 310, "temperature": 0.0}).json
    assert short["usage"]["completion_tokens"] == 5  # room of the row


def test_chat(served: Served, alone: Alone):
    prompt = alone.tokenizer.encode("[user]hello\n[a]", add_bos=False)
    expected = alone.tokenizer.decode(alone.tokens(prompt, 15))
    ask = served.openai.chat.completions.create
    how = {"model": "m", "max_completion_tokens": 15, "temperature": 0}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    for messages in (MESSAGES, parts):
        answer = ask(messages=messages, logprobs=True, **how)
        assert answer.choices[0].message.content == expected and answer.choices[0].message.role == "assistant"
        assert answer.usage.prompt_tokens == len(prompt)
    assert len(answer.choices[0].logprobs.content) == 15
    *some, last, usage = ask(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **how)
    assert [chunk.choices[0].delta.role for chunk in some] == ["assistant", *[None] * (len(some) - 1)]
    assert "".join(chunk.choices[0].delta.content for chunk in some) == expected
    assert last.choices[0].finish_reason == "length" and last.speculation["rounds"] > 0
    assert usage.choices == [] and usage.usage.completion_tokens == 15
    spoken = [*MESSAGES, {"role": "assistant", "content": None}, {"role": "assistant"}, *MESSAGES]
    raw = served.ask("/v1/chat/completions", {"messages": spoken, "max_tokens": 3, "stream": True})
    assert raw.body.endswith(b"data: [DONE]\n\n") and raw.headers["content-type"].startswith("text/event-stream")
    answer = served.generate("hello", max_new_tokens=15, chat=True)
    assert answer["generated_text"] == expected


def test_a_model_without_a_chat_template_or_a_draft(chat_checkpoint, alone: Alone, tmp_path):
    shutil.copytree(chat_checkpoint, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").unlink()
    with serving(tmp_path / "model", "--gamma 0", PLAIN) as server:
        assert server.ask("/v1/chat/completions", {"messages": MESSAGES}).json["error"]["param"] == "messages"
        assert server.ask("/generate_stream", {"inputs": "abc", "parameters": {"chat": True}}).status == 422
        info, details = server.get("/info").json, server.generate("abc", max_new_tokens=9)["details"]
        assert info["chat"] is False and info["speculation"] is None
        assert details["speculation"]["drafted"] == 0
        assert [token["id"] for token in details["tokens"]] == alone.tokens("abc", 9)


def test_a_server_describes_itself(served: Served):
    info, models = served.get("/info").json, served.openai.models
    assert (info["max_total_tokens"], info["max_batch_size"], info["max_concurrent_requests"]) == (316, 4, 68)
    assert info["speculation"] == {"draft": "self", "gamma": 3, "auto": False}
    assert info["chat"] is True and info["verification"] == "coupled"
    (model,) = models.list().data
    assert models.retrieve(model.id) == model and model.id == info["model_id"]
    assert served.get("/v1/models/another").json["error"]["code"] == "model_not_found"
    assert served.ask("/health", b"", method="HEAD").status == served.ask("/", b"", method="HEAD").status == 200
    assert served.get("/health").status == 200 and b"<html" in served.get("/").body.lower()
    assert served.get("/nothing").json["error_type"] == "not_found"
    assert {"/", "/generate", "/v1/chat/completions"} <= served.get("/openapi.json").json["paths"].keys()
