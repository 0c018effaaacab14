"""End tokens of generation_config.json, config.json and the chat template, and sampling that a server takes there."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import RunConfig, Session
from bench.config import Rows, Sizes, Target
from common.errors import ConfigError
from convert_hf_checkpoint import convert
from engine import ModelRunner, Request, SamplingParams, generate
from engine.decoding import Decoder
from kv_cache import FullKVCache
from models import load_model
from models.checkpoints.model_source import find_model
from tests.support.hf_tiny import SHAPE, TOKENS, random_model, save_folder
from tests.support.programs import run
from tests.support.serving_cases import PLAIN, Alone, serving

N_NEW = 48
TEXTS = ["the cat", "a much longer text about tea"]
# Tokens that the model below draws. config.json has OF_TEXT; both rows come to OF_TURN earlier, at different lengths.
OF_TEXT, OF_TURN = 75, 42
LLAMA_3 = {"eos_token_id": [OF_TEXT, OF_TURN], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
TURN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %} END\n{% endif %}{% endfor %}"


def make_folder(folder: Path, generation: dict[str, Any] | None) -> Path:
    """Write a checkpoint with that generation_config.json, and convert it."""
    save_folder(random_model(LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=OF_TEXT)), folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    convert(folder, folder)
    return folder


def by_transformers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    how = {"max_new_tokens": N_NEW, "do_sample": False, "pad_token_id": 0}
    rows = [torch.tensor([prompt]) for prompt in prompts]
    whole = [model.generate(row, attention_mask=torch.ones_like(row), **how)[0] for row in rows]
    return [row[len(prompt) :].tolist() for row, prompt in zip(whole, prompts, strict=True)]


def session_of(folder: Path) -> Session:
    target = Target(model=str(folder), device="cpu", dtype="float64")
    return Session.open(RunConfig(target, sizes=Sizes(2, None, N_NEW), rows=Rows(stop_at_eos=True)), TEXTS)


@pytest.mark.parametrize("generation", [None, LLAMA_3, {"eos_token_id": OF_TURN}])
def test_a_text_ends_where_it_ends_in_transformers(tmp_path: Path, generation: dict[str, Any] | None) -> None:
    """In a benchmark's session, and with a model that was loaded in Python, also from another folder."""
    folder = make_folder(tmp_path / "model", generation)
    session = session_of(folder)
    expected = by_transformers(folder, session.prompts)
    assert session.generate().tokens == expected
    convert(folder, tmp_path / "elsewhere")
    model = load_model(tmp_path / "elsewhere", dtype=torch.float64)
    runner = ModelRunner(model, FullKVCache(model.config, 2, 128, dtype=torch.float64))
    found = generate(runner, session.prompts, max_new_tokens=N_NEW, stop_tokens=model.config.eos_tokens)
    assert found.tokens == expected
    assert len({*map(len, expected)}) == 2 and (expected[0][-1] == OF_TURN) == bool(generation)


@pytest.mark.parametrize("source", ["generation_config.json", "template"])
def test_a_turn_ends_in_every_program(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template ends answers with OF_TURN, a control token."""
    folder = make_folder(tmp_path / "model", LLAMA_3 if source != "template" else None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([TOKENS[OF_TURN]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TURN.replace("END", TOKENS[OF_TURN]))
    convert(folder, folder, force=True)
    if source != "template":
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    session = session_of(folder)
    assert {*session.plan.target.source.end_tokens} == {OF_TEXT, OF_TURN}
    expected = session.generate().tokens
    assert [tokens[-1] for tokens in expected] == [OF_TURN] * 2
    with serving(folder, "--max_length 120 --gamma 0", PLAIN) as server:
        for text, tokens in zip(TEXTS, expected, strict=True):
            body = {"prompt": text, "max_tokens": N_NEW, "temperature": 0, "repetition_penalty": 1}
            answer = server.ask("/v1/completions", body).json
            assert answer["usage"]["completion_tokens"] == len(tokens)
            assert answer["choices"][0]["finish_reason"] == "stop"
    requests, submit = list[Request](), Decoder.submit
    monkeypatch.setattr(Decoder, "submit", lambda own, request: requests.append(request) or submit(own, request))
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert run("foretoken.py chat", [str(folder), "--device", "cpu", "--gen_len", "4"]).code == 0
    assert [request.stop_tokens for request in requests] == [{OF_TEXT, OF_TURN}] * 2


DAMAGED = ["{", "[]", '{"eos_token_id": "2"}', '{"eos_token_id": [3, 9999]}', '{"eos_token_id": true}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    """While converting, and later; a good file that comes later counts."""
    folder = make_folder(tmp_path / "model", None)
    path = folder / "generation_config.json"
    path.write_text(text)
    for read in (lambda x: convert(x, tmp_path / "out"), load_model, lambda x: find_model(str(x), "pth", None, "")):
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            read(folder)
    assert not (tmp_path / "out").exists()
    path.write_text(json.dumps(LLAMA_3))
    assert load_model(folder).config.eos_tokens == (OF_TEXT, OF_TURN)


RECOMMENDED = {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "repetition_penalty": 1.3, "max_new_tokens": 11}


def test_a_server_takes_what_a_request_leaves_out_from_the_file(
    chat_checkpoint: Path, alone: Alone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On each route; fields of the request count more, and so does the flag that turns it off."""
    folder = tmp_path / "model"
    shutil.copytree(chat_checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED | {"eos_token_id": 2}))
    sampling = {name: value for name, value in RECOMMENDED.items() if name != "max_new_tokens"} | {"seed": 4}
    chat = alone.tokenizer.encode("[user]hi\n[a]", add_bos=False)
    messages = [{"role": "user", "content": "hi"}]

    def asked(**given: Any) -> tuple[str, str, str]:
        said = server.ask("/v1/chat/completions", {"messages": messages, **given}).json["choices"][0]
        text = server.ask("/v1/completions", {"prompt": "a b c", "max_tokens": 20, **given}).json["choices"][0]
        return said["message"]["content"], text["text"], server.generate("tea", **given)["generated_text"]

    def drawn(n: int, **params: Any) -> tuple[str, str, str]:
        prompts = (chat, n), ("a b c", 20), ("tea", n)
        return tuple(alone.text(prompt, length, SamplingParams(**params)) for prompt, length in prompts)

    capsys.readouterr()
    with serving(folder) as server:
        said = [line for line in capsys.readouterr().err.splitlines() if "generation_config.json" in line]
        assert len(said) == 1 and all(f"{value}" in said[0] for value in RECOMMENDED.values())
        assert asked(seed=4) == drawn(11, **sampling)
        assert asked(seed=4, top_p=1, temperature=1.2) == drawn(11, **sampling | {"top_p": 1.0, "temperature": 1.2})
        assert asked(seed=4, temperature=0) == drawn(11, repetition_penalty=1.3)
        assert server.generate("tea", max_new_tokens=30, seed=4)["details"]["generated_tokens"] == 30
        room = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]}).json
        assert room["usage"]["completion_tokens"] < 11  # where a row has less room than the file says
    with serving(folder, "--no_sampling_defaults") as server:
        assert "generation_config.json" not in capsys.readouterr().err
        body = {"prompt": "a b c", "max_tokens": 20, "seed": 4, "temperature": 0.9}
        assert server.json("/v1/completions", body)["choices"][0]["text"] == drawn(11, seed=4, temperature=0.9)[1]
        assert server.generate("tea", seed=4)["details"]["generated_tokens"] > 11
    (folder / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(ConfigError, match=r"generation_config\.json"), serving(folder):
        pass
