"""Measure the server under load: speculation next to plain rounds of the same server, and next to other servers.

    python -m reproduce.serve_load --output reproduction/serve_load.jsonl
    python -m reproduce.serve_load --clients 8 --turns 6
    python -m reproduce.serve_load --clients 8 --peers other=http://127.0.0.1:8123

A client sends its next request to /v1/completions when the last one is answered; with --turns, the next prompt contains
the last prompt and answer. The same requests run plainly, with speculation, and at the peers, every second time in
reverse order. Prompts are stretches from random places of a book. Before each load, short ones make the server's rows
forget the last load.
"""

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from typing import Any, NamedTuple

import httpx2 as httpx
import numpy

import bench
from bench.config import Output, Text
from common import cli
from common.checkout import ROOT
from common.errors import DataError, refuse, require_at_least
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from common.tables import console
from reproduce.helpers.columns import of
from reproduce.helpers.records import Record
from serving.serve import Serve

MODES = PLAIN, SPECULATION = "plain", "speculation"
SHORT = 8  # tokens of a prompt that makes a row forget
NOTE = "On a CPU, fresh prompts are mostly prefill, which speculation does not change; decode tok/s counts rounds."
COLUMNS = (
    "clients mode errors output_tokens_per_second over_plain rounds_rate decode_speedup ttft_ms_p50 "
    "ttft_ms_p99 tpot_ms_p50 tpot_ms_p99 accepted_share tokens_per_round reused_prompt_tokens identical_answers"
)
ROUTE, QUESTION, TIMEOUT_SECONDS = "/v1/completions", "\n\nAnd what was said of it afterwards?\n\n", 600
# Metrics of the server: new tokens, seconds in rounds, and seconds between rounds.
COUNTERS = tuple(f"foretoken_{name}_total" for name in ("decode_tokens", "round_seconds", "between_seconds"))


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "foretoken.py"), "serve", *flags, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while True:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", trust_env=False).is_success:
                        break
                if process.poll() is not None:
                    given = " ".join(flags)
                    what, fix = "the server has ended", f"try `python -m serving {given}`"
                    refuse("server", given, "flags that it starts with", what, fix)
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def model_of(url: str) -> str:
    """Return the name of the model that another server has. Errors: ConfigError if it names none."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_SECONDS, trust_env=False).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
        refuse("peers", f"{url}: {error}", "a server that answers /v1/models", "no model is named", "start the server")


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
    counts = last.get("timings", {}) | last.get("speculation", {})
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
    n_decoded, in_rounds, between = (sum(phase.counters.get(name, 0) for phase in phases) for name in COUNTERS)
    names = ("prompt_n", "cache_n", "predicted_n", "rounds", "drafted", "accepted")
    counts = [answer.counts for answer in good if answer.counts.keys() >= {*names}]  # llama.cpp sends a few of these
    sums = {name: sum(each[name] for each in counts) for name in names}
    longer = [answer for answer in good if answer.n_tokens > 1]
    n_tokens = sum(answer.n_tokens for answer in good)
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": seconds,
        "output_tokens": n_tokens,
        "output_tokens_per_second": n_tokens / seconds,
        **percentiles("ttft_ms", [answer.times[0] - answer.sent for answer in good]),
        **percentiles("tpot_ms", [(each.times[-1] - each.times[0]) / (each.n_tokens - 1) for each in longer]),
        "prompt_tokens": sums["prompt_n"] + sums["cache_n"] if counts else None,
        "reused_prompt_tokens": sums["cache_n"] if counts else None,
        "accepted_share": bench.ratio(sums["accepted"], sums["drafted"]),
        "tokens_per_round": bench.ratio(sums["predicted_n"] - len(counts), sums["rounds"]),
        "decode_tokens_per_second": bench.ratio(n_decoded - len(counts), in_rounds),
        "between_share": bench.ratio(between, between + in_rounds),
    }


def percentiles(name: str, seconds: Sequence[float]) -> Record:
    """Return the 50th and the 99th percentile of times, in ms; None if there are no times."""
    return {f"{name}_p{n}": 1e3 * float(numpy.percentile(seconds, n)) if seconds else None for n in (50, 99)}


def against_plain(plain: Sequence[Phase], phases: Sequence[Phase]) -> Record:
    """Sum up phases, and compare them with plain rounds of the same requests. identical_answers: answers with the text
    of the plain answer."""
    before, row = summary(plain), summary(phases)
    for name, rate in (("speedup", "output_tokens_per_second"), ("decode_speedup", "decode_tokens_per_second")):
        row[name] = bench.ratio(row[rate], before[rate])
    answers, plain_answers = ([answer for phase in each for answer in phase.answers] for each in (phases, plain))
    pairs = zip(answers, plain_answers, strict=True)
    n_identical = sum(answer.error is None and answer.text == other.text for answer, other in pairs)
    return row | {"identical_answers": n_identical}


@dataclass(frozen=True)
class Flags:
    clients: tuple[int, ...] = (1, 8, 32)  # clients at the same time
    turns: int = 1  # requests of a conversation
    requests: int = 16  # requests of a load, in which each client has at least a conversation
    repeats: int = 2  # loads of each kind
    shortest: int = 1000  # tokens of a prompt
    longest: int = 4000  # tokens of a prompt
    gen_len: int = 64  # new tokens of a request
    temperature: float = 0.0  # 0 is greedy; else requests have different seeds
    server: tuple[str, ...] = ("draft_budget=1024",)  # flags of `python -m serving`: NAME=VALUE
    peers: tuple[str, ...] = ()  # other servers with OpenAI's /v1/completions: NAME=URL
    text: Text = field(default_factory=Text)
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Errors: ConfigError."""
        least = {"turns": 1, "requests": 1, "repeats": 1, "shortest": SHORT, "longest": self.shortest, "gen_len": 2}
        for name, value in least.items():
            require_at_least(name, getattr(self, name), value)
        require_at_least("clients", min(self.clients), 1)
        names = [*MODES]
        for peer in self.peers:
            name, _, url = peer.partition("=")
            if not url.startswith("http") or name in ("", *names):
                refuse("peers", peer, f"NAME=URL, and another name than {', '.join(names)}")
            names.append(name)
        require_appendable(self.output.output)

    def endpoints(self, url: str) -> dict[str, Endpoint]:
        how = {"max_tokens": self.gen_len, "temperature": self.temperature}
        found = {mode: Endpoint(url, how | {"speculate": mode == SPECULATION}) for mode in MODES}
        others = (peer.rstrip("/").split("=", 1) for peer in self.peers)
        return found | {name: Endpoint(url, how | {"model": model_of(url)}) for name, url in others}


def main(flags: Flags) -> None:
    flags.check()
    serve = cli.read(Serve, words := [f"--{given}" for given in flags.server], "python -m serving")
    source, n_rows = serve.config().target.with_text(), serve.batch.max_batch
    tokenizer = source.tokenizer()
    book = next(bench.load_books(str(bench.resolve_dataset(flags.text.dataset, source))))
    ids, drawn, errors = tokenizer.encode(book, add_bos=False), random.Random(0), list[DataError]()
    if len(ids) < flags.longest:
        what, fix = "too little text for the prompts", "give more text, or shorten the prompts"
        refuse("dataset", f"{len(ids)} tokens", f">= {flags.longest}", what, fix, DataError)

    def new_prompt(length: int) -> str:
        start = drawn.randint(0, len(ids) - length)
        return tokenizer.decode(ids[start : start + length])

    with served(words) as url:
        endpoints = flags.endpoints(url)
        phases: dict[int, dict[str, list[Phase]]] = {n: {mode: [] for mode in endpoints} for n in flags.clients}
        for endpoint in endpoints.values():  # the first request is slower
            for error in failed(asyncio.run(load(endpoint, [new_prompt(SHORT)], 1)).answers):
                raise error
        for repeat, (place, n_clients) in product(range(flags.repeats), enumerate(flags.clients)):
            n_talks = max(n_clients, -(-flags.requests // flags.turns))
            lengths = (drawn.randint(flags.shortest, flags.longest) for _ in range(n_talks))
            prompts = [*map(new_prompt, lengths)]
            for mode in list(endpoints)[:: -1 if (repeat + place) % 2 else 1]:
                if mode in MODES:
                    brief = Endpoint(url, endpoints[mode].body | {"max_tokens": 1})
                    asyncio.run(load(brief, [new_prompt(SHORT) for _ in range(n_rows)], 1))
                phase = asyncio.run(load(endpoints[mode], prompts, n_clients, flags.turns))
                phases[n_clients][mode].append(phase)
                errors += failed(phase.answers)
                say(f"{n_clients} clients, {mode}: {len(phase.answers)} requests in {phase.seconds:.1f} s")
    pairs = ((n, mode, modes) for n, modes in phases.items() for mode in modes)
    rows = [{"clients": n, "mode": mode, **against_plain(modes[PLAIN], modes[mode])} for n, mode, modes in pairs]
    settings = {name: value for name, value in asdict(flags).items() if name not in ("text", "output")}
    record = {"benchmark": "serve_load", "model": source.name, "dataset": flags.text.dataset, **settings, "rows": rows}
    record = bench.rounded(record | provenance())
    publish(flags.output.output, record, console(rows, of(COLUMNS)), NOTE, put_off=errors)


if __name__ == "__main__":
    cli.run(main, Flags)
