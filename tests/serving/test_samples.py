"""Several samples and prompts in a request, and log-probabilities of prompts and of the likeliest tokens."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from huggingface_hub import InferenceClient

from engine.sampling.distribution import SamplingParams
from tests.support.hf_tiny import converted_llama
from tests.support.serving_cases import CHATS, END, STREAM, TGI, V1, Alone, Served, serving

PROMPTS = ["of the cat and the hat", "a", "1, 2, 3, 4, 5, 6, 7, 8" * 3]
CHAT = [{"role": "user", "content": "hello"}]
WARM = {"temperature": 0.9, "top_p": 0.95, "seed": 40}


@pytest.fixture(scope="module")
def served(chat_checkpoint: Path) -> Iterator[Served]:
    """A server that runs prompts in parts."""
    with serving(chat_checkpoint, "--prefill_tokens 16") as server:
        yield server


def drawn(alone: Alone, prompt: str, n_tokens: int, i: int = 0) -> tuple[str, list[float]]:
    return alone.scored(prompt, n_tokens, SamplingParams(**WARM), i)


def test_samples_of_several_prompts(served: Served, alone: Alone):
    """More than rows: a choice depends on seed and number alone, and a prompt is counted once."""
    body = {"prompt": PROMPTS, "n": 3, "max_tokens": 12, "logprobs": 0, **WARM}
    answer = served.json(V1, body)
    assert [choice["index"] for choice in answer["choices"]] == [*range(9)]
    for i, choice in enumerate(answer["choices"]):
        text, logprobs = drawn(alone, PROMPTS[i // 3], 12, i)
        assert choice["text"] == text and choice["finish_reason"] in ("length", "stop")
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-5)
    n_prompt = sum(len(alone.tokenizer.encode(prompt)) for prompt in PROMPTS)
    n_new = sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [answer["usage"][name] for name in names] == [n_prompt, n_new, n_prompt + n_new]
    assert len({choice["text"] for choice in answer["choices"]}) == 9 and answer["seed"] == WARM["seed"]


def test_requests_of_neighbouring_seeds_share_no_sample(served: Served):
    for path, own in ((V1, {"prompt": "a", "n": 4}), (CHATS, {"messages": CHAT, "n": 4})):
        given = [served.json(path, own | WARM | {"seed": seed, "max_tokens": 12})["choices"] for seed in (7, 8)]
        texts = [each["text"] if path == V1 else each["message"]["content"] for choices in given for each in choices]
        assert len({*texts}) == 8
    how = {"best_of": 4, "do_sample": True, "max_new_tokens": 12, **WARM}
    given = [served.generate("a", **how | {"seed": seed}) for seed in (7, 8)]
    others = [each["generated_text"] for answer in given for each in answer["details"]["best_of_sequences"]]
    assert len({*others, *(answer["generated_text"] for answer in given)}) == 8


def test_the_best_of_some_samples(served: Served, alone: Alone):
    expected = [drawn(alone, PROMPTS[1], 12, i) for i in range(5)]
    ranked = sorted(expected, key=lambda each: -fmean(each[1]))
    answer = served.json(V1, {"prompt": PROMPTS[1], "best_of": 5, "n": 2, "max_tokens": 12, **WARM})
    assert [choice["text"] for choice in answer["choices"]] == [text for text, _ in ranked[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None and answer["usage"]["completion_tokens"] == 60
    how = {"max_new_tokens": 12, "best_of": 5, "do_sample": True, **WARM}
    answer = InferenceClient(model=served.url).text_generation(PROMPTS[1], details=True, **how)
    sequences = answer.details.best_of_sequences
    assert [answer.generated_text, *(each.generated_text for each in sequences)] == [text for text, _ in ranked]
    assert [token.logprob for token in sequences[-1].tokens] == pytest.approx(ranked[-1][1], abs=1e-5)


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_prompts_are_scored_like_evaluations_want_it(served: Served, alone: Alone, max_tokens, monkeypatch):
    """Batches of ids with `echo`: log-probabilities at every position, also where rows hold the prompts already."""
    monkeypatch.setattr("engine.scores.SCORED", 4)
    prompts = [alone.tokenizer.encode(prompt) for prompt in PROMPTS]
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "echo": True, "seed": 1234}
    answer = served.json(V1, body)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        ids, scored = [*prompt, *alone.tokens(prompt, max_tokens)] if max_tokens else prompt, choice["logprobs"]
        every = alone.scores(ids)
        wanted = [row[id_].item() for row, id_ in zip(every, ids[1:], strict=True)]
        assert scored["token_logprobs"][0] is scored["top_logprobs"][0] is None
        assert scored["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-5)
        for value, top, row in zip(scored["token_logprobs"][1:], scored["top_logprobs"][1:], every, strict=True):
            assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-5)
            assert (value == max(top.values())) is (value > row.max().item() - 1e-5)
        assert choice["text"] == alone.tokenizer.decode(prompt) + alone.tokenizer.decode(ids[len(prompt) :])
        assert "".join(scored["tokens"]).endswith(choice["text"]) and len(scored["text_offset"]) == len(ids)
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3 * max_tokens
    streamed = served.ask(V1, body | {"prompt": PROMPTS[2], "stream": True}).events[:-1]
    assert "".join(event["choices"][0]["text"] for event in streamed) == answer["choices"][2]["text"]
    parts = [value for event in streamed for value in event["choices"][0]["logprobs"]["token_logprobs"]]
    assert parts[1:] == pytest.approx(answer["choices"][2]["logprobs"]["token_logprobs"][1:], abs=1e-5)
    served.until_idle()


def test_the_likeliest_tokens_at_every_position(served: Served, alone: Alone):
    """Drafted tokens have them, too, in each API's form; the chosen token is among them where it is likely."""
    body = {"messages": CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 20}
    content = served.json(CHATS, body | {"temperature": 0, "seed": 1})["choices"][0]["logprobs"]["content"]
    prompt = alone.tokenizer.encode("[user]hello\n[a]", add_bos=False)
    every = alone.scores([*prompt, *alone.tokens(prompt, 12)])[len(prompt) - 1 :]
    for token, row in zip(content, every, strict=True):
        top = [each["logprob"] for each in token["top_logprobs"]]
        assert top == pytest.approx(row.topk(20).values.tolist(), abs=1e-5)
        assert all(token[name] == token["top_logprobs"][0][name] for name in ("token", "logprob"))
    prompt, how = PROMPTS[0], {"max_new_tokens": 12, "top_n_tokens": 3, "decoder_input_details": True, **WARM}
    details = served.json(TGI, {"inputs": prompt, "parameters": how})["details"]
    ids = alone.tokenizer.encode(prompt)
    every = alone.scores([*ids, *(token["id"] for token in details["tokens"])])
    assert [token["id"] for token in details["prefill"]] == ids and details["prefill"][0]["logprob"] is None
    wanted = [row[id_].item() for row, id_ in zip(every, ids[1:], strict=False)]
    assert [token["logprob"] for token in details["prefill"][1:]] == pytest.approx(wanted, abs=1e-5)
    wanted = [row.topk(3).indices.tolist() for row in every[len(ids) - 1 :]]
    assert [[token["id"] for token in top] for top in details["top_tokens"]] == wanted
    del how["decoder_input_details"]
    events = served.json(STREAM, {"inputs": prompt, "parameters": how})
    assert [[token["id"] for token in event["top_tokens"]] for event in events] == wanted


def test_ids_without_a_token_have_names_of_their_own(tmp_path):
    """The embedding is larger than the tokenizer; such ids are drawn, and add no text."""
    converted_llama(tmp_path, vocab_size=320, max_position_embeddings=400, eos_token_id=END)
    likely = {str(id_): 40 - id_ / 100 for id_ in (300, 301, 302, 303)}
    with serving(tmp_path) as server:
        for prompt in ("a b c", "tea"):
            body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 20, "logit_bias": likely}
            (choice,) = server.json(V1, body)["choices"]
            assert choice["text"] == "" and {*choice["logprobs"]["tokens"]} <= {f"token_id:{id_}" for id_ in likely}
            places = choice["logprobs"]["top_logprobs"]
            details = server.generate(prompt, max_new_tokens=6, logit_bias=likely, top_n_tokens=20)["details"]
            for likeliest, scored in zip(places, details["top_tokens"], strict=True):
                names = [f"token_id:{token['id']}" for token in scored if token["id"] > 256]
                assert [token["text"] for token in scored if token["id"] > 256] == names
                assert {*names} <= likeliest.keys() and len(names) > 1
