"""A server in this process over a tiny model, its clients, and the answers of plain decoding."""

import http.client
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import torch

from common import cli
from engine import Decoder, ModelRunner, Request, SamplingParams, generate
from kv_cache import FullKVCache
from models import load_model
from models.checkpoints.tokenizer import load_tokenizer
from serving.serve import Serve, Server, open_server
from tests.support.hf_tiny import N_TOKENS
from tests.support.programs import ROOT, overriding
from tests.support.rank_jobs import LAUNCHER, Job, launched
from tests.support.tiny import decode

END = 2
TGI, STREAM, V1, CHATS = "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[a]{% endif %}"
# Rows that differ in how many drafts are accepted: the draft sees little of its context.
PLAIN = "--max_batch 4 --max_length 320 --dtype float64"
FLAGS = f"{PLAIN} --draft_dtype same --gamma 3 --draft_budget 16 --n_sink 2"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, its terminator as text."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass(frozen=True)
class Served:
    server: Server
    thread: threading.Thread
    failures: list[BaseException]

    @property
    def url(self) -> str:
        return self.server.url

    def connect(self, timeout: float = 30) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST") -> Answer:
        """body: JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with closing(self.connect()) as connection:
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            given = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, given, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask(path, b"", headers, "GET")

    def json(self, path: str, body: Any) -> Any:
        """Return the answer to a request that succeeds; a stream's as its events."""
        answer = self.ask(path, body)
        assert answer.status == 200, answer.body
        return answer.events if answer.headers["content-type"].startswith("text/event-stream") else answer.json

    def generate(self, inputs: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer of /generate, with its details."""
        return self.json(TGI, {"inputs": inputs, "parameters": {"details": True, **parameters}})

    def ids(self, inputs: str, **parameters: Any) -> list[int]:
        return [token["id"] for token in self.generate(inputs, **parameters)["details"]["tokens"]]

    @property
    def openai(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    def begin(self, path: str, body: Any) -> http.client.HTTPConnection:
        """Send a request without waiting for the answer."""
        connection = self.connect()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def metrics(self, **headers: str) -> dict[str, float]:
        lines = self.get("/metrics", **headers).body.decode().splitlines()
        pairs = (line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.005)

    def until_idle(self) -> None:
        scheduler = self.server.service.scheduler
        self.until(lambda: not (self.answers or scheduler.requests), "idle")

    @property
    def answers(self) -> dict[int, Any]:
        return self.server.service.answers


@contextmanager
def serving(checkpoint: Path, flags: str = "", usual: str = FLAGS) -> Iterator[Served]:
    argv = overriding(f"--model {checkpoint} --port 0 {usual}", flags)
    _, server = open_server(cli.read(Serve, argv, prog="serving"))
    assert server is not None
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    seeds = Random(0).randrange  # so that requests without a seed have the same answers every time
    try:
        with patch("serving.schemas.secrets.randbelow", seeds):
            yield Served(server, thread, failures)
    finally:
        if thread.is_alive():
            server.drain(0)
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def serving_process(folder: Path, checkpoint: Path, n_ranks: int) -> Iterator[tuple[Job, Served]]:
    """`python -m serving` as a process, or as ranks of torchrun."""
    words = [*LAUNCHER] if n_ranks > 1 else [sys.executable]
    command = [*words, "-m", "serving", f"--model={checkpoint}", "--port=0", *FLAGS.split()]
    with launched(folder, command, {"PYTHONPATH": str(ROOT)}) as job:
        job.until(lambda: "serving " in job.err or job.launcher.poll() is not None, "a server")
        found = re.search(r"serving .* on (http://\S+)", job.err)
        assert found, job.err
        yield job, Served(SimpleNamespace(url=found[1]), None, [])  # type: ignore[arg-type]


@contextmanager
def slow(served: Served, seconds: float = 0.01) -> Iterator[None]:
    """Make rounds take longer."""
    controller = served.server.service.scheduler._decoder._controller
    choose = controller.choose

    def late(*given: float) -> Any:
        time.sleep(seconds)
        return choose(*given)

    controller.choose = late
    try:
        yield
    finally:
        controller.choose = choose


class Alone:
    """Plain decoding of a request without a server."""

    def __init__(self, checkpoint: Path) -> None:
        model = load_model(checkpoint / "model.pth", dtype=torch.float64)
        self._runner = ModelRunner(model, FullKVCache(model.config, 2, 400, dtype=torch.float64))
        self.tokenizer, self.vocab_size = load_tokenizer(checkpoint), N_TOKENS

    def tokens(
        self, inputs: str | Sequence[int], n: int, sampling: SamplingParams | None = None, i: int = 0
    ) -> list[int]:
        """Return the tokens of a request's sample `i`."""
        prompt = self.tokenizer.encode(inputs) if isinstance(inputs, str) else [*inputs]
        how = {"sampling": sampling or SamplingParams(), "verification": "coupled", "request_ids": [i]}
        return generate(self._runner, [prompt], max_new_tokens=n, stop_tokens=[END], **how).tokens[0]

    def text(self, inputs: str, n: int, sampling: SamplingParams | None = None, i: int = 0) -> str:
        return self.tokenizer.decode([token for token in self.tokens(inputs, n, sampling, i) if token != END])

    def scored(self, inputs: str, n: int, sampling: SamplingParams, i: int = 0) -> tuple[str, list[float]]:
        """Return a sample's text, and the log-probabilities of its tokens at temperature 1."""
        request = Request(self.tokenizer.encode(inputs), n, [END], sampling, i, logprobs=[])
        decode(Decoder(self._runner, verification="coupled"), request)
        text = self.tokenizer.decode([token for token in request.tokens if token != END])
        return text, [each.value for each in request.logprobs or []]

    def scores(self, ids: Sequence[int]) -> Any:
        """Return log-probabilities `[n - 1, V]` after each token but the last, by a forward over them."""
        model, tokens = self._runner.model, torch.tensor([[*ids]])
        cache = FullKVCache(model.config, 1, len(ids), dtype=torch.float64)
        return model(tokens, torch.arange(len(ids))[None], cache)[0, :-1].log_softmax(dim=-1)
