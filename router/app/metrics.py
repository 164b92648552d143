"""Prometheus metrics of the service, named as vLLM names its own, with a ``domain`` label.

Counters are fed from the same completions that clients receive, so the sums over responses equal what
``/metrics`` shows: a request with several choices is one in flight, each of its choices is one answered
request with its own finish reason, and its prompt's tokens count once, as in ``usage``. Every app has a
registry of its own: two apps in one process do not collide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from drafts.errors import PolydraftError
from router.app.choices import Answers
from router.bodies.api import Completion, ServingEngine

PREFIX = "polydraft:"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class EngineCollector(Collector):
    """Gauges read from the engine at every scrape: its queue, draft versions, memories, readiness."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Nothing at registration: the engine may still be loading."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment; only readiness while the engine is loading."""
        ready = GaugeMetricFamily(f"{PREFIX}engine_ready", "1 when the engine is warm and alive.")
        ready.add_metric([], float(self._engine.ready))
        yield ready
        try:
            rows, figures = self._engine.domains(), self._engine.stats()
        except PolydraftError:
            return
        for name in ("running", "waiting"):
            if name in figures:
                gauge = GaugeMetricFamily(f"{PREFIX}num_requests_{name}", f"Requests {name} in the engine.")
                gauge.add_metric([], float(figures[name]))
                yield gauge
        version = GaugeMetricFamily(
            f"{PREFIX}draft_version", "Version of the domain's draft that serves now.", labels=["domain"]
        )
        buffer = GaugeMetricFamily(
            f"{PREFIX}draft_buffer", "Size of the domain's memories and buffers.", labels=["domain", "what"]
        )
        for row in rows:
            name = str(row["name"])
            version.add_metric([name], float(row.get("version", row.get("draft_version", 0))))
            for what, size in _sizes(row.get("buffer")):
                buffer.add_metric([name, what], size)
        yield version
        yield buffer


def _sizes(buffer: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(buffer, bool):
        return
    if isinstance(buffer, (int, float)):
        yield prefix or "size", float(buffer)
    elif isinstance(buffer, dict):
        for key, value in buffer.items():
            yield from _sizes(value, f"{prefix}_{key}" if prefix else str(key))


class Metrics:
    """The metrics of one app over ``engine``."""

    def __init__(self, engine: ServingEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        self.in_flight = Gauge(f"{PREFIX}num_requests_in_flight", "Open requests.", registry=self.registry)
        self.success = counter(
            "request_success", "Answered requests, every choice one.", "domain", "finished_reason"
        )
        self.failure = counter("request_failure", "Requests that got an error.", "code")
        self.prompt = counter("prompt_tokens", "Prompt tokens.", "domain")
        self.generated = counter("generation_tokens", "Output tokens.", "domain")
        self.passes = counter("spec_decode_num_drafts", "Propose-verify-commit rounds.", "domain")
        self.drafted = counter("spec_decode_num_draft_tokens", "Draft tokens verified.", "domain")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "domain")
        self.first = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.latency = self._histogram("e2e_request_latency_seconds", "Arrival to end.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, ["domain"], buckets=SECONDS, registry=self.registry)

    def take(self, answers: Answers) -> None:
        """Count the choices of one answered request, and every prompt once."""
        for group in answers.by_prompt:
            self.prompt.labels(group[0].domain).inc(group[0].prompt_tokens)
            for completion in group:
                self._take(completion)

    def _take(self, completion: Completion) -> None:
        domain = completion.domain
        self.success.labels(domain, completion.finish_reason.value).inc()
        self.generated.labels(domain).inc(len(completion.token_ids))
        self.passes.labels(domain).inc(len(completion.rounds))
        self.drafted.labels(domain).inc(completion.proposed)
        self.accepted.labels(domain).inc(completion.accepted)
        self.first.labels(domain).observe(completion.first_token_seconds)
        self.latency.labels(domain).observe(completion.total_seconds)

    def failed(self, code: str) -> None:
        """Count one request that got an error."""
        self.failure.labels(code).inc()

    def page(self) -> bytes:
        """The text of ``/metrics``."""
        return generate_latest(self.registry)
