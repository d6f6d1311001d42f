"""Prometheus metrics: the engine's counters, and how long clients wait."""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headroom.engine.engine import Engine
from headroom.engine.request import Timings
from headroom.engine.stats import ExpertTelemetry

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
Engines = Callable[[], Mapping[str, Engine]]  # returns those of loaded models, by their names
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class EngineCollector(Collector):
    """Reads the engines' counters whenever /metrics is asked for."""

    def __init__(self, engines: Engines, *, by_model: bool) -> None:
        self._engines = engines
        self._by_model = by_model

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of one snapshot of each loaded model's engine."""
        families: dict[str, Metric] = {}
        for model, engine in self._engines().items():
            label = {"model": model} if self._by_model else {}
            for metric in engine_metrics(engine, label):
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples.extend(metric.samples)
        yield from families.values()


def engine_metrics(engine: Engine, label: Mapping[str, str]) -> Iterable[Metric]:
    """Yield the metrics of one engine; `label` names its model if there are several."""
    stats = engine.stats()
    names, values = list(label), list(label.values())
    gauges: dict[str, tuple[str, float]] = {
        "requests_running": ("Requests that run", stats.requests_running),
        "requests_waiting": ("Requests in the queue", stats.requests_waiting),
        "cache_pages": ("Pages of the KV cache", stats.cache_pages_total),
        "cache_pages_used": ("Pages of the KV cache in use", stats.cache_pages_used),
    }
    counters: dict[str, tuple[str, float]] = {
        "prompt_tokens": ("Prompt tokens computed", stats.prompt_tokens),
        "generated_tokens": ("Tokens generated", stats.generated_tokens),
        "steps": ("Steps computed", stats.steps),
        "preemptions": ("Requests preempted for lack of pages", stats.preemptions),
        "step_seconds": ("Seconds spent in steps", stats.step_s),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"headroom_{name}", text, labels=names)
        gauge.add_metric(values, value)
        yield gauge
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(f"headroom_{name}", text, labels=names)
        counter.add_metric(values, value)
        yield counter
    for word, text, size in (
        ("planned", "Bytes of the device that the plan allocates", stats.memory.planned_bytes),
        ("used", "Bytes of the device that the engine holds", stats.memory.used_bytes),
    ):
        held = GaugeMetricFamily(f"headroom_memory_{word}_bytes", text, labels=[*names, "device"])
        held.add_metric([*values, stats.memory.device], size)
        yield held
    finished = CounterMetricFamily(
        "headroom_requests_finished", "Requests ended, by reason", labels=[*names, "reason"]
    )
    for reason, count in stats.requests_finished.items():
        finished.add_metric([*values, reason], count)
    yield finished
    if stats.experts is not None:
        yield from expert_metrics(stats.experts, label)


def expert_metrics(experts: ExpertTelemetry, label: Mapping[str, str]) -> Iterable[Metric]:
    """Yield hit rates and the cost of cold experts, as of the end of the last request."""
    names, values = list(label), list(label.values())
    rates = GaugeMetricFamily(
        "headroom_expert_hit_rate",
        "Share of chosen experts that were hot",
        labels=[*names, "layer"],
    )
    picks = CounterMetricFamily("headroom_expert_picks", "Experts chosen", labels=[*names, "layer"])
    for layer, rate in enumerate(experts.layer_hit_rates):
        if rate is not None:
            rates.add_metric([*values, str(layer)], rate)
            picks.add_metric([*values, str(layer)], experts.picks[layer])
    yield rates
    yield picks
    for name, text, count in (
        ("cold_expert_picks", "Chosen experts that were cold", experts.cold_picks),
        ("expert_swaps", "Experts that became hot while running", experts.exchanges),
    ):
        counter = CounterMetricFamily(f"headroom_{name}", text, labels=names)
        counter.add_metric(values, count)
        yield counter
    read = CounterMetricFamily(
        "headroom_cold_bytes", "Bytes of cold experts read, by path", labels=[*names, "path"]
    )
    for path, size in experts.cold_bytes.items():
        read.add_metric([*values, path], size)
    yield read
    times = CounterMetricFamily(
        "headroom_expert_seconds",
        "Seconds of experts: hot, cold, wait, copies",
        labels=[*names, "what"],
    )
    for what, seconds in experts.seconds.items():
        times.add_metric([*values, what], seconds)
    yield times


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, engines: Engines, *, by_model: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engines, by_model=by_model))
        self._requests = Counter(
            "headroom_http_requests",
            "HTTP requests, by endpoint and status",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._request_s = Histogram(
            "headroom_http_request_seconds",
            "Seconds from a request to the end of its answer",
            ["endpoint"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._first_token_s = Histogram(
            "headroom_time_to_first_token_seconds",
            "Seconds from a request's submission to its first token",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._token_s = Histogram(
            "headroom_time_per_token_seconds",
            "Seconds per token after the first, averaged over an answer",
            buckets=TOKEN_SECONDS,
            registry=self.registry,
        )

    def answer_ended(self, timings: Timings, generated_tokens: int) -> None:
        """Record the times of one answer."""
        self._first_token_s.observe(timings.queue_s + timings.prefill_s)
        if generated_tokens > 1:
            self._token_s.observe(timings.decode_s / (generated_tokens - 1))

    def request_ended(self, endpoint: str, status: int, seconds: float) -> None:
        """Record one HTTP request."""
        self._requests.labels(endpoint, str(status)).inc()
        self._request_s.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class MeasureRequests:
    """Middleware that records the status and the duration of every HTTP request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and record its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 500, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # Paths without a route share one label, so that clients cannot fill the registry.
            route = scope.get("route")
            endpoint = getattr(route, "path", "unknown")
            self._metrics.request_ended(endpoint, status, time.perf_counter() - began)
