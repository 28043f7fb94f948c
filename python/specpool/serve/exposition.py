"""`exposition`: the page of `/metrics`: vLLM's names for its readers, and our own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specpool.engine.stats import EngineStats
from specpool.metrics import metrics as specpool_metrics
from specpool.serve.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Mapping


def exposition(counters: Counters, stats: EngineStats) -> tuple[bytes, str]:
    """Return the page and its media type."""

    class StatsCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from engine_families(stats, counters.labels)
            yield from specpool_metrics(stats, "specpool", {})

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatsCollector())
    return generate_latest(counters.registry) + generate_latest(registry), CONTENT_TYPE_LATEST


def engine_families(stats: EngineStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the engine's numbers in vLLM's names."""
    full = max(stats.groups, key=lambda group: group.used_pages / max(group.num_pages, 1))
    prefix = stats.prefix
    gauges = {
        "num_requests_running": ("Requests with a row.", stats.num_running),
        "num_requests_waiting": ("Requests without a row.", stats.num_waiting),
        "kv_cache_usage_perc": (
            "The fullest group's part of pages in use, 1 = all.",
            full.used_pages / max(full.num_pages, 1),
        ),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=[*labels])
        gauge.add_metric([*labels.values()], value)
        yield gauge
    counts: dict[str, tuple[str, float]] = {
        "num_preemptions": ("Retractions.", stats.retracted_ct),
        "spec_decode_num_drafts": ("Rows' rounds with drafts.", stats.drafted_round_ct),
        "spec_decode_num_draft_tokens": ("Drafts, right or wrong.", stats.draft_ct),
        "spec_decode_num_accepted_tokens": ("Accepted drafts.", stats.correct_draft_ct),
    }
    if prefix is not None:
        num_hits = prefix.hit_ct + prefix.host_ct
        counts["prefix_cache_queries"] = ("Prompt tokens looked up.", num_hits + prefix.miss_ct)
        counts["prefix_cache_hits"] = ("Prompt tokens whose KV was found.", num_hits)
    for name, (text, value) in counts.items():
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=[*labels])
        counter.add_metric([*labels.values()], value)
        yield counter
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts by their place behind the root.",
        labels=[*labels, "position"],
    )
    for position, count in enumerate(accepted_per_position(stats.accept_cts)):
        accepted.add_metric([*labels.values(), str(position)], count)
    yield accepted


def accepted_per_position(accept_cts: tuple[int, ...]) -> list[int]:
    """Return how often the first, second, .. draft of a round was accepted."""
    return [sum(accept_cts[position + 2 :]) for position in range(max(len(accept_cts) - 2, 0))]
