"""`register`: exports `Engine.stats` to Prometheus, at no cost between scrapes.

It needs `prometheus-client` (`pip install 'specpool[metrics]'`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from specpool.checks import shown
from specpool.engine.loop.clock import PhaseSeconds
from specpool.engine.scheduler.counts import Histogram
from specpool.engine.shape_names import name_of
from specpool.engine.stats import EngineStats
from specpool.errors import ConfigError

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
    "cached_pages": ("cached_pages", "Pages that only the prefix cache holds."),
    "used_pages": ("used_pages", "Pages that are neither free nor fenced nor cached."),
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
    "drafted_round_ct": ("drafted_row_rounds", "Rounds of single rows that had drafts."),
    "draft_ct": ("drafts", "Drafts that were proposed, right or wrong."),
    "forced_token_ct": ("forced_tokens", "Accepted drafts that the form of a text forced."),
    "correct_draft_ct": ("correct_drafts", "Drafts that were accepted."),
}

HISTOGRAMS = {
    "queue": ("queue_seconds", "Seconds from a request's arrival until it got a row."),
    "first_token": ("first_token_seconds", "Seconds from a request's arrival to its first token."),
    "request": ("request_seconds", "Seconds from a request's arrival to its end."),
}

# Registry -> prefix -> collector.
_COLLECTORS: WeakKeyDictionary[CollectorRegistry, dict[str, Any]] = WeakKeyDictionary()

PREFIX_GAUGES = {
    "num_entries": ("prefix_entries", "Entries of the prefix cache's index."),
    "num_tokens": ("prefix_tokens", "Tokens of these entries."),
    "num_bytes": ("prefix_index_bytes", "Bytes of the prefix cache's index, without the pages."),
}
PREFIX_COUNTERS = {
    "hit_ct": ("prefix_hit_tokens", "Tokens of admitted requests whose KV was found."),
    "host_ct": ("prefix_host_tokens", "Tokens of admitted requests whose KV was on the host."),
    "miss_ct": ("prefix_miss_tokens", "Tokens of admitted requests whose KV was not found."),
    "eviction_ct": ("prefix_evictions", "Entries and pages given up to make room."),
}
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
        registry: None means the client's default registry.
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
        raise ConfigError(f"engine must be an Engine, got {shown(engine)}")
    fixed = dict(labels or {})
    reserved = sorted({"group", "phase", "accept_len", "shape", "le"} & fixed.keys())
    if reserved:
        raise ConfigError(f"labels must not be called {', '.join(reserved)}: specpool has its own")

    class EngineCollector(Collector):
        def __init__(self) -> None:
            self.engines = [(engine, fixed)]

        def collect(self) -> Iterator[Metric]:
            families: dict[str, Metric] = {}
            for member, member_labels in self.engines:
                for family in metrics(member.stats(), prefix, member_labels):
                    families.setdefault(family.name, family)
                    if families[family.name] is not family:
                        families[family.name].samples += family.samples
            return iter(families.values())

        def describe(self) -> Iterator[Metric]:  # the registry reads the taken names from it
            return self.collect()

    registry, collector = registry or REGISTRY, EngineCollector()
    collectors = _COLLECTORS.setdefault(registry, {})
    try:
        registry.register(collector)
    except ValueError as error:
        return _join(registry, collectors.get(prefix), engine, fixed, prefix, error)
    collectors[prefix] = collector
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
    if collector is not None and any(
        labels == known_labels for _, known_labels in collector.engines
    ):
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
    joined: Collector = collector
    return joined


def metrics(stats: EngineStats, prefix: str, labels: dict[str, str]) -> Iterator[Metric]:
    """Yield a metric for every number of `stats`."""
    families = _Families(prefix, labels)
    for field, (name, text) in GROUP_GAUGES.items():
        of_groups = [(group.name, getattr(group, field)) for group in stats.groups]
        yield families.gauge(f"group_{name}", text, of_groups, label="group")
    yield from families.gauges(GAUGES, stats)
    yield from families.counters(COUNTERS, stats)
    accepts = [(str(length), ct) for length, ct in enumerate(stats.accept_cts[1:], 1)]
    text = "Rounds of single rows by accept length."
    yield families.counter("accepts", text, accepts, label="accept_len")
    seconds = [(phase.name, getattr(stats.seconds, phase.name)) for phase in fields(PhaseSeconds)]
    yield families.counter("phase_seconds", "Seconds by phase.", seconds, label="phase")
    for field, (name, text) in HISTOGRAMS.items():
        yield families.histogram(name, text, getattr(stats.latency, field))
    if stats.adaptive is not None:
        text = "Rounds for which another shape was chosen than for the round before."
        yield families.counter("switches", text, [("", stats.adaptive.switch_ct)])
        chosen = [(name_of(shape), ct) for shape, ct in stats.adaptive.round_cts.items()]
        yield families.counter("chosen_rounds", "Rounds by chosen shape.", chosen, label="shape")
        text = "Rounds of single rows that were expected to miss their tpot_ms."
        yield families.counter("missed_row_rounds", text, [("", stats.adaptive.missed_ct)])
    if stats.prefix is not None:
        yield from families.gauges(PREFIX_GAUGES, stats.prefix)
        yield from families.counters(PREFIX_COUNTERS, stats.prefix)
    if stats.graphs is not None:
        yield from families.gauges(GRAPH_GAUGES, stats.graphs)
        yield from families.counters(GRAPH_COUNTERS, stats.graphs)


class _Families:
    """Metrics that share a prefix and fixed labels."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._labels = labels

    def gauge(
        self, name: str, text: str, samples: Iterable[tuple[str, float]], label: str | None = None
    ) -> Metric:
        """Return a gauge with these values of the label; without one, of one sample."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily, name, text, samples, label)

    def counter(
        self, name: str, text: str, samples: Iterable[tuple[str, float]], label: str | None = None
    ) -> Metric:
        """Return a counter, see `gauge`."""
        from prometheus_client.metrics_core import CounterMetricFamily

        return self._filled(CounterMetricFamily, name, text, samples, label)

    def gauges(self, table: Mapping[str, tuple[str, str]], stats: object) -> Iterator[Metric]:
        """Yield a gauge for each field of the table."""
        for field, (name, text) in table.items():
            yield self.gauge(name, text, [("", getattr(stats, field))])

    def counters(self, table: Mapping[str, tuple[str, str]], stats: object) -> Iterator[Metric]:
        """Yield a counter for each field of the table."""
        for field, (name, text) in table.items():
            yield self.counter(name, text, [("", getattr(stats, field))])

    def histogram(self, name: str, text: str, observed: Histogram) -> Metric:
        """Return a histogram of the observed values."""
        from prometheus_client.metrics_core import HistogramMetricFamily

        totals = itertools.accumulate(observed.cts)
        buckets = [
            ("+Inf" if math.isinf(bound) else str(bound), total)
            for bound, total in zip(observed.bounds, totals, strict=True)
        ]
        family = HistogramMetricFamily(f"{self._prefix}_{name}", text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], buckets, observed.sum_seconds)
        return family

    def _filled(
        self,
        kind: Any,
        name: str,
        text: str,
        samples: Iterable[tuple[str, float]],
        label: str | None,
    ) -> Metric:
        more = [] if label is None else [label]
        family: Metric = kind(f"{self._prefix}_{name}", text, labels=[*self._labels, *more])
        for value, number in samples:
            label_values = [] if label is None else [value]
            family.add_metric([*self._labels.values(), *label_values], number)  # type: ignore[attr-defined]
        return family
