"""Prometheus metrics. Totals and gauges are read from the engine's last snapshot, never from it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from server.engine.worker import Worker

OUTCOMES = (
    "stop",
    "length",
    "cancelled",
    "timeout",
    "refused",
    "overloaded",
    "unavailable",
    "error",
)
# From a step of a small model on a GPU to the longest answer.
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
TOKENS = tuple(2**k for k in range(15))

GAUGES = {
    "rows_shared": "Rows that two sequences or more hold.",
    "row_bytes": "Bytes of one row: a token's keys and values in all layers.",
}
COUNTERS = {
    "steps": ("steps_total", "Steps of the engine."),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of requests that began."),
    "generation_tokens": ("generated_tokens_total", "Tokens generated."),
    "cached_tokens": ("rows_reused_total", "Prompt tokens whose rows were there already."),
    "rows_computed": ("rows_computed_total", "Rows computed: tokens that ran through the model."),
    "rows_recomputed": ("rows_recomputed_total", "Rows computed again, of those computed."),
    "rows_evicted": ("rows_evicted_total", "Rows of idle sequences that were freed."),
    "preemptions": ("preemptions_total", "Requests that gave up their rows to others."),
    "sessions_expired": ("sessions_expired_total", "Sessions that nobody used for too long."),
    "sessions_evicted": ("sessions_evicted_total", "Sessions forgotten for there were too many."),
}


class Metrics:
    """All that `/metrics` shows. Each server has its own registry."""

    def __init__(self, worker: Worker) -> None:
        # There would be a second series beside each counter, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(EngineCollector(worker))
        requests = Counter(
            "onerow_requests",
            "Completion requests by outcome; the outcomes add up to all requests.",
            ["outcome"],
            registry=self.registry,
        )
        worker.on_step = self.step
        self._outcomes = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first generated token.", SECONDS
        )
        self.duration = self._histogram(
            "request_duration_seconds", "From arrival to the end, of answered requests.", SECONDS
        )
        self.queue = self._histogram(
            "queue_seconds", "From arrival in the engine to the first row computed.", SECONDS
        )
        self.output_token = self._histogram(
            "time_per_output_token_seconds", "Between two tokens of a completed choice.", SECONDS
        )
        self._step_seconds = self._histogram("step_seconds", "Length of a step.", SECONDS)
        self._step_tokens = self._histogram(
            "step_tokens", "Tokens that ran through the model in a step.", TOKENS
        )
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens.", TOKENS)
        self.generation = self._histogram("request_generation_tokens", "Tokens generated.", TOKENS)

    def count(self, outcome: str) -> None:
        self._outcomes[outcome].inc()

    def step(self, seconds: float, tokens: int) -> None:
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(tokens)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"onerow_{name}", words, buckets=buckets, registry=self.registry)


class EngineCollector(Collector):
    """The engine's totals at the time of the scrape."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def collect(self) -> Iterator[Metric]:
        now = self.worker.snapshot
        # What waits in the worker's inbox waits as well, so ask the worker and not the snapshot.
        waiting = max(0, self.worker.open - now.running)
        yield gauge("requests_running", "Completions that are being computed.", now.running)
        yield gauge("requests_waiting", "Completions that wait for their turn.", waiting)
        rows = GaugeMetricFamily("onerow_rows", "Rows by state.", labels=["state"])
        for state in ("free", "running", "idle"):
            rows.add_metric([state], getattr(now, f"rows_{state}"))
        yield rows
        for name, words in GAUGES.items():
            yield gauge(name, words, getattr(now, name))
        for name, (field, words) in COUNTERS.items():
            yield CounterMetricFamily(f"onerow_{name}", words, value=getattr(now, field))


def gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"onerow_{name}", words, value=value)
