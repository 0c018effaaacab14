"""The event loop's side of the server: queues requests, passes updates to their answers, and counts both."""

import asyncio
import json
import re
import sys
import time
import traceback
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request

from bench.record import rounded
from bench.session import Session
from common.errors import UserError
from engine.stats import Counts
from models.checkpoints.tool_calls import ToolCallParser
from serving.answers import CANCELLED, Answer, Failure, internal, invalid, prompt_tokens
from serving.intake import Intake, Prompt
from serving.scheduler import Scheduler, ServedRequest, Update
from serving.schemas import GenerationSpec

# A step that takes longer than this many seconds hangs: it runs a chunk of a prompt and a round.
HUNG_SECONDS = 120.0
# Buckets of metrics.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS = tuple(2**i for i in range(15))
Samples = tuple[str, int]  # the number of samples of a prompt, after the name of the field that says it


class Service(Collector):
    """The answers that are being made. Only `call` may be used outside the event loop. down: why requests are no longer
    answered, or None."""

    def __init__(
        self, session: Session, scheduler: Scheduler, intake: Intake, log_prompts: bool, loop: AbstractEventLoop
    ) -> None:
        self.session, self.plan, self.scheduler = session, session.plan, scheduler
        self.intake, self.limits = intake, intake.limits
        self.answers: dict[int, Answer] = {}
        self.down: str | None = None
        self.loop, self.created, self.metrics = loop, int(time.time()), Metrics(self.plan.gamma)
        self.metrics.registry.register(self)
        self._log_prompts, self._numbers, self._n_rows = log_prompts, count(), session.runner.max_batch
        # One thread, since a tokenizer is switched while it encodes a conversation.
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        scheduler.publish = lambda updates: self.call(self.on_updates, updates)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the event loop soon, from any thread. Does nothing once HTTP has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the scheduler."""
        scheduler, running = self.scheduler, [answer for answer in self.answers.values() if answer.request.started]
        n_entries = sum(len(answer.request.prompt) + len(answer.tokens) for answer in running)
        share = n_entries / (self._n_rows * self.plan.target.capacity)
        yield GaugeMetricFamily("tgi_queue_size", "Requests that wait for a row", len(self.answers) - len(running))
        yield GaugeMetricFamily("tgi_batch_current_size", "Requests in a row", len(running))
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

    async def begin(
        self, http: Request, spec: GenerationSpec, prompts: list[Prompt], n: Samples, n_top: int | None, echo: bool
    ) -> list[Answer]:
        """Tokenise prompts and queue samples of each. They end early when their client leaves or their time is over.
        n_top: the likeliest ids next to each log-probability; None: no log-probabilities. echo: answers have the tokens
        of their prompts. Raises Failure for a request that cannot be answered."""
        self.require_health()
        intake, spec = self.intake, spec.with_defaults(self.intake.defaults)
        (field, n_samples), room = n, self._n_rows + self.limits.max_queue
        if (n_all := n_samples * len(prompts)) > room:
            field = spec.PROMPT if len(prompts) > room else field
            room_of = f"this server takes {room} (--max_batch and --max_queue)"
            raise invalid(field, f"asks for {len(prompts)} x {n_samples} samples; {room_of}")
        if len(self.answers) + n_all > room:
            raise Failure(429, "overloaded", "the queue is full: try again later", headers={"Retry-After": "1"})
        calls = spec.calls()
        for prompt in prompts:
            intake.check(spec, prompt, calls)
        ends = () if spec.ignore_eos else intake.ends
        answers, changed, first = http.scope["state"]["answers"], asyncio.Event(), spec.sampling()
        # Log-probabilities rank the samples of best_of.
        has_logprobs = n_top is not None or (n_samples > 1 and field != "n")
        for i in range(n_all):
            # A sample's number keys its random numbers, too: another seed has other samples.
            request = ServedRequest([], 0, ends, first, i, speculate=spec.speculate)
            request.index, request.n_top = next(self._numbers), n_top or 0
            request.logprobs = [] if has_logprobs else None
            text, counts = (spec.stop, spec.KEEPS_STOP), Counts.of_gamma(self.plan.gamma)
            answer = Answer(request, intake.tokenizer, intake.specials, *text, counts, changed, n_top is not None)
            answer.tool_calls = ToolCallParser([tool["function"]["name"] for tool in calls.offered], calls.most)
            answers.append(answer)
            self.answers[request.index] = answer
        self._watch(http, answers)
        run = partial(self.loop.run_in_executor, self._thread)
        for i, prompt in enumerate(prompts):
            if answers[0].finish is None:  # the client has not left
                await self._prepare(spec, prompt, answers[i * n_samples : (i + 1) * n_samples], echo)
        grammar, bans, prediction = await run(intake.shared, spec, calls, answers[0].begins)
        for answer in answers:
            request = answer.request
            request.grammar, request.prediction = grammar and grammar.copy(), prediction
            request.sampling = replace(request.sampling, bad_words=bans)
            if answer.finish is None:
                self.scheduler.submit(request)
        return answers

    async def _prepare(self, spec: GenerationSpec, prompt: Prompt, samples: Sequence[Answer], echo: bool) -> None:
        """Tokenise the prompt of some samples. Raises Failure."""
        run, first = partial(self.loop.run_in_executor, self._thread), samples[0].request
        intake = self.intake
        try:
            ids = await run(intake.encode, prompt, spec.calls())
        except UserError as error:
            field = error.where if error.where in type(spec).model_fields else spec.PROMPT
            raise invalid(field, f"{error.what}: {error.seen}") from None
        ids = ids[-(spec.truncate or 0) :]
        limit, group = intake.limit(spec, ids), first.index
        # The first sample runs the prompt, and the others copy its row.
        first.prompt_logprobs = [] if (echo and samples[0].has_logprobs) or limit == 0 else None
        tokens = await run(prompt_tokens, ids, intake.tokenizer, intake.specials) if echo else ()
        begins = intake.reasons(spec, ids)
        for sample in samples:
            sample.begins = begins
            if isinstance(prompt, str) or isinstance(prompt[0], int):
                sample.continue_text(ids)
            sample.request.prompt, sample.request.limit, sample.request.group, sample.prompt = ids, limit, group, tokens

    def _watch(self, http: Request, answers: Sequence[Answer]) -> None:
        """End answers when their client leaves or their time is over."""
        seconds = self.limits.request_seconds
        # OpenAI's clients repeat a request by themselves after 408 and 5xx, unless this header says otherwise.
        late = Failure(504, "timeout", f"not done within {seconds} seconds", headers={"x-should-retry": "false"})
        timer = self.loop.call_later(seconds, self.end, answers, "timeout", late)

        async def until_gone() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            timer.cancel()
            self.end(answers, CANCELLED)

        answers[0].watcher = self.loop.create_task(until_gone())

    def end(self, answers: Sequence[Answer], finish: str, failure: Failure | None = None) -> None:
        """End answers, and free their rows before the next round. An answer that has ended stays as it is."""
        for answer in answers:
            if self.answers.pop(answer.request.index, None) is not None:
                self.scheduler.cancel(answer.request.index)
                answer.end(finish, failure)

    def on_updates(self, updates: Sequence[Update]) -> None:
        """Pass updates to their answers. An answer for which that fails ends alone."""
        for update in updates:
            answer = self.answers.get(update.request.index)
            if answer is None:  # ended meanwhile
                continue
            n_before = len(answer.tokens)
            try:
                answer.take(update)
            except Exception as error:
                self.end([answer], "error", internal(error))
                traceback.print_exc()
                continue
            self.metrics.count_update(update, len(answer.tokens) - n_before)
            if answer.finish is not None:
                del self.answers[update.request.index]
                if update.finish is None:  # a stop string
                    self.scheduler.cancel(update.request.index)

    def fail(self, why: str) -> None:
        """End all answers, and refuse all further requests."""
        self.down = self.down or why
        self.end([*self.answers.values()], "error", Failure(503, "unavailable", why))

    def close(self, route: str, answers: list[Answer], failure: Failure | None, status: int, seconds: float) -> None:
        """Count and log a request that has ended. failure: the error that was sent instead of tokens."""
        self.end(answers, "refused" if failure else CANCELLED)  # nobody reads the rest
        failure = failure or next((answer.failure for answer in answers if answer.failure), None)
        self.metrics.requests.inc()
        if answers and failure is None and all(answer.finish != CANCELLED for answer in answers):
            self.metrics.answered.inc()
            for answer in answers:
                self.metrics.count_answer(answer)
        else:
            self.metrics.failures.labels(failure.kind if failure else CANCELLED).inc()
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "route": route}
        line |= {"status": status, "total_ms": rounded(1e3 * seconds)}
        lines = [line | {"id": answer.request.index, **answer.log()} for answer in answers] or [line]
        if self._log_prompts:
            for line, answer in zip(lines, answers, strict=False):
                reasoning = "".join(token.reasoning for token in answer.tokens)
                line |= {"prompt": self.intake.tokenizer.decode(answer.request.prompt)}
                line |= {"reasoning": reasoning, "answer": answer.text} if reasoning else {"answer": answer.text}
        print("\n".join(map(json.dumps, lines)), file=sys.stderr, flush=True)


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
        self.per_token = seconds("tgi_request_mean_time_per_token_duration", "Seconds per token after the first")

    def count_update(self, update: Update, n_kept: int) -> None:
        """Count an update, of whose tokens the answer kept the first `n_kept`: a stop string may have cut it."""
        accepted = min(update.accepted, n_kept)
        self.new_tokens.inc(n_kept)
        if update.round == 0:
            self.prompt_tokens.inc(len(update.request.prompt) - update.request.n_reused)
            self.reused_tokens.inc(update.request.n_reused)
        else:
            self.skipped.observe(accepted)
        if update.drafted:
            self.rounds.inc()
            self.drafted.inc(update.drafted)
            self.accepted.inc(accepted)
            for counter in self.accepted_at[:accepted]:
                counter.inc()

    def count_answer(self, answer: Answer) -> None:
        assert answer.first is not None and answer.ended is not None
        started, n_new = answer.request.started, len(answer.tokens)
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
