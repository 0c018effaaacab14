"""Measure the server under load: speculation beside plain rounds of the same server, and beside another server.

    python -m reproduce.serve_load --output reproduction/serve_load.jsonl
    python -m reproduce.serve_load --clients 8 --turns 6
    python -m reproduce.serve_load --clients 8 --peer http://127.0.0.1:8123 --peer_model /tmp/smollm2

A client sends its next request to /v1/completions when the last one is answered; with --turns, the next prompt contains
the last prompt and answer. The same requests run plainly, with speculation, and at the peer, every second time in
reverse order. Before each load, short prompts make the server's rows forget the last load. No two prompts begin with
the same token, so that no row can reuse a prefix.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count, islice, product

import bench
from bench.config import Output, Text
from common import cli
from common.errors import DataError, require_at_least
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from common.tables import Column, console
from reproduce.helpers.batches import stretches
from reproduce.helpers.load import Endpoint, Phase, beside, failed, load, served
from serving.serve import Serve

MODES = PLAIN, SPECULATION = "plain", "speculation"
SHORT = 8  # tokens of a prompt that makes a row forget
NOTE = "On a CPU, fresh prompts are mostly prefill, which speculation does not change; decode tok/s counts rounds."
COLUMNS = [
    *(Column("clients", "clients"), Column("mode", "rounds", align="<"), Column("errors", "errors")),
    *(Column("output_tokens_per_second", "tok/s", ".1f"), Column("speedup", "over plain", ".2f")),
    *(Column("decode_tokens_per_second", "decode tok/s", ".1f"), Column("decode_speedup", "over plain", ".2f")),
    *(Column("ttft_ms_p50", "first token, ms: p50", ".0f"), Column("ttft_ms_p99", "p99", ".0f")),
    *(Column("tpot_ms_p50", "per token, ms: p50", ".0f"), Column("tpot_ms_p99", "p99", ".0f")),
    *(Column("accepted_share", "accepted", ".3f"), Column("tokens_per_round", "tokens per round", ".2f")),
    *(Column("reused_prompt_tokens", "reused"), Column("identical_answers", "as plain")),
]


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
    peer: str | None = None  # address of another server with OpenAI's /v1/completions
    peer_model: str = "default"  # the peer's name of its model
    peer_name: str = "peer"  # the peer's name in the record
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
        """Return the number of conversations of a load."""
        return max(n_clients, -(-self.requests // self.turns))

    def endpoints(self, url: str) -> dict[str, Endpoint]:
        how = {"max_tokens": self.gen_len, "temperature": self.temperature}
        found = {mode: Endpoint(url, how | {"speculate": mode == SPECULATION}) for mode in MODES}
        return found | ({self.peer_name: Endpoint(self.peer, how | {"model": self.peer_model})} if self.peer else {})


def spread(shortest: int, longest: int) -> Iterator[int]:
    """Yield lengths without end, evenly spread among any consecutive ones."""
    return (shortest + int((longest - shortest) * (index * (math.sqrt(5) - 1) / 2 % 1)) for index in count(1))


def main(flags: Flags) -> None:
    flags.check()
    serve = cli.read(Serve, words := [f"--{given}" for given in flags.server], "python -m serving")
    source, n_rows = serve.config().target.with_text(), serve.batch.max_batch
    tokenizer = source.tokenizer()
    book = next(bench.load_books(str(bench.resolve_dataset(flags.text.dataset, source))))
    n_prompts = flags.repeats * sum(map(flags.n_talks, flags.clients)) + 3
    n_prompts += len(MODES) * n_rows * flags.repeats * len(flags.clients)
    cut = iter([*stretches(tokenizer.encode(book, add_bos=False), n_prompts, flags.longest)])

    def new_prompt(length: int) -> str:
        return tokenizer.decode(next(cut)[:length])

    lengths, errors = spread(flags.shortest, flags.longest), list[DataError]()
    with served(words) as url:
        endpoints = flags.endpoints(url)
        phases: dict[int, dict[str, list[Phase]]] = {n: {mode: [] for mode in endpoints} for n in flags.clients}
        for endpoint in endpoints.values():  # the first request is slower
            for error in failed(asyncio.run(load(endpoint, [new_prompt(SHORT)], 1)).answers):
                raise error
        for repeat, (place, n_clients) in product(range(flags.repeats), enumerate(flags.clients)):
            prompts = [new_prompt(length) for length in islice(lengths, flags.n_talks(n_clients))]
            for mode in list(endpoints)[:: -1 if (repeat + place) % 2 else 1]:
                if mode in MODES:
                    asyncio.run(load(endpoints[mode], [new_prompt(SHORT) for _ in range(n_rows)], 1))
                phase = asyncio.run(load(endpoints[mode], prompts, n_clients, flags.turns))
                phases[n_clients][mode].append(phase)
                errors += failed(phase.answers)
                say(f"{n_clients} clients, {mode}: {len(phase.answers)} requests in {phase.seconds:.1f} s")
    pairs = ((n, mode, modes) for n, modes in phases.items() for mode in modes)
    rows = [{"clients": n, "mode": mode, **beside(modes[PLAIN], modes[mode])} for n, mode, modes in pairs]
    settings = {name: value for name, value in asdict(flags).items() if name not in ("text", "output")}
    record = {"benchmark": "serve_load", "model": source.name, "dataset": flags.text.dataset, **settings, "rows": rows}
    record = bench.rounded(record | provenance())
    publish(flags.output.output, record, console(rows, COLUMNS), NOTE, put_off=errors)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
