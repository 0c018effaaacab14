"""The command line of the server: what is served, how it drafts, where it listens, and what it refuses."""

import os
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, ClassVar, Literal

from tyro.conf import arg

from bench.config import Passes, RankOptions, RunConfig, Sampling, Target
from bench.draft_flags import NamedDraft
from common.errors import ConfigError, flag, require_at_least

API_KEY = "FORETOKEN_API_KEY"
LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ServedDraft(NamedDraft):
    """What drafts, and how."""

    gamma: int | Literal["auto"] = "auto"
    """tokens drafted per round; auto: 0 to 6, what pays best by the costs measured when the server starts and the
    acceptance seen so far, chosen before every round; 0: plain decoding"""
    draft_ranks: tuple[int, ...] | None = None
    """standalone: ranks that share the draft (default: those of --rank_group)"""


@dataclass(frozen=True)
class Batch:
    """What is decoded together."""

    max_batch: int = 8  # requests that decode at the same time, each in a row of the KV cache
    max_length: int = 8192
    """KV entries of a row: prompt, new tokens and one round's drafts; no more than the model's context"""
    prefill_tokens: Annotated[int | None, arg(help_behavior_hint="(default: 256 on a CPU, 2048 on a GPU)")] = None
    """the most prompt tokens that run between two rounds: what running requests wait for, beside a round"""
    no_prefix_reuse: bool = False  # run every prompt whole, and draft by no other request's text
    verification: Literal["coupled", "rejection"] = "coupled"
    """coupled: a seed's tokens are the same whatever else runs, and those of plain decoding; rejection: speculative
    sampling, which accepts a little more"""


@dataclass(frozen=True)
class Http:
    """Where it listens, and to whom."""

    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 for other machines, too
    port: int = 8000  # 0: any that is free
    api_key: Annotated[str | None, arg(help_behavior_hint=f"(default: ${API_KEY}, or none)")] = None
    """what requests have to bring as `Authorization: Bearer KEY`, but for /health and the page; processes on this
    machine can read command lines, so the environment is the better place"""
    log_prompts: bool = False  # log prompts and answers, too
    drain_seconds: float = 20
    """after SIGTERM or Ctrl-C: seconds that requests have to finish; torchrun itself waits for 30"""

    def key(self) -> str | None:
        """Errors: ConfigError for one that is empty, which would be none."""
        key = os.environ.get(API_KEY) if self.api_key is None else self.api_key
        if key is not None and not key.strip():
            where, required = f"{flag('api_key')} or ${API_KEY}", "a key that clients have to bring"
            fix = f"leave out {flag('api_key')} and unset {API_KEY} to serve without one"
            raise ConfigError("the key is empty", where, repr(key), required, fix)
        return key and key.strip()


@dataclass(frozen=True)
class Limits:
    """What is refused."""

    max_queue: int = 64  # requests that wait for a row; one more is answered with 429
    max_input_length: Annotated[int | None, arg(help_behavior_hint="(default: what a row has room for)")] = None
    """tokens of a prompt"""
    max_new_tokens: int = 2048  # tokens that a request may ask for
    max_stop_sequences: int = 8  # stop strings of a request
    max_body_bytes: int = 2_000_000  # of a request
    request_seconds: float = 600  # what a request may take, waiting included
    no_plain_requests: bool = False
    """refuse `"speculate": false`, which makes all rounds plain as long as such a request runs"""


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """Those of the server."""

    FLAGS: ClassVar[dict[str, str]] = {"draft_model": "--draft", "B": "--max_batch", "prefix_len": "--max_length"}

    target: Target = field(default_factory=Target)
    draft: ServedDraft = field(default_factory=ServedDraft)
    batch: Batch = field(default_factory=Batch)
    http: Http = field(default_factory=Http)
    limits: Limits = field(default_factory=Limits)
    ranks: RankOptions = field(default_factory=RankOptions)
    measure_costs: bool = False  # measure what `auto` chooses by, whatever an earlier start has measured

    def config(self) -> RunConfig:
        """The run that its session is opened for. Errors: ConfigError."""
        self.check()
        if self.draft.gamma == 0:
            self.draft.variants({"draft": "self"})  # refuses flags of what does not draft
        draft = None if self.draft.gamma == 0 else self.draft.config()
        if draft is not None and draft.needs_baseline:
            required, fix = "a draft that needs no plain decoding before it", f"leave out {flag('draft')}: self drafts"
            raise ConfigError("nothing is known of an answer beforehand", flag("draft"), draft.name, required, fix)
        names = [one.name for one in (draft, *getattr(draft, "texts", ())) if one is not None and one.shares_texts]
        if names and self.batch.no_prefix_reuse:
            what, where = "this draft takes its guesses from all requests", f"{flag('draft')}, {flag('text_drafts')}"
            required = f"drafts of a row's own text, beside {flag('no_prefix_reuse')}"
            raise ConfigError(what, where, names[0], required, "use suffix, which copies from a row's own text")
        sampling, passes = Sampling(verification=self.batch.verification), Passes(measure_costs=self.measure_costs)
        return RunConfig(target=self.target, draft=draft, sampling=sampling, ranks=self.ranks, passes=passes)

    def check(self) -> None:
        """Errors: ConfigError for a number too small, and for what cannot be served."""
        least = {"max_queue": 0, "request_seconds": 0.001, "drain_seconds": 0}
        given = vars(self.limits) | vars(self.batch) | {"drain_seconds": self.http.drain_seconds}
        numbers = {name: one for name, one in given.items() if one is not None and not isinstance(one, bool | str)}
        port, n_replicas, weights = self.http.port, self.ranks.data_parallel, self.target.load_format
        one_each = "1: start a server for every replica"
        checks = [(isfinite(n), name, "a limit is no number", n, "a finite number") for name, n in numbers.items()]
        checks += [
            (0 <= port <= LAST_PORT, "port", "there is no such port", port, f"0 to {LAST_PORT}"),
            (n_replicas == 1, "data_parallel", "a server has one copy of the model", n_replicas, one_each),
            (weights != "dummy", "load_format", "random weights have nothing to say", weights, "a trained model"),
        ]
        for fits, name, what, seen, required in checks:
            if not fits:
                raise ConfigError(what, flag(name), seen, required, f"leave out {flag(name)}")
        for name, value in numbers.items():
            require_at_least(name, value, least.get(name, 1))
        self.http.key()
