"""Numbers for Prometheus.  No label holds what a client sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60)

Values = Callable[[], dict[str, float]]


class Metrics:
    """Counters that requests raise, and those of the scheduler, read when they are asked for."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(f"edgeq_{name}_seconds", help, buckets=SECONDS, registry=self._registry)

        self.requests = Counter("edgeq_requests", "Requests by status.", ["endpoint", "status"], registry=self._registry)
        self.ignored = Counter("edgeq_ignored_parameters", "Fields that are not known.", registry=self._registry)
        self.cancelled = Counter("edgeq_cancelled", "Requests whose clients left.", registry=self._registry)
        self.ttft = seconds("ttft", "From the request to its first token.")
        self.queued = seconds("queue", "From the request to its seat.")
        self.steps = seconds("step", "Runs of the model.")

    def watch(self, tokens: Values, gauges: Values) -> None:
        """Show what these give: tokens by kind, and gauges by name."""
        self._registry.register(_Watched(tokens, gauges))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Watched(Collector):
    def __init__(self, tokens: Values, gauges: Values) -> None:
        self._tokens, self._gauges = tokens, gauges

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        tokens = CounterMetricFamily("edgeq_tokens", "Tokens by kind.", labels=["kind"])
        for kind, value in self._tokens().items():
            tokens.add_metric([kind], value)
        yield tokens
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"edgeq_{name}", name.replace("_", " ").capitalize() + ".", value)
