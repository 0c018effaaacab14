"""Prometheus metrics of the requests, counted as they are answered."""

import re
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from serving.answers import Answer
from serving.scheduler import Update

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS = tuple(2**i for i in range(15))


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
