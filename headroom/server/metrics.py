"""Prometheus metrics: counters of engines and HTTP requests, and how long clients wait."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headroom.engine.engine import Engine
from headroom.engine.request import Timings
from headroom.engine.stats import EngineStats, ExpertTelemetry

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
Engines = Callable[[], Mapping[str, Engine]]  # returns the engines of loaded models, by name
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class EngineCollector(Collector):
    """Reads the engines' counters for each request of /metrics."""

    def __init__(self, engines: Engines, *, by_model: bool) -> None:
        self._engines = engines
        self._by_model = by_model

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of one snapshot of each loaded model's engine."""
        families: dict[str, Metric] = {}
        snapshots = {model: engine.stats() for model, engine in self._engines().items()}
        for model, stats in snapshots.items():
            label = {"model": model} if self._by_model else {}
            for metric in engine_metrics(stats, label):
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples.extend(metric.samples)
        yield from families.values()
        process = _process_memory(snapshots.values())
        if process.samples:
            yield process


def _process_memory(snapshots: Iterable[EngineStats]) -> Metric:
    """Return the bytes of each GPU that the process holds; they cannot be split by model."""
    metric = GaugeMetricFamily(
        "headroom_memory_process_bytes",
        "Bytes of the device that the process holds for all models, with captured graphs",
        labels=["device"],
    )
    held = {memory.device: memory.process_bytes for stats in snapshots for memory in stats.memory}
    for device, size in held.items():
        if size is not None:
            metric.add_metric([device], size)
    return metric


def engine_metrics(stats: EngineStats, label: Mapping[str, str]) -> Iterable[Metric]:
    """Yield the metrics of one engine; `label` names its model if there are several."""
    names, values = list(label), list(label.values())
    gauges: dict[str, tuple[str, float]] = {
        "requests_running": ("Requests that are running", stats.requests_running),
        "requests_waiting": ("Requests in the queue", stats.requests_waiting),
        "cache_pages": ("Pages of the KV cache", stats.cache_pages_total),
        "cache_pages_used": ("Pages of the KV cache in use", stats.cache_pages_used),
        "prefix_pages": ("Unused pages that keep prefixes for later", stats.prefixes.idle_pages),
        "prefix_snapshots": ("Snapshots of states and windows", stats.prefixes.snapshots),
        "prefix_host_pages": ("Pages of prefixes in host memory", stats.prefixes.host_pages),
        "prefix_files": ("Files of prefixes that the model can read", stats.prefixes.files),
    }
    counters: dict[str, tuple[str, float]] = {
        "prompt_tokens": ("Prompt tokens computed", stats.prompt_tokens),
        "generated_tokens": ("Tokens generated", stats.generated_tokens),
        "draft_tokens": ("Tokens guessed ahead", stats.guessed_tokens),
        "draft_tokens_accepted": ("Guesses that were right", stats.accepted_tokens),
        "draft_tokens_held_back": ("Guesses that were not checked", stats.held_back_tokens),
        "steps": ("Steps computed", stats.steps),
        "preemptions": ("Requests preempted for lack of pages", stats.preemptions),
        "step_seconds": ("Seconds spent in steps", stats.step_s),
        "prompt_tokens_cached": ("Prompt tokens found in the cache", stats.prefixes.cached_tokens),
        "prefix_hits": ("Requests that began after a known prefix", stats.prefixes.hits),
        "prefix_file_hits": ("Prefixes that were read from files", stats.prefixes.file_hits),
        "prefix_misses": ("Requests without a known prefix", stats.prefixes.misses),
        "prefix_pages_evicted": ("Pages of prefixes given up", stats.prefixes.evicted_pages),
        "prefix_pages_demoted": ("Pages moved to host memory", stats.prefixes.demoted_pages),
        "prefix_pages_promoted": ("Pages copied back from it", stats.prefixes.promoted_pages),
        "prefix_snapshots_evicted": ("Snapshots given up", stats.prefixes.evicted_snapshots),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"headroom_{name}", text, labels=names)
        gauge.add_metric(values, value)
        yield gauge
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(f"headroom_{name}", text, labels=names)
        counter.add_metric(values, value)
        yield counter
    kept = GaugeMetricFamily(
        "headroom_prefix_bytes", "Bytes of kept prefixes, by tier", labels=[*names, "tier"]
    )
    prefixes = stats.prefixes
    for tier, size in (
        ("device", prefixes.idle_bytes),
        ("host", prefixes.host_bytes),
        ("disk", prefixes.file_bytes),
    ):
        kept.add_metric([*values, tier], size)
    yield kept
    by_device = [*names, "device"]
    planned = GaugeMetricFamily(
        "headroom_memory_planned_bytes",
        "Bytes of the device that the plan gives to the model",
        labels=by_device,
    )
    used = GaugeMetricFamily(
        "headroom_memory_used_bytes",
        "Bytes of the device that the model's engine has allocated",
        labels=by_device,
    )
    for memory in stats.memory:
        planned.add_metric([*values, memory.device], memory.planned_bytes)
        used.add_metric([*values, memory.device], memory.used_bytes)
    yield planned
    yield used
    finished = CounterMetricFamily(
        "headroom_requests_finished", "Requests ended, by reason", labels=[*names, "reason"]
    )
    for reason, count in stats.requests_finished.items():
        finished.add_metric([*values, reason], count)
    yield finished
    yield from stage_metrics(stats, label)
    if stats.parts is not None:
        parts = CounterMetricFamily(
            "headroom_step_part_seconds", "Seconds of steps, by part", labels=[*names, "part"]
        )
        for part, seconds in stats.parts.summary().items():
            parts.add_metric([*values, part], seconds)
        yield parts
    if stats.experts is not None:
        yield from expert_metrics(stats.experts, label)


def stage_metrics(stats: EngineStats, label: Mapping[str, str]) -> Iterable[Metric]:
    """Yield what the steps of each stage took; nothing if there is one stage."""
    described = {
        "stage_busy_seconds": ("Seconds of computing, by stage", "busy_s"),
        "stage_wait_seconds": ("Seconds of waiting for the stage before", "waited_s"),
        "handover_bytes": ("Bytes of rows for the stage after", "handover_bytes"),
        "handover_seconds": ("Seconds of handing rows over", "handover_s"),
    }
    for name, (text, field) in described.items() if stats.stages else ():
        counter = CounterMetricFamily(f"headroom_{name}", text, labels=[*label, "device"])
        for device, times in stats.stages:
            counter.add_metric([*label.values(), device], getattr(times, field))
        yield counter


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
        "Seconds spent on experts: hot, cold, wait, copies",
        labels=[*names, "what"],
    )
    for what, seconds in experts.seconds.items():
        times.add_metric([*values, what], seconds)
    yield times
    yield from _residency_metrics(experts, label)


def _residency_metrics(experts: ExpertTelemetry, label: Mapping[str, str]) -> Iterable[Metric]:
    """Yield why experts were in GPU memory, where the others were found, and who is how fast."""
    names, values = list(label), list(label.values())
    for name, text, by, counts in (
        ("expert_hits", "Chosen experts that were hot, by cause", "cause", experts.causes),
        ("expert_misses", "Cold experts of decode steps, by path", "path", experts.misses),
    ):
        counter = CounterMetricFamily(f"headroom_{name}", text, labels=[*names, by])
        for key, count in counts.items():
            counter.add_metric([*values, key], count)
        yield counter
    yield from _policy_metrics(experts, label)
    if (paces := experts.paces) is None:
        return
    share = GaugeMetricFamily(
        "headroom_cold_cpu_share",
        "Share of the cold experts of decode steps that the CPU is to compute",
        labels=names,
    )
    share.add_metric(values, paces.cpu_share)
    yield share
    speed = GaugeMetricFamily(
        "headroom_cold_pace",
        "Speed with cold experts as a share of the calibrated one: cpu, cpu_prompts, link",
        labels=[*names, "of"],
    )
    for of, pace in (("cpu", paces.cpu), ("cpu_prompts", paces.cpu_prompts), ("link", paces.link)):
        speed.add_metric([*values, of], pace)
    yield speed


def _policy_metrics(experts: ExpertTelemetry, label: Mapping[str, str]) -> Iterable[Metric]:
    """Yield by which policy slots change hands, and what each one would have hit lately."""
    if (state := experts.policy) is None:
        return
    names, values = [*label, "policy"], list(label.values())
    now = GaugeMetricFamily(
        "headroom_expert_policy", "1 for the policy by which slots change hands", labels=names
    )
    now.add_metric([*values, state.policy], 1)
    yield now
    rates = GaugeMetricFamily(
        "headroom_expert_policy_hit_rate",
        "Share of the last chosen experts that each policy would have found hot",
        labels=names,
    )
    for policy, rate in state.hit_rates.items():
        rates.add_metric([*values, policy], rate)
    yield rates


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
            "Seconds from an HTTP request to the end of its response",
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
