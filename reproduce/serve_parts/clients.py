"""Clients of a server: they stream completions, each its next when the last one is there, and note when tokens came."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import httpx2 as httpx

from common.checkout import ROOT
from common.errors import ConfigError, DataError, flag

ROUTE, QUESTION, TIMEOUT_SECONDS = "/v1/completions", "\n\nAnd what was said of it afterwards?\n\n", 600
# Of the server's metrics, how much these grow: tokens, rounds, seconds in rounds, and seconds between them.
COUNTED = tuple(f"foretoken_{name}_total" for name in ("decode_tokens", "rounds", "round_seconds", "between_seconds"))


class Answer(NamedTuple):
    """asked, times: seconds of `time.perf_counter`, those of events with tokens. said: the server's own counts, if it
    has any. error: why there is no answer."""

    asked: float
    times: list[float]
    n_tokens: int
    text: str
    said: Mapping[str, Any]
    error: str | None = None


class Phase(NamedTuple):
    """seconds: from the first request to the last answer. counters: how much each has grown."""

    answers: list[Answer]
    seconds: float
    counters: Mapping[str, float]


class Endpoint(NamedTuple):
    """A server, and what each request says; only our own takes `speculate`."""

    url: str
    body: Mapping[str, Any]


@contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """The address of a server with these flags, once it answers. Errors: ConfigError if it ends before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "foretoken.py"), "serve", *flags, "--port", port]
    quiet, url = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}, f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, **quiet) as process:
        try:
            while True:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", trust_env=False).is_success:
                        break
                if process.poll() is not None:
                    said = " ".join(flags)
                    fix = f"look at what `python -m serving {said}` says"
                    raise ConfigError("the server has ended", flag("server"), said, "what it starts with", fix)
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


async def ask(client: httpx.AsyncClient, endpoint: Endpoint, prompt: str, seed: int) -> Answer:
    body = {**endpoint.body, "prompt": prompt, "seed": seed, "stream": True, "stream_options": {"include_usage": True}}
    asked, times, texts, last = time.perf_counter(), [], [], {}
    try:
        async with client.stream("POST", ROUTE, json=body) as response:
            if response.is_error:
                raise ValueError((await response.aread()).decode())
            async for line in response.aiter_lines():
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
                if "error" in event:
                    raise ValueError(event["error"])
                last |= {name: value for name, value in event.items() if value is not None}
                for choice in event.get("choices", []):
                    if choice["text"] or choice.get("finish_reason") is None:
                        times.append(time.perf_counter())
                        texts.append(choice["text"])
    except (httpx.HTTPError, ValueError) as error:
        return Answer(asked, times, 0, "", {}, f"{type(error).__name__}: {error}")
    n_tokens = last.get("usage", {}).get("completion_tokens", len(times))
    said = {name: last[name] for name in ("timings", "speculation") if name in last}
    return Answer(asked, times, n_tokens, "".join(texts), said, None if times else "no token came")


async def load(endpoint: Endpoint, prompts: Sequence[str], n_clients: int, n_turns: int = 1) -> Phase:
    """Conversations that begin so, as many at a time as there are clients."""
    waiting, talks = deque(enumerate(prompts)), list[list[Answer]]([] for _ in prompts)
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:

        async def converse() -> None:
            while waiting:
                number, text = waiting.popleft()
                for turn in range(n_turns):
                    talks[number].append(await ask(client, endpoint, text, number * n_turns + turn))
                    text += talks[number][-1].text + QUESTION

        async def counters() -> dict[str, float]:
            lines = (await client.get("/metrics")).text.splitlines() if "speculate" in endpoint.body else []
            pairs = (line.rpartition(" ")[::2] for line in lines)
            return {name: float(value) for name, value in pairs if name in COUNTED}

        before, began = await counters(), time.perf_counter()
        await asyncio.gather(*(converse() for _ in range(n_clients)))
        seconds, after = time.perf_counter() - began, await counters()
    return Phase(list(chain.from_iterable(talks)), seconds, {name: after[name] - before[name] for name in after})


def failed(answers: Sequence[Answer]) -> list[DataError]:
    """Why not all are answers, if so."""
    errors = [one.error for one in answers if one.error]
    seen, required = f"{len(errors)} of {len(answers)}: {''.join(errors[:1])}", "an answer to every request"
    return [DataError("requests failed", ROUTE, seen, required, "look at what the server says")] if errors else []
