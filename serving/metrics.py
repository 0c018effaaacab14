"""Metrics in the names of text-generation-inference and vLLM, and a few of our own, in a registry of the app's."""

import re
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.jobs import Job
from serving.scheduler import Update

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS = tuple(float(2**i) for i in range(15))


class Metrics(Collector):
    """gamma: the most that a round drafts."""

    def __init__(self, gamma: int) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._shown: list[Callable[[], Metric]] = []
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        skipped = [float(i) for i in range(gamma + 1)]
        self._skipped = histogram("tgi_request_skipped_tokens", "Accepted drafts of a row and round", buckets=skipped)
        self.requests = counter("tgi_request_count", "Requests for tokens")
        self._success = counter("tgi_request_success", "Requests that were answered")
        self._failure = counter("tgi_request_failure", "Requests that were not, by what their errors say", ["err"])
        self._queue = histogram("tgi_request_queue_duration", "Seconds until a row was free")
        self._inference = histogram("tgi_request_inference_duration", "Seconds in a row")
        self._per_token = histogram("tgi_request_mean_time_per_token_duration", "Seconds per token behind the first")
        self._duration = histogram("tgi_request_duration", "Seconds from request to answer")
        self._generated = histogram("tgi_request_generated_tokens", "New tokens of a request", buckets=TOKENS)
        self._input = histogram("tgi_request_input_length", "Prompt tokens of a request", buckets=TOKENS)
        self._n_drafts = counter("vllm:spec_decode_num_drafts", "Rounds of a row with drafts")
        self._n_draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Drafts")
        self._n_accepted = counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts")
        per_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
        at = counter(per_position, "Accepted drafts by their place in a round", ["position"])
        self._accepted_at = [at.labels(str(position)) for position in range(gamma)]
        self._prefilled = counter("foretoken_prefill_tokens", "Prompt tokens that were run")
        self._reused = counter("foretoken_reused_prompt_tokens", "Prompt tokens that a row still held")
        self._decoded = counter("foretoken_decode_tokens", "New tokens")

    def show(self, name: str, what: str, value: Callable[[], float]) -> None:
        """A counter, if it is a total, or a gauge, that is read whenever metrics are."""
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        self._shown.append(lambda: kind(name, what, value()))

    def collect(self) -> list[Metric]:
        return [read() for read in self._shown]

    def stepped(self, update: Update) -> None:
        if update.round == 0:
            self._prefilled.inc(len(update.request.prompt) - update.request.n_reused)
            self._reused.inc(update.request.n_reused)
        self._decoded.inc(len(update.tokens))
        if update.round > 0:
            self._skipped.observe(update.accepted)
        if update.drafted:
            self._n_drafts.inc()
            self._n_draft_tokens.inc(update.drafted)
            self._n_accepted.inc(update.accepted)
            for counter in self._accepted_at[: update.accepted]:
                counter.inc()

    def answered(self, job: Job) -> None:
        assert job.first is not None and job.ended is not None
        started, n_new = job.request.started, len(job.pieces)
        self._success.inc()
        self._queue.observe(started - job.received)
        self._inference.observe(job.ended - started)
        self._duration.observe(job.ended - job.received)
        self._generated.observe(n_new)
        self._input.observe(len(job.request.prompt))
        if n_new > 1:
            self._per_token.observe((job.ended - job.first) / (n_new - 1))

    def failed(self, kind: str) -> None:
        self._failure.labels(kind).inc()

    def text(self) -> bytes:
        """Counters of text-generation-inference have no `_total`, which the library appends."""
        return re.sub(rb"\b(tgi_\w+)_total\b", rb"\1", generate_latest(self.registry))
