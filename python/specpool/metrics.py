"""`register`: exports `Engine.stats` to Prometheus, at no cost between scrapes.

It needs `prometheus-client` (`pip install 'specpool[metrics]'`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from specpool.engine.stats import EngineStats
from specpool.errors import ConfigError
from specpool.loop.clock import PhaseSeconds
from specpool.shape_names import name_of

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector, CollectorRegistry

    from specpool.engine.engine import Engine

# Field -> (metric name without the prefix, help text). Counters get the suffix `_total`.
GROUP_GAUGES = {
    "page_size": ("page_size_slots", "Slots of a page."),
    "num_pages": ("pages", "Pages in all."),
    "free_pages": ("free_pages", "Pages that can be handed out."),
    "fenced_pages": ("fenced_pages", "Freed pages that a launched step may still touch."),
    "used_pages": ("used_pages", "Pages that are neither free nor fenced."),
    "pinned_pages": ("pinned_pages", "Pages of pinned texts."),
    "reclaimable_pages": ("reclaimable_pages", "Pages that sessions keep between their turns."),
    "quarantined_pages": ("quarantined_pages", "Pages that the busy check took out of use."),
    "used_tokens": ("used_tokens", "Slots with KV of a token."),
    "unused_slots": ("unused_slots", "Slots reserved beyond the tokens with KV."),
}
GAUGES = {
    "num_rows": ("rows", "Rows in all."),
    "num_free_rows": ("free_rows", "Rows that can be taken."),
    "num_quarantined_rows": ("quarantined_rows", "Rows that the busy check took out of use."),
    "num_running": ("running_requests", "Requests with a row."),
    "num_waiting": ("waiting_requests", "Requests without a row."),
    "num_sessions": ("sessions", "Sessions that are open."),
    "num_idle_sessions": ("idle_sessions", "Sessions that keep KV between their turns."),
    "accept_len": ("accept_len", "Mean tokens of a row's round, bonus included."),
}
COUNTERS = {
    "retracted_ct": ("retractions", "Retractions."),
    "finished_ct": ("finished_requests", "Requests that ended by a stop or their length."),
    "failed_ct": ("failed_requests", "Requests that ended with an error."),
    "aborted_ct": ("aborted_requests", "Requests that were given up."),
    "finding_ct": ("busy_check_findings", "What the busy check has found."),
    "round_ct": ("rounds", "Decode steps."),
    "prefill_ct": ("prefills", "Prefill steps."),
    "prefilled_token_ct": ("prefilled_tokens", "Tokens of prefill steps."),
    "generated_token_ct": ("generated_tokens", "Tokens that the steps gave."),
    "verify_ct": ("row_rounds", "Rounds of single rows."),
    "correct_draft_ct": ("correct_drafts", "Drafts that were accepted."),
}

HISTOGRAMS = {
    "queue": ("queue_seconds", "Seconds from a request's arrival until it got a row."),
    "first_token": ("first_token_seconds", "Seconds from a request's arrival to its first token."),
    "request": ("request_seconds", "Seconds from a request's arrival to its end."),
}

# Registry -> prefix -> collector.
_COLLECTORS: WeakKeyDictionary[CollectorRegistry, dict[str, Any]] = WeakKeyDictionary()

GRAPH_GAUGES = {
    "num_graphs": ("graphs", "Decode rounds captured as CUDA graphs."),
    "num_bytes": ("graph_bytes", "Device memory that the CUDA graphs take."),
}
GRAPH_COUNTERS = {
    "replay_ct": ("replayed_rounds", "Decode steps that replayed a CUDA graph."),
    "eager_ct": ("eager_rounds", "Decode steps that had no CUDA graph to replay."),
}


def register(
    engine: Engine,
    registry: CollectorRegistry | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    prefix: str = "specpool",
) -> Collector:
    """Export the engine's numbers with every scrape of the registry.

    A metric name belongs to one collector. A further engine with the same prefix joins the existing
    collector if its labels differ.

    Args:
        engine: read at each scrape, and kept alive while the collector is registered.
        registry: None = the client's default registry.
        labels: fixed labels of every sample of this engine, such as `{"engine": "2"}`.
        prefix: the prefix of every metric name.

    Returns:
        The collector. `registry.unregister` removes it with all its engines.

    Raises:
        ConfigError: `engine` is not an Engine; prometheus-client is not installed; a label is
            called `group`, `phase`, `accept_len`, `shape` or `le`; an engine with the same labels
            is registered; or another library's collector has the names.
    """
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.registry import Collector
    except ModuleNotFoundError:
        raise ConfigError(
            "metrics need prometheus-client: pip install 'specpool[metrics]'"
        ) from None
    if not callable(getattr(engine, "stats", None)):
        raise ConfigError(f"engine must be an Engine, got {engine!r:.80}")
    fixed = dict(labels or {})
    taken = sorted({"group", "phase", "accept_len", "shape", "le"} & fixed.keys())
    if taken:
        raise ConfigError(f"labels must not be called {', '.join(taken)}: specpool has its own")

    class EngineCollector(Collector):
        def __init__(self) -> None:
            self.engines = [(engine, fixed)]

        def collect(self) -> Iterator[Metric]:
            families: dict[str, Metric] = {}
            for each, own in self.engines:
                for family in metrics(each.stats(), prefix, own):
                    families.setdefault(family.name, family)
                    if families[family.name] is not family:
                        families[family.name].samples += family.samples
            return iter(families.values())

        def describe(self) -> Iterator[Metric]:  # the registry reads the taken names from it
            return self.collect()

    registry, collector = registry or REGISTRY, EngineCollector()
    known = _COLLECTORS.setdefault(registry, {})
    try:
        registry.register(collector)
    except ValueError as error:
        return _join(registry, known.get(prefix), engine, fixed, prefix, error)
    known[prefix] = collector
    return collector


def _join(
    registry: CollectorRegistry,
    collector: Any,
    engine: Engine,
    labels: dict[str, str],
    prefix: str,
    error: ValueError,
) -> Collector:
    """Add an engine to the existing collector of this prefix."""
    if collector is not None and any(labels == own for _, own in collector.engines):
        raise ConfigError(
            f"an engine is registered as {prefix!r} with labels {labels} already: give this one "
            "labels of its own, such as labels={'engine': '2'}, or another prefix"
        )
    try:
        if collector is None:
            raise KeyError(prefix)
        registry.unregister(collector)
    except KeyError:  # our collector is not registered, so another collector has the names
        raise ConfigError(f"{error}; choose another prefix than {prefix!r}") from None
    collector.engines.append((engine, labels))
    registry.register(collector)
    found: Collector = collector
    return found


def metrics(stats: EngineStats, prefix: str, labels: dict[str, str]) -> Iterator[Metric]:
    """Yield a metric for every number of `stats`."""
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    names, values = [*labels], [*labels.values()]

    def family(kind: Any, name: str, text: str, *more: str) -> Any:
        return kind(f"{prefix}_{name}", text, labels=[*names, *more])

    for field, (name, text) in GROUP_GAUGES.items():
        gauge = family(GaugeMetricFamily, f"group_{name}", text, "group")
        for group in stats.groups:
            gauge.add_metric([*values, group.name], getattr(group, field))
        yield gauge
    for field, (name, text) in GAUGES.items():
        gauge = family(GaugeMetricFamily, name, text)
        gauge.add_metric(values, getattr(stats, field))
        yield gauge
    for field, (name, text) in COUNTERS.items():
        counter = family(CounterMetricFamily, name, text)
        counter.add_metric(values, getattr(stats, field))
        yield counter
    accepts = family(
        CounterMetricFamily, "accepts", "Rounds of single rows by accept length.", "accept_len"
    )
    for length, ct in enumerate(stats.accept_cts[1:], 1):
        accepts.add_metric([*values, str(length)], ct)
    yield accepts
    seconds = family(CounterMetricFamily, "phase_seconds", "Seconds by phase.", "phase")
    for each in fields(PhaseSeconds):
        seconds.add_metric([*values, each.name], getattr(stats.seconds, each.name))
    yield seconds
    for field, (name, text) in HISTOGRAMS.items():
        found = getattr(stats.latency, field)
        totals = itertools.accumulate(found.cts)
        buckets = [
            ("+Inf" if math.isinf(bound) else str(bound), total)
            for bound, total in zip(found.bounds, totals, strict=True)
        ]
        histogram = family(HistogramMetricFamily, name, text)
        histogram.add_metric(values, buckets, found.sum_seconds)
        yield histogram
    if stats.adaptive is not None:
        text = "Rounds for which another shape was chosen than for the round before."
        switches = family(CounterMetricFamily, "switches", text)
        switches.add_metric(values, stats.adaptive.switch_ct)
        yield switches
        chosen = family(CounterMetricFamily, "chosen_rounds", "Rounds by chosen shape.", "shape")
        for shape, ct in stats.adaptive.round_cts.items():
            chosen.add_metric([*values, name_of(shape)], ct)
        yield chosen
    if stats.graphs is not None:
        for field, (name, text) in GRAPH_GAUGES.items():
            gauge = family(GaugeMetricFamily, name, text)
            gauge.add_metric(values, getattr(stats.graphs, field))
            yield gauge
        for field, (name, text) in GRAPH_COUNTERS.items():
            counter = family(CounterMetricFamily, name, text)
            counter.add_metric(values, getattr(stats.graphs, field))
            yield counter
