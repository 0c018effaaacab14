"""Put a server under load by clients that stream completions, and sum up the times of their requests."""

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
import numpy

import bench
from common.checkout import ROOT
from common.errors import ConfigError, DataError, flag
from reproduce.helpers.records import Record

ROUTE, QUESTION, TIMEOUT_SECONDS = "/v1/completions", "\n\nAnd what was said of it afterwards?\n\n", 600
# Metrics of the server: new tokens, rounds, seconds in rounds, and seconds between rounds.
COUNTERS = tuple(f"foretoken_{name}_total" for name in ("decode_tokens", "rounds", "round_seconds", "between_seconds"))


class Answer(NamedTuple):
    """The answer to a request. sent, times: seconds of `time.perf_counter` of the request and of events with tokens.
    counts: the server's `timings` and `speculation`, if it sends them. error: why there is no answer."""

    sent: float
    times: list[float]
    n_tokens: int
    text: str
    counts: Mapping[str, Any]
    error: str | None = None


class Phase(NamedTuple):
    """A load. seconds: from the first request to the last answer. counters: increases of the server's COUNTERS."""

    answers: list[Answer]
    seconds: float
    counters: Mapping[str, float]


class Endpoint(NamedTuple):
    """A server, and the fields of each request. Foretoken's server alone takes `speculate`."""

    url: str
    body: Mapping[str, Any]


@contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """Start a server with these flags, and yield its address once it answers. Errors: ConfigError if it ends before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "foretoken.py"), "serve", *flags, "--port", port]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while True:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", trust_env=False).is_success:
                        break
                if process.poll() is not None:
                    given = " ".join(flags)
                    fix = f"try `python -m serving {given}`"
                    raise ConfigError("the server has ended", flag("server"), given, "flags that it starts with", fix)
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


async def complete(client: httpx.AsyncClient, endpoint: Endpoint, prompt: str, seed: int) -> Answer:
    """Send a request and stream its answer."""
    body = {**endpoint.body, "prompt": prompt, "seed": seed, "stream": True, "stream_options": {"include_usage": True}}
    sent, times, texts, last = time.perf_counter(), [], [], {}
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
        return Answer(sent, times, 0, "", {}, f"{type(error).__name__}: {error}")
    n_tokens = last.get("usage", {}).get("completion_tokens", len(times))
    counts = {name: last[name] for name in ("timings", "speculation") if name in last}
    return Answer(sent, times, n_tokens, "".join(texts), counts, None if times else "no token came")


async def load(endpoint: Endpoint, prompts: Sequence[str], n_clients: int, n_turns: int = 1) -> Phase:
    """Run a conversation of `n_turns` requests for each prompt, as many at a time as there are clients."""
    waiting, talks = deque(enumerate(prompts)), list[list[Answer]]([] for _ in prompts)
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:

        async def converse() -> None:
            while waiting:
                number, text = waiting.popleft()
                for turn in range(n_turns):
                    talks[number].append(await complete(client, endpoint, text, number * n_turns + turn))
                    text += talks[number][-1].text + QUESTION

        async def counters() -> dict[str, float]:
            lines = (await client.get("/metrics")).text.splitlines() if "speculate" in endpoint.body else []
            pairs = (line.rpartition(" ")[::2] for line in lines)
            return {name: float(value) for name, value in pairs if name in COUNTERS}

        before, began = await counters(), time.perf_counter()
        await asyncio.gather(*(converse() for _ in range(n_clients)))
        seconds, after = time.perf_counter() - began, await counters()
    return Phase(list(chain.from_iterable(talks)), seconds, {name: after[name] - before[name] for name in after})


def failed(answers: Sequence[Answer]) -> list[DataError]:
    """Return an error if a request has no answer, else nothing."""
    errors = [answer.error for answer in answers if answer.error]
    seen, required = f"{len(errors)} of {len(answers)}: {''.join(errors[:1])}", "an answer to every request"
    return [DataError("requests failed", ROUTE, seen, required, "look at the server's messages")] if errors else []


def summary(phases: Sequence[Phase]) -> Record:
    """Sum up all requests of phases. ttft: time to the first token. tpot: time per further token. Rates of decoding
    count the time in rounds by the server's clock; None if the server does not report it."""
    answers = [answer for phase in phases for answer in phase.answers]
    good, seconds = [answer for answer in answers if answer.error is None], sum(phase.seconds for phase in phases)
    totals = (sum(phase.counters.get(name, 0) for phase in phases) for name in COUNTERS)
    n_decoded, n_rounds, in_rounds, between = totals
    counts = [answer.counts for answer in good if answer.counts]
    timings = {name: sum(each["timings"][name] for each in counts) for name in ("prompt_n", "cache_n", "predicted_n")}
    drafts = {name: sum(each["speculation"][name] for each in counts) for name in ("rounds", "drafted", "accepted")}
    longer = [answer for answer in good if answer.n_tokens > 1]
    n_tokens = sum(answer.n_tokens for answer in good)
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens": n_tokens,
        "output_tokens_per_second": n_tokens / seconds,
        **percentiles("ttft_ms", [answer.times[0] - answer.sent for answer in good]),
        **percentiles("tpot_ms", [(each.times[-1] - each.times[0]) / (each.n_tokens - 1) for each in longer]),
        "prompt_tokens": timings["prompt_n"] + timings["cache_n"] if counts else None,
        "reused_prompt_tokens": timings["cache_n"] if counts else None,
        "accepted_share": bench.ratio(drafts["accepted"], drafts["drafted"]),
        "tokens_per_round": bench.ratio(timings["predicted_n"] - len(counts), drafts["rounds"]),
        "decode_tokens_per_second": bench.ratio(n_decoded - len(counts), in_rounds),
        "round_ms": bench.ratio(1e3 * in_rounds, n_rounds),
        "between_share": bench.ratio(between, between + in_rounds),
    }


def percentiles(name: str, seconds: Sequence[float]) -> Record:
    """Return the 50th and the 99th percentile of times, in ms; None if there are no times."""
    return {f"{name}_p{n}": 1e3 * float(numpy.percentile(seconds, n)) if seconds else None for n in (50, 99)}


def beside(plain: Sequence[Phase], phases: Sequence[Phase]) -> Record:
    """Sum up phases, and compare them with plain rounds of the same requests. identical_answers: answers with the text
    of the plain answer."""
    before, row = summary(plain), summary(phases)
    for name, rate in (("speedup", "output_tokens_per_second"), ("decode_speedup", "decode_tokens_per_second")):
        row[name] = bench.ratio(row[rate], before[rate])
    answers, plain_answers = ([answer for phase in each for answer in phase.answers] for each in (phases, plain))
    pairs = zip(answers, plain_answers, strict=True)
    n_identical = sum(answer.error is None and answer.text == other.text for answer, other in pairs)
    return row | {"identical_answers": n_identical}
