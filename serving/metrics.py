"""Metrics in the names of text-generation-inference and vLLM, and a few of our own, in a registry of the app's."""

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.jobs import Job
from serving.scheduler import Update

KNOWN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS = tuple(float(2**i) for i in range(15))
DRAFTS = "vllm:spec_decode_num_"


class Metrics(Collector):
    """gamma: the most that a round drafts. read: what is read whenever metrics are, by name."""

    def __init__(self, gamma: int, read: Mapping[str, Callable[[], float]]) -> None:
        self.registry, self._read = CollectorRegistry(), read
        self.registry.register(self)
        sizes = {"seconds": SECONDS, "tokens": TOKENS, "drafts": [float(i) for i in range(gamma + 1)]}
        self._of: dict[str, Any] = {}
        for name, (what, *labels) in KNOWN["counters"].items():
            self._of[name] = Counter(name, what, labels, registry=self.registry)
        for name, (what, size) in KNOWN["histograms"].items():
            self._of[name] = Histogram(name, what, buckets=sizes[size], registry=self.registry)
        at = self._of[f"{DRAFTS}accepted_tokens_per_pos"]
        self._accepted_at = [at.labels(str(position)) for position in range(gamma)]

    def collect(self) -> list[Metric]:
        kinds = {name: CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily for name in self._read}
        return [kind(name, KNOWN["read"][name], self._read[name]()) for name, kind in kinds.items()]

    def count(self, name: str, n: int = 1) -> None:
        self._of[name].inc(n)

    def failed(self, kind: str) -> None:
        self._of["tgi_request_failure"].labels(kind).inc()

    def stepped(self, update: Update) -> None:
        if update.round == 0:
            self.count("foretoken_prefill_tokens", len(update.request.prompt) - update.request.n_reused)
            self.count("foretoken_reused_prompt_tokens", update.request.n_reused)
        self.count("foretoken_decode_tokens", len(update.tokens))
        if update.round > 0:
            self._of["tgi_request_skipped_tokens"].observe(update.accepted)
        if update.drafted:
            self.count(f"{DRAFTS}drafts")
            self.count(f"{DRAFTS}draft_tokens", update.drafted)
            self.count(f"{DRAFTS}accepted_tokens", update.accepted)
            for counter in self._accepted_at[: update.accepted]:
                counter.inc()

    def answered(self, job: Job) -> None:
        assert job.first is not None and job.ended is not None
        started, n_new = job.request.started, len(job.pieces)
        self.count("tgi_request_success")
        seen = {"queue_duration": started - job.received, "inference_duration": job.ended - started}
        seen |= {"duration": job.ended - job.received, "input_length": len(job.request.prompt)}
        seen |= {"generated_tokens": n_new}
        if n_new > 1:
            seen["mean_time_per_token_duration"] = (job.ended - job.first) / (n_new - 1)
        for name, value in seen.items():
            self._of[f"tgi_request_{name}"].observe(value)

    def text(self) -> bytes:
        """Counters of text-generation-inference have no `_total`, which the library appends."""
        return re.sub(rb"\b(tgi_\w+)_total\b", rb"\1", generate_latest(self.registry))
