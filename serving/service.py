"""The event loop's side of the server: checks, tokenises and queues requests, and passes updates to answers."""

import asyncio
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import count
from typing import Annotated, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from tyro.conf import arg

from bench.record import rounded
from bench.session import Session
from common.errors import UserError
from engine.grammars import Grammars
from engine.sampling import LONGEST_BAN
from engine.stats import Counts
from models.checkpoints.chat_template import ChatTemplate, NoChatTemplateError
from serving.answers import CANCELLED, TOO_LONG, Answer, Failure, Stops, internal, invalid
from serving.scheduler import Scheduler, ServedRequest, Update
from serving.schemas import GenerationSpec

# A step that takes longer than this many seconds hangs: it runs a chunk of a prompt and a round.
HUNG_SECONDS = 120.0
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS = tuple(2**i for i in range(15))
Prompt = str | Sequence[int] | Sequence[dict[str, str]]  # a text, token ids, or a conversation


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a request is refused."""

    max_queue: int = 64  # requests that wait for a row; a further request is answered with 429
    max_input_length: Annotated[int | None, arg(help_behavior_hint="(default: what a row has room for)")] = None
    """tokens of a prompt"""
    max_new_tokens: int = 2048  # tokens that a request may ask for
    max_stop_sequences: int = 8  # stop strings of a request
    max_body_bytes: int = 2_000_000  # of a request
    request_seconds: float = 600  # seconds that a request may take, waiting included
    no_plain_requests: bool = False
    """refuse `"speculate": false`, which makes all rounds plain while such a request runs"""


class Metrics:
    """Prometheus metrics, with the names of text-generation-inference and vLLM where these have them. gamma: the most
    that a round drafts."""

    def __init__(self, gamma: int) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self.requests = counter("tgi_request_count", "Requests for tokens")
        self.answered = counter("tgi_request_success", "Requests that were answered")
        self.failures = counter("tgi_request_failure", "Requests that failed, by the kind of the error", ["err"])
        self.prompt_tokens = counter("foretoken_prefill_tokens", "Prompt tokens that were run")
        self.reused_tokens = counter("foretoken_reused_prompt_tokens", "Prompt tokens that were still in a row")
        self.new_tokens = counter("foretoken_decode_tokens", "New tokens")
        drafts = "vllm:spec_decode_num_"
        self.rounds = counter(f"{drafts}drafts", "Rounds of a row with drafts")
        self.drafted = counter(f"{drafts}draft_tokens", "Draft tokens")
        self.accepted = counter(f"{drafts}accepted_tokens", "Accepted draft tokens")
        at = counter(f"{drafts}accepted_tokens_per_pos", "Accepted draft tokens by position in a round", ["position"])
        self.accepted_at = [at.labels(str(position)) for position in range(gamma)]
        buckets = range(gamma + 1)
        self.skipped = histogram("tgi_request_skipped_tokens", "Accepted drafts of a row and round", buckets=buckets)
        self.prompt_length = histogram("tgi_request_input_length", "Prompt tokens of a request", buckets=TOKENS)
        self.length = histogram("tgi_request_generated_tokens", "New tokens of a request", buckets=TOKENS)
        seconds = partial(histogram, buckets=SECONDS)
        self.duration = seconds("tgi_request_duration", "Seconds from request to answer")
        self.queue_duration = seconds("tgi_request_queue_duration", "Seconds until a row was free")
        self.row_duration = seconds("tgi_request_inference_duration", "Seconds in a row")
        self.per_token = seconds("tgi_request_mean_time_per_token_duration", "Seconds per token behind the first")

    def count_update(self, update: Update) -> None:
        self.new_tokens.inc(len(update.tokens))
        if update.round == 0:
            self.prompt_tokens.inc(len(update.request.prompt) - update.request.n_reused)
            self.reused_tokens.inc(update.request.n_reused)
        else:
            self.skipped.observe(update.accepted)
        if update.drafted:
            self.rounds.inc()
            self.drafted.inc(update.drafted)
            self.accepted.inc(update.accepted)
            for counter in self.accepted_at[: update.accepted]:
                counter.inc()

    def count_answer(self, answer: Answer) -> None:
        assert answer.first is not None and answer.ended is not None
        started, n_new = answer.request.started, len(answer.tokens)
        self.answered.inc()
        self.prompt_length.observe(len(answer.request.prompt))
        self.length.observe(n_new)
        self.duration.observe(answer.ended - answer.received)
        self.queue_duration.observe(started - answer.received)
        self.row_duration.observe(answer.ended - started)
        if n_new > 1:
            self.per_token.observe((answer.ended - answer.first) / (n_new - 1))

    def text(self) -> bytes:
        """Return all metrics. Counters of text-generation-inference lack the `_total` that the library appends."""
        return re.sub(rb"\b(tgi_\w+)_total\b", rb"\1", generate_latest(self.registry))


class Service(Collector):
    """The answers that are being made. Only `call` may be used outside the event loop. max_total: tokens that a row has
    room for. max_input: tokens that a prompt may have. down: why requests are no longer answered, or None."""

    def __init__(self, session: Session, scheduler: Scheduler, limits: Limits, log_prompts: bool) -> None:
        assert session.tokenizer is not None
        self.session, self.plan, self.scheduler, self.limits = session, session.plan, scheduler, limits
        self.tokenizer = session.tokenizer
        self.max_total = self.plan.capacity - self.plan.gamma - 1
        self.max_input = min(limits.max_input_length or self.max_total, self.max_total - 1)
        self.template: ChatTemplate | None = None
        with suppress(NoChatTemplateError):
            self.template = self.plan.target.chat_template()
        self.answers: dict[int, Answer] = {}
        self.down: str | None = None
        self.loop, self.created, self.metrics = asyncio.new_event_loop(), int(time.time()), Metrics(self.plan.gamma)
        self.metrics.registry.register(self)
        self._log_prompts, self._numbers, self._n_rows = log_prompts, count(), session.runner.max_batch
        self._specials = {id_: name for name, id_ in self.tokenizer.control_tokens().items()}
        # One thread, since a tokenizer is switched while it encodes a conversation.
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        scheduler.publish = lambda updates: self.call(self.on_updates, updates)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the event loop soon, from any thread. Does nothing once HTTP has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the scheduler."""
        scheduler, running = self.scheduler, [answer for answer in self.answers.values() if answer.first is not None]
        n_entries = sum(len(answer.request.prompt) + len(answer.tokens) for answer in running)
        share = n_entries / (self._n_rows * self.plan.capacity)
        yield GaugeMetricFamily("tgi_queue_size", "Requests that wait for a row", len(scheduler.waiting))
        yield GaugeMetricFamily("tgi_batch_current_size", "Requests in a row", len(scheduler.running))
        yield GaugeMetricFamily("foretoken_rows", "Rows", self._n_rows)
        yield GaugeMetricFamily("foretoken_kv_use", "Share of the KV entries that running requests hold", share)
        yield CounterMetricFamily("foretoken_rounds", "Rounds", scheduler.n_rounds)
        yield CounterMetricFamily("foretoken_round_seconds", "Seconds in rounds", scheduler.round_seconds)
        about = "Seconds in neither a round nor a prefill while something decodes"
        yield CounterMetricFamily("foretoken_between_seconds", about, scheduler.between_seconds)

    def require_health(self) -> None:
        """Raise Failure if requests are no longer answered, or a step hangs."""
        if self.down is not None:
            raise Failure(503, "unavailable", self.down)
        began, now = self.scheduler.step_began, time.perf_counter()
        if began is not None and now - began > HUNG_SECONDS:
            raise Failure(503, "unavailable", f"the engine has not ended a step for {now - began:.0f} seconds")

    async def begin(self, http: Request, spec: GenerationSpec, prompt: Prompt, logprobs: bool) -> Answer:
        """Tokenise a prompt and queue it. The answer ends early when its client leaves or its time is over. Raises
        Failure for a request that cannot be answered."""
        self.require_health()
        if len(self.answers) >= self._n_rows + self.limits.max_queue:
            raise Failure(429, "overloaded", "the queue is full: try again later", headers={"Retry-After": "1"})
        self._check(spec, prompt)
        ends, index = () if spec.ignore_eos else self.plan.target.config.eos_tokens, next(self._numbers)
        request = ServedRequest([], 0, ends, spec.sampling(), index=index, speculate=spec.speculate)
        request.logprobs = [] if logprobs else None
        counts, stops = Counts.of_gamma(self.plan.gamma), Stops(spec.stop, spec.KEEPS_STOP)
        answer = Answer(request, self.tokenizer, self._specials, stops, counts)
        self.answers[index] = http.scope["state"]["answer"] = answer
        self._watch(http, answer)
        run, field = partial(self.loop.run_in_executor, self._thread), spec.PROMPT
        try:
            request.prompt = await run(self._encode, prompt, spec.template_variables)
            if spec.grammar is not None:
                field = spec.GRAMMAR
                request.grammar = await run(lambda: self._grammars.start(*spec.grammar))
        except UserError as error:
            raise invalid(field, f"{error.what}: {error.seen}") from None
        if spec.bad_words:
            bans = await self.loop.run_in_executor(self._thread, self._bans, spec)
            request.sampling = replace(request.sampling, bad_words=bans)
        request.prompt = request.prompt[-(spec.truncate or 0) :]
        request.limit = self._limit(spec, request.prompt)
        if answer.finish is None:
            self.scheduler.submit(request)
        return answer

    def _check(self, spec: GenerationSpec, prompt: Prompt) -> None:
        """Raise Failure for a request that is wrong whatever its prompt is."""
        length, n_stops, limits = spec.max_tokens or 0, len(spec.stop), self.limits
        if length > limits.max_new_tokens:
            raise invalid(spec.LENGTH, f"is {length}; this server gives {limits.max_new_tokens}")
        if n_stops > limits.max_stop_sequences:
            raise invalid(f"{spec.WITHIN}stop", f"has {n_stops} strings; this server takes {limits.max_stop_sequences}")
        if limits.no_plain_requests and not spec.speculate:
            raise invalid(f"{spec.WITHIN}speculate", "is false; this server has no plain rounds on demand")
        if (highest := max(spec.logit_bias, default=0)) >= (n_ids := self.plan.target.config.vocab_size):
            raise invalid(f"{spec.WITHIN}logit_bias", f"has the token id {highest}; the model has {n_ids}")
        if spec.grammar is not None and self.session.ranks.size > 1:
            raise invalid(spec.GRAMMAR, "needs a server on a single rank")
        if len(prompt) == 0:
            raise invalid(spec.PROMPT, "is empty")
        if isinstance(prompt[0], dict) and self.template is None:
            raise invalid(spec.PROMPT, "the model has no chat template: use /v1/completions or /generate")

    def _encode(self, prompt: Any, variables: dict[str, Any]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if self.template is not None and isinstance(prompt[0], dict):
            return self.template.encode(prompt, variables)
        return list(prompt)

    def _bans(self, spec: GenerationSpec) -> list[list[int]]:
        """Return the token ids of `bad_words`, at the begin of a word and within. Raises Failure."""
        forms = [form for word in spec.bad_words for form in (word, f" {word.lstrip()}")]
        bans = [self.tokenizer.encode(form, add_bos=False) for form in dict.fromkeys(forms)]
        if (longest := max(map(len, bans))) > LONGEST_BAN:
            raise invalid(f"{spec.WITHIN}bad_words", f"has a string of {longest} tokens; at most {LONGEST_BAN} fit")
        return [ids for ids in bans if ids and max(ids) < self.plan.target.config.vocab_size]

    @cached_property
    def _grammars(self) -> Grammars:
        config = self.plan.target.config
        return Grammars(self.tokenizer, config.vocab_size, config.eos_tokens)

    def _limit(self, spec: GenerationSpec, prompt: Sequence[int]) -> int:
        """Return the most new tokens behind a prompt. Raises Failure."""
        n, room, n_ids = len(prompt), self.max_total - len(prompt), self.plan.target.config.vocab_size
        if n > self.max_input:
            raise invalid(spec.PROMPT, f"has {n} tokens; this server takes {self.max_input}", TOO_LONG)
        if (highest := max(prompt, default=0)) >= n_ids:
            raise invalid(spec.PROMPT, f"has the token id {highest}; those of this model are below {n_ids}")
        limit = spec.max_tokens or min(room, self.limits.max_new_tokens, spec.DEFAULT_LENGTH)
        if limit > room:
            raise invalid(spec.LENGTH, f"is {limit}; behind {n} prompt tokens there is room for {room}", TOO_LONG)
        if spec.min_tokens > limit:
            raise invalid(f"{spec.WITHIN}min_tokens", f"is {spec.min_tokens}; the answer has at most {limit} tokens")
        return limit

    def _watch(self, http: Request, answer: Answer) -> None:
        """End an answer when its client leaves or its time is over."""
        seconds = self.limits.request_seconds
        # OpenAI's clients repeat a request by themselves after 408 and 5xx, unless this header says otherwise.
        late = Failure(504, "timeout", f"not done within {seconds} seconds", headers={"x-should-retry": "false"})
        timer = self.loop.call_later(seconds, self.end, answer, "timeout", late)

        async def until_gone() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            timer.cancel()
            self.end(answer, CANCELLED)

        answer.watcher = self.loop.create_task(until_gone())

    def end(self, answer: Answer, finish: str, failure: Failure | None = None) -> None:
        """End an answer, and free its row before the next round. An answer that has ended stays as it is."""
        if self.answers.pop(answer.request.index, None) is not None:
            self.scheduler.cancel(answer.request.index)
            answer.end(finish, failure)

    def on_updates(self, updates: Sequence[Update]) -> None:
        """Pass updates to their answers. An answer for which that fails ends alone."""
        for update in updates:
            answer = self.answers.get(update.request.index)
            if answer is None:  # ended meanwhile
                continue
            self.metrics.count_update(update)
            try:
                answer.take(update)
            except Exception as error:
                self.end(answer, "error", internal(error))
                traceback.print_exc()
                continue
            if answer.finish is not None:
                del self.answers[update.request.index]
                if update.finish is None:  # a stop string
                    self.scheduler.cancel(update.request.index)

    def fail(self, why: str) -> None:
        """End all answers, and refuse all further requests."""
        self.down = self.down or why
        for answer in [*self.answers.values()]:
            self.end(answer, "error", Failure(503, "unavailable", why))

    def close(self, route: str, answer: Answer | None, failure: Failure | None, status: int, seconds: float) -> None:
        """Count and log a request that has ended. failure: the error that was sent instead of tokens."""
        if answer is not None:
            self.end(answer, "refused" if failure else CANCELLED)  # nobody reads the rest
            failure = failure or answer.failure
        self.metrics.requests.inc()
        if answer is not None and failure is None and answer.finish != CANCELLED:
            self.metrics.count_answer(answer)
        else:
            self.metrics.failures.labels(failure.kind if failure else CANCELLED).inc()
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "route": route}
        line |= {"status": status, "total_ms": rounded(1e3 * seconds)}
        if answer is not None:
            line |= {"id": answer.request.index, **answer.log()}
            if self._log_prompts:
                line |= {"prompt": self.tokenizer.decode(answer.request.prompt), "answer": answer.text}
        print(json.dumps(line), file=sys.stderr, flush=True)
