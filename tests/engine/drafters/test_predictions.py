"""Predictions: texts that requests bring, or a file, for a drafter to look matches up in; they change no token."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Decoder, Request, SamplingParams, generate
from engine.drafters.combined import Combined
from engine.drafters.suffix import Suffix
from engine.requests import Outcome, Progress
from kv_cache.streaming import Streaming
from tests.support.serving_cases import PLAIN, Served, serving
from tests.support.tiny import decode, random_prompts, self_draft, tiny_runner

CHATS, CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}


@pytest.mark.parametrize("kind", ["alone", "beside a model"])
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_predictions_change_no_token_and_are_accepted(mode: str, kind: str):
    """Predict, of five requests in three rows: an answer with a changed token, nothing, rubbish, the end of an answer,
    an answer."""
    runner, prompts = tiny_runner(3), random_prompts([12, 5, 30, 3, 9])
    sampling = SamplingParams(1.1, seed=5) if mode == "coupled" else SamplingParams()
    plain = generate(runner, prompts, max_new_tokens=24, sampling=sampling, verification=mode).tokens
    changed = [(token + 1) % 61 if place == 11 else token for place, token in enumerate(plain[0])]
    predictions = [changed, [], random_prompts([40], seed=3)[0], plain[3][10:], plain[4]]

    def decoded(predictions: list[list[int]]) -> tuple[list[Request], list[tuple[int, int]]]:
        """Return requests, and of each the drafts copied from its prediction, and those of them that were accepted."""
        drafter, progress, predicted = Suffix(runner, 3), Progress(), [(0, 0)] * 5

        def count(request: Request, outcome: Outcome, n_kept: int) -> None:
            n_predicted = min(request.n_predicted, len(outcome.drafts))
            assert {*outcome.drafts[:n_predicted]} <= {*request.prediction}
            drafted, accepted = predicted[request.id]
            predicted[request.id] = drafted + n_predicted, accepted + min(n_predicted, len(outcome.block) - 1)

        progress.decoded = count
        if kind == "beside a model":
            drafter = Combined(runner, self_draft(runner, Streaming(8, n_sink=2), 3), [drafter], least_match=2)
        decoder = Decoder(runner, drafter=drafter, verification=mode, progress=progress)
        each = enumerate(zip(prompts, predictions, strict=True))
        requests = [Request(prompt, 24, (), sampling, i, prediction=text) for i, (prompt, text) in each]
        decode(decoder, *requests)
        assert [request.tokens for request in requests] == plain
        return requests, predicted

    (without, none), (with_, predicted) = decoded([[]] * 5), decoded(predictions)
    assert {*none} == {(0, 0)} == {predicted[1]}
    for i in (0, 3, 4):
        drafted, accepted = predicted[i]
        assert 0 < accepted <= drafted <= with_[i].counts.drafted
        assert with_[i].counts.rounds < without[i].counts.rounds
    assert with_[4].counts.rounds <= 9 and with_[1].counts.rounds == without[1].counts.rounds


@pytest.fixture(scope="module")
def reading(chat_checkpoint) -> Iterator[Served]:
    with serving(chat_checkpoint, "--text_drafts suffix --text_match 2") as server:
        yield server


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.7, "seed": 11}], ids=["greedy", "sampled"])
def test_a_server_drafts_by_a_prediction(reading: Served, how: dict[str, Any]):
    ask = reading.openai.chat.completions.create
    how = {"model": "m", "messages": CHAT["messages"], "max_tokens": 40, **how}
    plain = ask(**how, extra_body={"speculate": False})
    assert plain.usage.completion_tokens_details is None
    text = plain.choices[0].message.content
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        answer = ask(**how, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == text
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 0 <= details.rejected_prediction_tokens
        n_predicted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        assert n_predicted <= answer.timings["draft_n"]
        assert details.accepted_prediction_tokens <= answer.timings["draft_n_accepted"]
    stream = ask(**how, prediction={"type": "content", "content": text}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_a_prediction_that_no_drafter_reads_is_taken_and_counts_nothing(served: Served):
    how = CHAT | {"temperature": 0}
    counted = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    for content in ("a", "ab " * served.server.service.intake.max_total):
        answer = served.json(CHATS, how | {"prediction": {"type": "content", "content": content}})
        assert answer["usage"]["completion_tokens_details"] == counted


def test_a_prediction_that_a_server_may_not_draft_by_is_refused(chat_checkpoint):
    """It may be an answer of the same random numbers, in rejection mode."""
    body = CHAT | {"prediction": {"type": "content", "content": "a"}}
    with serving(chat_checkpoint, "--draft suffix --verification rejection", PLAIN) as server:
        assert server.ask(CHATS, body | {"seed": 3}).json["error"]["param"] == "prediction"
        for fine in ({}, {"seed": 3, "temperature": 0}):
            assert server.ask(CHATS, body | fine).status == 200


def test_the_benchmarks_draft_by_a_file(call, tmp_path: Path):
    """The text of a first run's row is the file of the second."""
    script, rows, text = "tests/selfspec_benchmark.py", tmp_path / "rows.jsonl", tmp_path / "text.txt"
    flags = "--B 2 --prefix_len 40 --gen_len 40 --gamma 3 --dtype float64 --no_baseline --temperature 1 --seed 3"
    flags += " --verification coupled --text_drafts suffix --text_match 1 --draft_budget 16"
    without = call(script, f"{flags} --save_rows {rows}").record
    text.write_text(json.loads(rows.read_text().splitlines()[0])["text"])
    record = call(script, f"{flags} --draft_text {text}").record
    assert record["tokens_sha256"] == without["tokens_sha256"] and record["accepted"] > without["accepted"]
    assert "--draft_text" in call(script, f"{flags} --draft_text {tmp_path / 'none.txt'}").refusal
