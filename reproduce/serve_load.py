"""The server under load: speculation beside plain rounds of the same server, and beside any other server.

    python reproduce/serve_load.py --output reproduction/serve_load.jsonl
    python reproduce/serve_load.py --clients 8 --turns 6
    python reproduce/serve_load.py --clients 8 --peer http://127.0.0.1:8123 --peer_model /tmp/smollm2

So many clients ask /v1/completions, each its next request when the last one is answered, with --turns behind its own
prompt and answer. Every phase is run plainly, with speculation, and by the peer, in the other order every other time;
before it the server's rows are made to forget the last one's prompts, no two of which begin with the same token.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import islice, product
from typing import Annotated

from tyro.conf import arg

import bench
from bench.config import Output, RunConfig, Text
from common import cli
from common.errors import DataError, require_at_least
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from common.tables import console
from reproduce.paper.columns import of
from reproduce.paper.prompts import stretches
from reproduce.serve_parts.clients import Endpoint, Phase, failed, load, served
from reproduce.serve_parts.figures import beside, spread
from serving.serve import Serve

# By number of clients and mode.
Phases = dict[int, dict[str, list[Phase]]]
BENCHMARK = "serve_load"
OURS = PLAIN, SPECULATION = "plain", "speculation"
SHORT = 8  # tokens of what makes a row forget
NOTE = "On a CPU, fresh prompts are mostly prefill, which speculation leaves as it is: decode tok/s is of rounds alone."


@dataclass(frozen=True)
class Flags:
    clients: tuple[int, ...] = (1, 8, 32)  # that ask at the same time
    turns: int = 1  # requests of a conversation
    requests: int = 16  # of a phase, in which each client has at least one conversation
    repeats: int = 2  # phases of each kind
    seconds: float = 720  # once so many have gone, no more phases begin
    shortest: int = 1000  # tokens of a prompt
    longest: int = 4000  # tokens of a prompt
    gen_len: int = 64  # new tokens of a request
    temperature: float = 0.0  # 0 is greedy; else each request has a seed of its own
    server: tuple[str, ...] = ("draft_budget=1024",)  # flags of `python -m serving`: NAME=VALUE
    peer: Annotated[str | None, arg(help_behavior_hint="(default: none)")] = None
    """address of another server with OpenAI's /v1/completions"""
    peer_model: str = "default"  # what the peer calls its model
    peer_name: str = "peer"  # what the record calls the peer
    text: Text = field(default_factory=Text)
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Errors: ConfigError."""
        least = {"turns": 1, "requests": 1, "repeats": 1, "shortest": SHORT, "longest": self.shortest, "gen_len": 2}
        for name, value in least.items():
            require_at_least(name, getattr(self, name), value)
        require_at_least("clients", min(self.clients), 1)
        require_appendable(self.output.output)

    def n_talks(self, n_clients: int) -> int:
        """Conversations of a phase."""
        return max(n_clients, -(-self.requests // self.turns))


def run_load(flags: Flags, url: str, new_prompt: Callable[[int], str], n_rows: int, put_off: list[DataError]) -> Phases:
    """Every phase that there was time for. new_prompt: of so many tokens. put_off: takes what a run outlives. Errors:
    DataError for a server that does not answer at all."""
    began, how = time.monotonic(), {"max_tokens": flags.gen_len, "temperature": flags.temperature}
    endpoints = {mode: Endpoint(url, how | {"speculate": mode == SPECULATION}) for mode in OURS}
    if flags.peer is not None:
        endpoints[flags.peer_name] = Endpoint(flags.peer, how | {"model": flags.peer_model})
    for endpoint in endpoints.values():  # what is done for the first time takes longer
        for error in failed(asyncio.run(load(endpoint, [new_prompt(SHORT)], 1)).answers):
            raise error
    lengths, modes = spread(flags.shortest, flags.longest), list(endpoints)
    phases: Phases = {n: {mode: [] for mode in modes} for n in flags.clients}
    for repeat, (place, n_clients) in product(range(flags.repeats), enumerate(flags.clients)):
        if time.monotonic() - began > flags.seconds:
            say(f"{flags.seconds:g} seconds are over after {repeat} repeats with {n_clients} clients")
            continue
        prompts = [new_prompt(length) for length in islice(lengths, flags.n_talks(n_clients))]
        for mode in modes[:: -1 if (repeat + place) % 2 else 1]:
            if mode in OURS:  # the last phase's rows
                asyncio.run(load(endpoints[mode], [new_prompt(SHORT) for _ in range(n_rows)], 1))
            phase = asyncio.run(load(endpoints[mode], prompts, n_clients, flags.turns))
            phases[n_clients][mode].append(phase)
            put_off += failed(phase.answers)
            say(f"{n_clients} clients, {mode}: {len(phase.answers)} requests in {phase.seconds:.1f} s")
    return {n: of_modes for n, of_modes in phases.items() if of_modes[PLAIN]}


def main(flags: Flags) -> None:
    flags.check()
    serve = cli.read(Serve, words := [f"--{one}" for one in flags.server], "python -m serving")
    source, n_rows, put_off = serve.config().target.with_text(), serve.batch.max_batch, list[DataError]()
    tokenizer, n_phases = source.tokenizer(), flags.repeats * len(flags.clients)
    book = next(bench.load_books(str(bench.resolve_dataset(RunConfig(text=flags.text), source))))
    n_prompts = flags.repeats * sum(map(flags.n_talks, flags.clients)) + len(OURS) * n_rows * n_phases + 3
    cut = iter([*stretches(tokenizer.encode(book, add_bos=False), n_prompts, flags.longest)])
    with served(words) as url:
        phases = run_load(flags, url, lambda length: tokenizer.decode(next(cut)[:length]), n_rows, put_off)
    pairs = ((n, mode, of_modes) for n, of_modes in phases.items() for mode in of_modes)
    rows = [{"clients": n, "mode": mode, **beside(own[PLAIN], own[mode])} for n, mode, own in pairs]
    said = {name: value for name, value in asdict(flags).items() if name not in ("text", "output")}
    record = {"benchmark": BENCHMARK, "model": source.name, "dataset": flags.text.dataset, **said, "rows": rows}
    record = bench.rounded(record | provenance())
    publish(flags.output.output, record, console(rows, of("load")), NOTE, put_off=put_off)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
